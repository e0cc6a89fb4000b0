"""A recipe over a run is merged anew as its steps land, and its window slides: each step once."""

from __future__ import annotations

import shutil
from pathlib import Path

import dagster as dg
import pytest

from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs.publish import history
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import records_of, shown
from tests.dagster_layer.test_experts import jobs

pytestmark = pytest.mark.filterwarnings("ignore::Warning")


@pytest.mark.parametrize("method", ["linear", "mean"])
def test_a_window_slides_with_each_step_that_lands_and_nothing_is_merged_twice(
    home: Warehouse, family: Path, ticker: Ticker, instance: dg.DagsterInstance, method: str
) -> None:
    weights = ", weights: {schedule: minus_sqrt}" if method == "linear" else ""
    entry = f"{{run: math, last: 2, every: 100{weights}}}"
    home.recipe_path("window").write_text(f"merge_method: {method}\nmodels: [{entry}]\n")
    run = home.inbox / "math"

    def save(step: int, source: int) -> list[str]:
        shutil.copytree(family / f"expert_{source:02d}", run / f"checkpoint-{step}")
        return jobs(ticker.tick())

    def window() -> list[str]:
        (file,) = recipe_files(home)
        return list(file.members)

    assert save(100, 0) == ["math.step-100", "merge_window"]
    assert save(200, 1) == ["math.step-200", "merge_window"]
    assert window() == ["math.step-100", "math.step-200"]
    assert save(250, 3) == ["math.step-250"]
    assert save(300, 2) == ["math.step-300", "merge_window"]
    assert window() == ["math.step-200", "math.step-300"]
    assert jobs(ticker.tick()) == []
    versions = history(home, "window")
    assert [version.number for version in versions] == [1, 2, 3]
    assert len({version.snapshot_id for version in versions}) == 3
    said = records_of(shown(instance, "window", "plan")["selected"])
    assert {row["expert"]: row["taken, or why not"] for row in said} == {
        "math.step-100": "it is not of the last 2",
        "math.step-200": "taken",
        "math.step-250": "100 does not divide its step",
        "math.step-300": "taken",
    }
