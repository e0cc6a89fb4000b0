"""Whose turn it is: one run works on a recipe, merges pass bursts, pools bind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from mergepipe_pipeline.errors import BusyError
from mergepipe_pipeline.pipeline.cards import RecipeCard
from mergepipe_pipeline.pipeline.deploy import (
    merge_recipe,
    plan_recipe,
    release_recipe,
    snapshot_recipe,
)
from mergepipe_pipeline.pipeline.leases import lease_recipe, lease_run
from mergepipe_pipeline.pipeline.merge import EngineKnobs
from mergepipe_pipeline.warehouse import Warehouse

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
#: Works on recipe n until somebody ends it.
HOLD = """
import sys, time
from mergepipe_pipeline.pipeline.leases import lease_recipe
from mergepipe_pipeline.warehouse import Warehouse
with lease_recipe(Warehouse.at(sys.argv[1]), "n"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_run_of_a_recipe_ends_with_the_name_of_the_first_and_harms_nothing(
    home: Warehouse, card: RecipeCard
) -> None:
    plan = plan_recipe(home, card)
    with lease_run(home, "1a2b3c4d-run"):
        merging = merge_recipe(home, "n", card.layers, EngineKnobs())
        first = next(merging)
        busy = f"run 1a2b3c4d, process {os.getpid()}"
        with pytest.raises(BusyError, match=busy):
            plan_recipe(home, card)
        with pytest.raises(BusyError, match=busy):
            next(merge_recipe(home, "n", card.layers, EngineKnobs()))
        with pytest.raises(BusyError, match=busy):
            snapshot_recipe(home, "n")
        with pytest.raises(BusyError, match=busy):
            release_recipe(home, card)
        assert [first.name, *(done.name for done in merging)] == list(card.layers)
    snapshot, cost = snapshot_recipe(home, "n")
    assert (snapshot.manifest.plan_id, cost.layers_executed) == (plan.plan_id, len(card.layers))


def test_the_turn_of_a_killed_run_ends_with_it(home: Warehouse, card: RecipeCard) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(home.root)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(BusyError, match=f"process {first.pid} on "):
            plan_recipe(home, card)
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate(timeout=20)
    with lease_recipe(home, "n"):
        pass
