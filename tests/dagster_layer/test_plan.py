"""The plan asset: what it promises, and what other budgets would, for the UI to show."""

from __future__ import annotations

import re
from base64 import b64decode

import dagster as dg
import pytest
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.planner.budget_curve import SHARES
from mergepipe_pipeline.verbs.deploy import current_plan
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop, plain, records_of

pytestmark = pytest.mark.filterwarnings("ignore::Warning")


def metadata_of(home: Warehouse, drop: Drop, text: str, not_finite: str = "") -> dict[str, object]:
    """What the plan asset of a recipe of two experts reports."""
    names = ["expert_00", "expert_01"]
    for name in ("base", *names):
        drop(name)
        if name == not_finite:
            weights = load_file(home.inbox / name / "model.safetensors")
            weights["model.norm.weight"][0] = float("nan")
            save_file(weights, home.inbox / name / "model.safetensors", {"format": "pt"})
        register(home, str(home.inbox / name), name, None if name == "base" else "base")
    models = "".join(f"  - model: {name}\n    parameters: {{weight: 0.5}}\n" for name in names)
    home.recipe_path("a").write_text(f"{text}models:\n{models}")
    key = dg.AssetKey(["a", "plan"])
    graph = build_definitions(home)
    assets = [a for a in graph.assets or () if isinstance(a, dg.AssetsDefinition)]
    (asset,) = [a for a in assets if a.keys == {key}]
    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize([asset], instance=instance, resources=graph.resources)
        (made,) = result.asset_materializations_for_node("a__plan")
    return plain(made.metadata)


def test_the_plan_shows_its_promises_its_curve_and_what_it_reads(
    home: Warehouse, drop: Drop
) -> None:
    recipe = "merge_method: task_arithmetic\nbase_model: base\nbudget: 40%\n"
    shown = metadata_of(home, drop, recipe)
    e = current_plan(home, "a").estimates
    assert shown["predicted error (L2)"] == pytest.approx(e.predicted_error, rel=1e-3)
    keys = [key for key in shown if key != "warnings"]
    assert keys[:2] == ["recipe", "in short"]
    assert keys[2:4] == ["loss by budget", "budgets"]
    assert str(shown["recipe"]).startswith(f"~~~yaml\n{recipe}")
    assert e.predicted_error
    assert e.update_norm
    read, total = (f"{n / 1024:.3g}" for n in (e.expert_bytes_planned, e.expert_bytes_total))
    lost = 100 * e.predicted_error / e.update_norm
    assert shown["in short"] == f"reads {read} of {total} KiB, predicted to lose {lost:.0f} %"
    for name in ("predicted error (L2)", "error bound (share of the update)"):
        assert len(str(shown[name]).replace(".", "").lstrip("0")) <= 4
    assert shown["margin of the predicted error (L2)"] == pytest.approx(
        e.predicted_margin, rel=1e-3
    )
    assert shown["error bound (L2)"] == pytest.approx(e.error_bound, rel=1e-3)
    assert shown["separate reads"] == e.reads
    assert len(records_of(shown["budgets"])) == len(SHARES)
    for name in ("loss by budget", "share read"):
        match = re.fullmatch(r"!\[.+\]\(data:image/png;base64,([\w+/=]+)\)", str(shown[name]))
        assert match
        assert b64decode(match[1]).startswith(b"\x89PNG\r\n\x1a\n")
        assert len(match[0]) < 80_000


def test_a_plan_without_a_base_has_no_curve(home: Warehouse, drop: Drop) -> None:
    shown = metadata_of(home, drop, "merge_method: linear\n")
    assert not any("loss by budget" in key for key in shown)
    assert "predicted error (L2)" not in shown
    assert str(shown["in short"]).startswith("reads all of ")
    assert "expert GiB saved" not in shown
    assert shown["budget GiB"] == "none"


def test_the_error_of_a_plan_over_an_expert_with_nan_is_said_to_be_unknown(
    home: Warehouse, drop: Drop
) -> None:
    recipe = "merge_method: task_arithmetic\nbase_model: base\nbudget: 40%\n"
    shown = metadata_of(home, drop, recipe, not_finite="expert_00")
    for key in ("predicted error", "budgets"):
        assert shown[key] == "unknown: an expert holds NaN or infinity"
    assert "predicted error (L2)" not in shown
    assert not any("loss by budget" in key for key in shown)
