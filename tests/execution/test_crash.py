"""Nothing is lost: a merge killed at any moment finishes when the same command runs again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.snapshots.find import list_snapshots
from mergepipe_pipeline.storage import atomic
from mergepipe_pipeline.verbs.publish import publish
from mergepipe_pipeline.verbs.verify import verify
from mergepipe_pipeline.warehouse import Warehouse


class CrashError(BaseException):
    """Stands for the end of the process; no handler of the code under test catches it."""


def test_a_crash_at_any_write_leaves_the_old_state_or_the_new_and_a_retry_succeeds(
    tmp_path: Path, recipe_text: Callable[..., str]
) -> None:
    home = Warehouse.at(tmp_path / "w").ensure()
    raw = parse(recipe_text(experts=2), name="r", where="r")
    expected = run_plan(
        Warehouse.at(tmp_path / "o").ensure(), make_plan(Warehouse.at(tmp_path / "o"), raw)
    ).snapshot.snapshot_id
    crashes = 0
    while True:
        remaining = 3 * crashes  # every third step, each time further

        def hook(step: str) -> None:
            nonlocal remaining
            remaining -= 1
            if remaining < 0:
                raise CrashError(step)

        atomic.crash_hook = hook if crashes < 20 else None
        try:
            outcome = run_plan(home, make_plan(home, raw))
            publish(home, outcome.snapshot.snapshot_id, "live")
            break
        except CrashError:
            crashes += 1
        finally:
            atomic.crash_hook = None
        for snapshot in list_snapshots(home.snapshots):
            verify(home, snapshot.snapshot_id)
    assert crashes > 5
    assert outcome.snapshot.snapshot_id == expected
    assert home.refs.current("live").snapshot_id == expected
    verify(home, "live")


def merging(recipe: Path, home: Path) -> list[str]:
    """The command that merges a recipe and prints a record."""
    program = [sys.executable, "-m", "mergepipe_pipeline.cli.main"]
    return [*program, "merge", str(recipe), "--json", "--home", str(home)]


@pytest.mark.parametrize("delay_s", [1.0, 1.6])
def test_kill_9_in_the_middle_then_the_same_command_finishes_and_verifies(
    tmp_path: Path, recipe_text: Callable[..., str], delay_s: float
) -> None:
    recipe = tmp_path / "r.yml"
    recipe.write_text(recipe_text())
    command = [*merging(recipe, tmp_path / "w"), "--window-size", "64"]
    victim = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(delay_s)
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    summary = json.loads(done.stdout)
    assert summary["layers_executed"] + summary["layers_reused"] == 4
    verify(Warehouse.at(tmp_path / "w"), summary["snapshot_id"])


def test_two_merges_of_one_recipe_at_once_end_with_one_snapshot(
    tmp_path: Path, recipe_text: Callable[..., str]
) -> None:
    recipe = tmp_path / "r.yml"
    recipe.write_text(recipe_text())
    command = merging(recipe, tmp_path / "w")
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [p.communicate()[0] for p in both]
    assert [p.returncode for p in both] == [0, 0]
    ids = {json.loads(o)["snapshot_id"] for o in outputs}
    assert len(ids) == 1
    verify(Warehouse.at(tmp_path / "w"), ids.pop())


def test_other_processes_hash_seeds_windows_threads_and_blocks_give_the_same_ids(
    tmp_path: Path, recipe_text: Callable[..., str]
) -> None:
    recipe = tmp_path / "r.yml"
    recipe.write_text(recipe_text("dare_ties", "{density: 0.5}"))
    ids = set()
    knobs = [("0", []), ("7", ["--threads", "1", "--window-size", "999", "--block-size", "65536"])]
    for i, (seed, options) in enumerate(knobs):
        command = [
            *(sys.executable, "-m", "mergepipe_pipeline.cli.main", "merge", str(recipe)),
            *("--json", "--home", str(tmp_path / str(i)), *options),
        ]
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        summary = json.loads(done.stdout)
        ids.add((summary["plan_id"], summary["snapshot_id"]))
    assert len(ids) == 1
