"""The suspect is found among those that changed, at no more than the stated cost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.errors import GateError, NotFoundError
from mergepipe_pipeline.execution.lookup import provenance_of
from mergepipe_pipeline.quality.bisection import Bisection
from mergepipe_pipeline.snapshots.find import list_snapshots
from mergepipe_pipeline.verbs.bisect import Prepared, bisect, prepare
from mergepipe_pipeline.verbs.gc import collect
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import quarantine
from mergepipe_pipeline.verbs.replace import move_to_cold
from mergepipe_pipeline.warehouse import Warehouse
from tests.quality.world import World


def _one_of_three_is_bad(world: World) -> None:
    assert world.becomes(a=1.1, b=1.1, c=(1.0, {"layer_2": 9.0})) is not None


def test_the_suspect_expert_and_its_layer_are_found_at_no_more_than_the_stated_cost(
    world: World,
) -> None:
    home = world.home
    _one_of_three_is_bad(world)
    live, before = home.refs.current("mix"), _snapshots(home)
    prepared = prepare(home, "mix")
    told = list[str]()
    found = bisect(home, prepared, tell=told.append)
    assert (found.suspect, found.layers) == ("c", ("layer.02",))
    assert found.undoing[0].startswith("without it (its live version is gone: ")
    assert "c is the suspect: the gate passes without it" in found.summary
    assert len(told) == len(found.candidates)
    distance = {c.undone: c.metrics["distance"] for c in found.candidates if c.layers is None}
    assert distance["c",] == pytest.approx(0.25, abs=0.1)
    assert distance["b",] > 1
    _costs_no_more(home, prepared, found, before)
    assert home.refs.current("mix") == live
    # Nobody's results: a collection takes the candidates, and leaves what is live and refused.
    collect(home, older_than_s=0)
    assert _snapshots(home) == before


def _snapshots(home: Warehouse) -> set[str]:
    return {s.snapshot_id for s in list_snapshots(home.snapshots)}


def _costs_no_more(
    home: Warehouse, prepared: Prepared, found: Bisection, before: set[str], stages: int = 1
) -> None:
    made = [s for s in list_snapshots(home.snapshots) if s.snapshot_id not in before]
    costs = [provenance_of(s)["realised"] for s in made]
    nbytes = sum(c["expert_bytes_read"] + c["base_bytes_read"] for c in costs)
    cost = prepared.cost
    assert 0 < len(found.candidates) <= cost.candidates
    assert 0 < sum(c["layers_executed"] > 0 for c in costs) <= cost.merges * stages
    assert sum(c["layers_executed"] for c in costs) <= cost.layers
    assert nbytes <= cost.nbytes


@pytest.mark.parametrize("place", ["its folder", "its pack"])
def test_an_expert_goes_back_to_its_live_version_where_that_can_be_had(
    world: World, tmp_path: Path, place: str
) -> None:
    home = world.home
    live = {"its folder": 1.01, "its pack": 1.02}[place]  # that no other test finds here
    world.make(tmp_path / "one", live, {})
    world.make(tmp_path / "two", live, {"layer_1": 9.0})
    shutil.rmtree(home.inbox / "c")
    world.register("c", tmp_path / "one")
    assert world.run() is None
    if place == "its pack":
        (packed,) = pack(home, ["c"], base="base")
        move_to_cold(home, packed, tmp_path / "cold")
        shutil.rmtree(tmp_path / "cold")
    world.register("c", tmp_path / "two")
    world.index("a", 1.1)
    assert world.run() is not None
    found = bisect(home, prepare(home, "mix"))
    world.forget()
    assert found.suspect == "c"
    assert found.undoing[0].startswith("with version ")
    told = f"c is the suspect: the gate passes {found.undoing[0]} in layer.01 (of 6 layers)"
    assert found.summary == told


def test_changes_that_are_bad_together_and_a_recipe_that_says_otherwise_accuse_no_expert(
    world: World,
) -> None:
    home = world.home
    assert world.becomes(a=5.0, b=5.0) is not None
    found = bisect(home, prepare(home, "mix"))
    assert (found.suspect, found.suspects) == (None, ("a", "b"))
    assert found.summary == (
        "it is not known which of a, b is to blame: the gate does not pass without a, b either, "
        "and what is live of them is gone; keep each version in a folder of its own"
    )

    world.write(weight=1.0)
    assert world.becomes(a=1.1) is not None
    found = bisect(home, prepare(home, "mix"))
    assert (found.suspect, found.suspects) == (None, ())
    assert found.summary == "undoing a does not help; what else differs: the recipe"

    world.write("{distance: {min: 9}}")
    assert world.becomes(a=1.1) is not None
    found = bisect(home, prepare(home, "mix"))
    assert (found.suspect, found.suspects) == (None, ())
    assert found.summary == "the live snapshot does not pass either, so that no change is to blame"


def test_a_base_that_changed_is_found_where_its_live_version_can_be_had(
    world: World, tmp_path: Path
) -> None:
    home = world.home
    world.write(weight=0.2)
    for version, value in (("one", 0.0), ("two", 9.0)):
        world.make(tmp_path / version, value, {})
    shutil.rmtree(home.inbox / "base")
    world.register("base", tmp_path / "one")
    assert world.run() is None
    world.index("a", 1.1)
    world.register("base", tmp_path / "two")
    assert world.run() is not None
    found = bisect(home, prepare(home, "mix"))
    world.forget()
    assert found.suspect == "base"
    assert found.undoing[0].startswith("with version ")


def test_an_expert_of_an_earlier_stage_is_found_and_not_the_stage(world: World) -> None:
    home = world.home
    world.write_stages()
    assert world.becomes() is None
    assert world.becomes(a=1.1, b=(1.0, {"layer_2": 9.0}), c=1.1) is not None
    before = _snapshots(home)
    prepared = prepare(home, "mix")
    found = bisect(home, prepared)
    assert (found.suspect, found.layers) == ("b", ("layer.02",))
    _costs_no_more(home, prepared, found, before, stages=2)


def test_an_expert_that_alone_changed_is_suspect_as_the_live_snapshot_passes(world: World) -> None:
    assert world.becomes(d=(1.0, {"layer_2": 9.0})) is not None
    found = bisect(world.home, prepare(world.home, "mix"))
    told = "d is the suspect: it alone changed, and what is live passes in layer.02 (of 6 layers)"
    assert found.summary == told


def test_an_expert_that_a_selector_took_is_found_though_the_selector_takes_it_no_more(
    world: World,
) -> None:
    home = world.home
    world.write(experts=())
    assert world.becomes() is None
    assert world.becomes(e=1.0, f=(1.0, {"layer_0": 9.0})) is not None
    quarantine(home, "f")
    found = bisect(home, prepare(home, "mix"))
    quarantine(home, "f", release=True)
    assert (found.suspect, found.undoing) == ("f", ("without it",))
    assert ("e",) in {c.undone for c in found.candidates}


def test_what_cannot_be_traced_is_refused_with_what_to_do(world: World) -> None:
    home, path = world.home, world.home.recipe_path("mix")
    path.write_text(f"{path.read_text()}ref: new\n")
    world.run()
    with pytest.raises(NotFoundError, match="nothing to roll back"):
        prepare(home, "mix")
    with pytest.raises(NotFoundError, match="No standing recipe"):
        prepare(home, "mox")
    _one_of_three_is_bad(world)
    with pytest.raises(GateError, match="nothing that tells better from worse"):
        prepare(home, "mix", metric="accuracy")


def test_a_bisection_that_was_killed_goes_on_and_measures_nothing_twice(world: World) -> None:
    home = world.home
    _one_of_three_is_bad(world)
    before = len(world.evaluated())
    command = [sys.executable, "-m", "mergepipe_pipeline.cli.main", "bisect", "mix", "--yes"]
    with subprocess.Popen([*command, "--home", str(home.root)], start_new_session=True) as killed:
        until = time.monotonic() + 60
        while len(world.evaluated()) < before + 3 and time.monotonic() < until:
            time.sleep(0.02)
        os.killpg(killed.pid, signal.SIGKILL)
    found = bisect(home, prepare(home, "mix"))
    assert (found.suspect, found.layers) == ("c", ("layer.02",))
    measured = world.evaluated()[before:]
    # What was under way at the kill is measured once more, and nothing else.
    assert len(measured) - len(set(measured)) <= 1


def test_the_command_states_the_cost_asks_and_accuses_nobody_when_candidates_run_out(
    world: World,
) -> None:
    home = world.home
    _one_of_three_is_bad(world)
    before = len(world.evaluated())
    args = ["bisect", "mix", "--most", "2", "--home", str(home.root)]
    asked = CliRunner().invoke(main, args, input="n\n")
    assert asked.exit_code == 1
    assert re.search(
        r"since the live snapshot a changed from version \d+ to version \d+; b ", asked.stderr
    )
    assert "at most 2 candidates, 2 of them merged: 12 layers and " in asked.stderr
    assert len(world.evaluated()) == before
    done = CliRunner().invoke(main, [*args, "--yes", "--json"])
    found = json.loads(done.stdout)
    assert (found["suspect"], found["is_smallest"]) == (None, False)
    assert "c" in found["suspects"]
    assert found["summary"].startswith("the candidates ran out")
    assert len(world.evaluated()) == before + 2


def test_the_command_does_not_ask_where_nothing_is_to_be_merged(world: World) -> None:
    assert world.becomes() is None
    world.write(weight=9.0)
    assert world.run() is not None
    told = CliRunner().invoke(main, ["bisect", "mix", "--home", str(world.home.root)], input="")
    assert told.exit_code == 0
    assert "at most 0 candidates" in told.stderr
    assert "Begin?" not in told.stderr


def test_a_recipe_that_does_not_stand_is_named_with_what_is_expected(tmp_path: Path) -> None:
    home = Warehouse.at(tmp_path).ensure()
    with pytest.raises(NotFoundError) as refused:
        prepare(home, "mox")
    assert refused.value.expected == "a recipe's name, its ref, or the path of its file"
