"""A run's folder in the inbox: its steps are experts there, as long as the trainer keeps them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mergepipe_pipeline.deploy.inbox import arrivals_at_fault, scan_inbox
from mergepipe_pipeline.deploy.runs import link_steps
from mergepipe_pipeline.domain.selector import Selector
from mergepipe_pipeline.resolution.selected import Registered
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.warehouse import Warehouse


@pytest.fixture
def run(home: Warehouse, family: Path, tmp_path: Path) -> Path:
    """A run outside, with two steps, that the inbox leads to."""
    folder = tmp_path / "out" / "math"
    for i in range(2):
        shutil.copytree(family / f"expert_{i:02d}", folder / f"checkpoint-{i + 1}00")
    (home.inbox / "math").symlink_to(folder)
    return folder


def ready(home: Warehouse) -> list[str]:
    link_steps(home)
    return [entry.name for entry in scan_inbox(home, 0.0) if entry.is_ready]


def test_steps_arrive_one_by_one_and_leave_when_the_trainer_removes_them(
    home: Warehouse, run: Path, family: Path
) -> None:
    assert ready(home) == ["math.step-100", "math.step-200"]
    for name in ready(home):
        index_arrival(home, name)
    assert ready(home) == []
    assert not arrivals_at_fault(home)
    shutil.copytree(family / "expert_02", run / "checkpoint-300")
    shutil.rmtree(run / "checkpoint-100")
    assert ready(home) == ["math.step-300"]
    index_arrival(home, "math.step-300")
    taken = Registered(home)("models[0]", Selector(run="math"), {})
    assert taken.taken == ("math.step-200", "math.step-300")
    assert "it is gone" in dict(taken.left)["math.step-100"]


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_run_on_a_disk_that_is_away_keeps_its_steps(
    home: Warehouse, run: Path, is_empty: bool
) -> None:
    assert len(ready(home)) == 2
    shutil.rmtree(run)
    if is_empty:
        run.mkdir()
    link_steps(home)
    assert {p.name for p in home.inbox.iterdir()} == {"math", "math.step-100", "math.step-200"}


def test_a_step_in_two_folders_or_from_two_places_is_left_out_and_said(
    home: Warehouse, run: Path, family: Path
) -> None:
    shutil.copytree(family / "expert_00", run / "step_100")
    shutil.copytree(family / "expert_00", home.inbox / "math.step-200")
    link_steps(home)
    (entry,) = (x for x in scan_inbox(home, 0.0) if not x.is_ready)
    assert entry.name == "math"
    assert (
        entry.fault
        == entry.waiting
        == (
            "checkpoint-100 and step_100 are one step: move one of them away; "
            "math.step-200 has landed from elsewhere: checkpoint-200 is left out"
        )
    )
    assert not os.path.lexists(home.inbox / "math.step-100")


def test_a_model_whose_folder_has_steps_stays_an_expert_itself(
    home: Warehouse, run: Path, family: Path
) -> None:
    shutil.copytree(family / "expert_03", run, dirs_exist_ok=True)
    assert ready(home) == ["math", "math.step-100", "math.step-200"]
