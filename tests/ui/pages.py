"""A small deployment that shows everything, and the pages of it that people open first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dagster import DagsterRunStatus as Status

from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.daemon import Daemon, running_daemon
from tests.support.family import Size, tensors_of, write_model
from tests.ui.chromium import Page

SIZE: Size = {"layers": 8, "hidden": 16, "vocab": 64}
NAN = "model.layers.3.mlp.up_proj.weight"
#: What a page may take for HTML, code, emphasis or the end of a table's cell; a folder's name too.
ODD = "<b>x<b> `y` |z| _w_ <script>"
#: The tensor with a NaN, where its name is odd.
ODD_NAN = f"model.layers.3.{ODD}</script>.weight"


@dataclass(frozen=True, slots=True)
class View:
    """A page: its address under the webserver's, the words that must be seen, pixels.

    `scroll_to` is a text of the page that is brought into sight.
    """

    path: str
    words: tuple[str, ...]
    height: int = 760
    scroll_to: str | None = None


_GROUP = "/locations/mergepipe/asset-groups"
VIEWS = {
    "overview": View("/asset-groups", ("assistant", "catalog", "nightly_bad")),
    "lineage": View(
        f"{_GROUP}/assistant/lineage",
        ("expert_index", "conflicts", "plan", "merge", "layers", "snapshot", "release", "report"),
    ),
    "plan": View(
        "/assets/assistant/plan",
        ("merge_method: ties", "in short", "predicted to lose", "loss by budget", "Owners"),
        height=1250,
        scroll_to="Metadata",
    ),
    "status": View(
        "/assets/pipeline_status",
        ("assistant", "current", "nightly_bad", "failed", "mend the expert"),
        scroll_to="Metadata",
    ),
    "sensor": View(
        "/locations/mergepipe/sensors/recipe_sensor",
        ("Starts the merge of every recipe", "runs requested"),
    ),
    "check": View(
        "/assets/nightly_bad/snapshot?view=checks&checkDetail=all_finite",
        ("all_finite", "1 in model.layers.3.", "Next: mend the expert"),
    ),
}


def odd_views(home: Warehouse, run_id: str) -> tuple[View, ...]:
    """The pages that show the folder of a deployment, or the tensor `ODD_NAN`, letter by letter."""
    broken, warning = str(home.inbox / "broken"), f"the filter '{ODD_NAN}!' matches no tensor"
    return (
        View("/assets/expert_index?view=partitions&partition=broken", (broken,)),
        View("/assets/nightly_bad/plan", (broken, warning)),
        View("/assets/nightly_bad/snapshot", (str(home.snapshots),)),
        View(VIEWS["check"].path, (f"1 in {ODD_NAN}; file", str(home.snapshots))),
        View(f"/runs/{run_id}", (ODD_NAN,)),
    )


def fill(home: Warehouse, nan: str = NAN) -> None:
    """A recipe that is merged, and one whose expert holds a NaN in the tensor that is named."""
    for i, name in enumerate(("base", "math", "code", "broken")):
        tensors = tensors_of(0, i - 1 if i else None, **SIZE)
        tensors[nan] = tensors.pop(NAN)
        if name == "broken":
            tensors[nan][0, 0] = float("nan")
        write_model(home.inbox / name, tensors, **SIZE)
    _write_recipe(home, "assistant", ("math", "code"), 'trigger: change\nschedule: "30 2 * * *"\n')
    idle = json.dumps([{"filter": f"{nan}!", "value": 1}, {"value": 0.5}])
    _write_recipe(home, "nightly_bad", ("math", "broken"), density=idle)


def _write_recipe(
    home: Warehouse, name: str, experts: tuple[str, ...], extra: str = "", density: str = "0.5"
) -> None:
    models = "".join(f"  - model: {e}\n    parameters: {{weight: 0.5}}\n" for e in experts)
    home.recipe_path(name).write_text(
        f"merge_method: ties\nbase_model: base\nmodels:\n{models}"
        f"parameters: {{density: {density}}}\nbudget: 50%\n{extra}"
    )


@contextmanager
def running(home: Warehouse, nan: str = NAN, **environment: str) -> Iterator[Daemon]:
    """`mergepipe ui` over the deployment, once one recipe is released and the other has failed."""
    fill(home, nan)
    owners = {"MERGEPIPE_OWNERS": "team:models"}
    with running_daemon(home, ui="mergepipe", **owners, **environment) as daemon:
        daemon.wait_for(
            "a release and a refusal",
            lambda: (
                daemon.runs("merge_assistant", Status.SUCCESS)
                and daemon.runs("merge_nightly_bad", Status.FAILURE)
            ),
            seconds=240,
        )
        daemon.wait_for(
            "a tick that says so",
            lambda: any("release is current" in said for said in daemon.skips("recipe_sensor")),
        )
        yield daemon


def show(page: Page, daemon: Daemon, view: View) -> str:
    """Open a view, wait for its words, and give all words that are seen."""
    page.open(f"http://127.0.0.1:{daemon.port}{view.path}", 1400, view.height)
    text = page.wait_for(*view.words)
    if view.scroll_to:
        page.scroll_to(view.scroll_to)
    return text


def warehouse(folder: Path) -> Warehouse:
    """An empty warehouse in a folder."""
    return Warehouse.at(folder / "warehouse").ensure()
