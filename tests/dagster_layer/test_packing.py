"""MERGEPIPE_PACK=1: what lands is packed, says what that took, and is packed again when it must."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from mergepipe_pipeline.assets.experts import build_expert_index, experts_of
from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.deploy.arrivals import MAX_FAILURES, arrival, ask
from mergepipe_pipeline.deploy.inbox import Patience, reason_to_wait_for_packs, scan_inbox
from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.deploy.retry import Fault
from mergepipe_pipeline.errors import DamagedPackError
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors.inbox import build_inbox_sensor
from mergepipe_pipeline.sensors.ticks import failed_attempts
from mergepipe_pipeline.storage.atomic import remove_tree
from mergepipe_pipeline.verbs.deploy import plan_recipe
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop
from tests.dagster_layer.guests import ours_of
from tests.dagster_layer.test_attempts import Sensor
from tests.dagster_layer.test_experts import write_lora
from tests.dagster_layer.test_outages import failure_of
from tests.facts.test_input_segments import believe
from tests.support.family import make_family

pytestmark = pytest.mark.filterwarnings("ignore::Warning")

RECIPE = "merge_method: linear\nbase_model: base\nmodels: [{model: expert_00}]\n"


def flip(file: Path) -> None:
    """Change a byte of a tensor, where nobody looks who has seen the file before."""
    stat, data = file.stat(), bytearray(file.read_bytes())
    data[-2000] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def due(home: Warehouse, retry_s: float = 0.0) -> list[str]:
    """What a tick would ask a run for."""
    return [x.name for x in scan_inbox(home, Patience(0.0, retry_s, packs=True)) if x.is_ready]


def test_the_asset_packs_what_landed_and_reports_sizes(
    home: Warehouse, instance: dg.DagsterInstance, drop: Drop
) -> None:
    home.recipe_path("r").write_text(RECIPE)
    drop("base")
    drop("expert_00")
    index_arrival(home, "base", packs=True)
    experts = experts_of(home)
    instance.add_dynamic_partitions(experts.name or "", ["expert_00"])
    done = dg.materialize(
        [build_expert_index(experts)],
        partition_key="expert_00",
        instance=instance,
        resources={"mergepipe": MergePipe(home=str(home.root), packs=True)},
    )
    (event,) = done.get_asset_materialization_events()
    told = event.step_materialization_data.materialization.metadata["pack against base"].value
    assert "X20" in str(told)
    assert "exact merge" in str(told)
    (pack_id,) = home.packs.ids()
    assert due(home) == []
    remove_tree(home.packs.path(pack_id))
    resource = MergePipe(home=str(home.root), inbox_quiet_s=0.0, inbox_retry_s=0.0, packs=True)
    with dg.build_sensor_context(instance, resources={"mergepipe": resource}) as context:
        found: Any = build_inbox_sensor(experts)(context)
    (request,) = found.run_requests
    assert request.partition_key == "expert_00"


def test_an_expert_is_due_until_its_packs_against_todays_bases_are_there(
    home: Warehouse, drop: Drop, tmp_path: Path
) -> None:
    drop("expert_00")
    assert index_arrival(home, "expert_00", packs=True).packs == ()
    drop("base")
    index_arrival(home, "base", packs=True)
    assert due(home) == []
    home.recipe_path("r").write_text(RECIPE)  # a recipe that wants a pack comes later
    assert due(home) == ["expert_00"]
    (made,) = index_arrival(home, "expert_00", packs=True).packs
    assert due(home) == []
    remove_tree(home.packs.path(made.pack_id))  # as `repair` takes it away
    assert due(home) == ["expert_00"]
    index_arrival(home, "expert_00", packs=True)
    drop("base", make_family(tmp_path / "other", k=1, seed=5) / "base")
    index_arrival(home, "base", packs=True)
    assert due(home) == ["expert_00"]
    assert len(scan_inbox(home, 0.0)) == 2
    assert not any(x.is_ready for x in scan_inbox(home, 0.0))


def test_an_adapter_needs_no_pack(home: Warehouse, drop: Drop) -> None:
    home.recipe_path("r").write_text(RECIPE)
    drop("base")
    write_lora(home.inbox / "expert_00")
    for name in ("base", "expert_00"):
        assert not index_arrival(home, name, packs=True).pack_error
    assert (home.packs.ids(), due(home)) == ([], [])


def test_a_packing_that_fails_leaves_the_index_and_is_tried_again_later(
    home: Warehouse, drop: Drop
) -> None:
    home.recipe_path("r").write_text(RECIPE)
    for name in ("base", "expert_00"):
        drop(name)
        index_arrival(home, name)
    file = max((home.inbox / "base").glob("*.safetensors"), key=lambda p: p.stat().st_size)
    flip(file)
    believe(home, home.inbox / "base")
    ask(home, "expert_00", arrival(home, "expert_00").indexed)
    done = index_arrival(home, "expert_00", packs=True)
    assert "not those that were analysed" in done.pack_error
    assert home.packs.ids() == []
    assert [x.is_indexed for x in scan_inbox(home, 0.0)] == [True, True]
    assert due(home, retry_s=1000.0) == []
    flip(file)
    believe(home, home.inbox / "base")
    assert due(home) == ["expert_00"]
    assert index_arrival(home, "expert_00", packs=True).packs
    assert due(home) == []


BUDGET = RECIPE.replace("linear", "task_arithmetic").replace(
    "{model: expert_00}", "{model: expert_00, parameters: {weight: 0.5}}"
)


def said_of(home: Warehouse, instance: dg.DagsterInstance) -> str:
    """What a tick of the recipe sensor says, or the jobs that it requests."""
    repository = build_definitions(home).get_repository_def()
    with dg.build_sensor_context(
        instance=instance,
        repository_def=repository,
        resources={"mergepipe": MergePipe(home=str(home.root), packs=True)},
    ) as context:
        result: Any = repository.get_sensor_def("recipe_sensor")(context)
    if result.skip_reason:
        return str(result.skip_reason.skip_message)
    return ", ".join(str(request.job_name) for request in result.run_requests)


def test_a_recipe_with_a_budget_waits_for_packs_and_not_for_ever(
    home: Warehouse, instance: dg.DagsterInstance, drop: Drop
) -> None:
    home.recipe_path("r").write_text(f"budget: 40%\n{BUDGET}")
    for name in ("base", "expert_00"):
        drop(name)
        index_arrival(home, name)
    assert said_of(home, instance) == "r: it waits for the packs of expert_00"
    home.recipe_path("r").write_text(BUDGET)  # which needs none
    assert said_of(home, instance) == "merge_r"
    home.recipe_path("r").write_text(f"budget: 40%\n{BUDGET}")
    file = max((home.inbox / "base").glob("*.safetensors"), key=lambda p: p.stat().st_size)
    flip(file)
    believe(home, home.inbox / "base")
    for _ in range(MAX_FAILURES):
        assert "waits for the packs" in said_of(home, instance)
        ask(home, "expert_00", arrival(home, "expert_00").indexed)
        assert index_arrival(home, "expert_00", packs=True).pack_error
    assert said_of(home, instance) == "merge_r"


@pytest.mark.parametrize("how", ["full disk", "kill"])
def test_packing_that_its_surroundings_end_is_tried_until_it_works_and_no_recipe_waits_so_long(
    home: Warehouse, drop: Drop, how: str
) -> None:
    home.recipe_path("r").write_text(f"budget: 40%\n{BUDGET}")
    for name in ("base", "expert_00"):
        drop(name)
        index_arrival(home, name)
    (recipe_file,) = recipe_files(home)
    for n in range(1, MAX_FAILURES + 2):
        assert (reason_to_wait_for_packs(home, recipe_file) is None) is (n > MAX_FAILURES)
        assert due(home) == ["expert_00"]
        ask(home, "expert_00", arrival(home, "expert_00").indexed)
        command = [sys.executable, "-c", _ENDED, str(home.root), how]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == (-signal.SIGKILL if how == "kill" else 0), ended.stderr
        assert due(home, retry_s=1000.0) == []
        (told,) = [
            x.waiting for x in scan_inbox(home, Patience(0.0, 1000.0, packs=True)) if x.waiting
        ]
        assert f"packing {n} for it did not end well; the next in" in told
        assert ("The disk is full" if how == "full disk" else "killed") in told
        # Who was killed does not share a run with others.
        (again,) = [x for x in scan_inbox(home, Patience(0.0, 0.0, packs=True)) if x.is_ready]
        assert again.was_killed is (how == "kill")
    assert index_arrival(home, "expert_00", packs=True).packs
    assert due(home) == []


#: Packs an expert in a process for which the disk becomes full, or that is killed, at its end.
_ENDED = """
import errno, os, signal, sys
from mergepipe_pipeline.storage import atomic
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.warehouse import Warehouse
def end(step):
    if step == "publish" and sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if step == "publish":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
atomic.crash_hook = end
assert index_arrival(Warehouse.at(sys.argv[1]), "expert_00", packs=True).pack_error
"""


def test_a_damaged_index_of_a_pack_is_set_aside_and_the_pack_made_again_before_the_merge(
    home: Warehouse, drop: Drop
) -> None:
    home.recipe_path("r").write_text(f"budget: 40%\n{BUDGET}")
    for name in ("base", "expert_00"):
        drop(name)
        index_arrival(home, name, packs=True)
    (recipe_file,) = recipe_files(home)
    before = plan_recipe(home, recipe_file)
    assert before.packs
    (pack_id,) = home.packs.ids()
    flip(max(home.packs.path(pack_id).glob("*.parquet"), key=lambda p: p.stat().st_size))
    with pytest.raises(
        DamagedPackError, match="The pack of expert_00 is damaged, and was set aside"
    ):
        plan_recipe(home, recipe_file)
    assert reason_to_wait_for_packs(home, recipe_file) == "it waits for the packs of expert_00"
    assert due(home) == ["expert_00"]
    index_arrival(home, "expert_00", packs=True)
    assert reason_to_wait_for_packs(home, recipe_file) is None
    assert plan_recipe(home, recipe_file).plan_id == before.plan_id


def test_a_frame_that_turns_out_to_be_damaged_ends_the_run_at_once_and_the_next_one_merges(
    home: Warehouse, drop: Drop, instance: dg.DagsterInstance
) -> None:
    home.recipe_path("r").write_text(f"budget: 40%\n{BUDGET}")
    for name in ("base", "expert_00"):
        drop(name)
        index_arrival(home, name, packs=True)
    recipes = Sensor(home, instance)
    ((request,), _) = recipes.tick()
    (pack_id,) = home.packs.ids()
    for frames in home.packs.path(pack_id).glob("*.frames"):
        frames.write_bytes(bytes(b ^ 1 for b in frames.read_bytes()))
    job = build_definitions(home).resolve_job_def("merge_r")
    told = failure_of(job, instance, request)
    assert "The pack of expert_00 is damaged, and was set aside" in told
    (attempt,) = failed_attempts(ours_of(home, instance), request.tags)
    assert attempt.fault is Fault.SURROUNDINGS
    assert due(home) == ["expert_00"]
    # As the message says, though nobody ever told the expert's base but the recipe.
    (packed,) = pack(home, ["expert_00"])
    assert (packed.base, packed.fresh) == ("base", True)
    ((request,), _) = recipes.tick()
    assert job.execute_in_process(instance=instance, tags=request.tags).success


def test_all_damaged_packs_of_a_recipe_are_set_aside_by_one_attempt(
    home: Warehouse, drop: Drop
) -> None:
    home.recipe_path("r").write_text(f"budget: 40%\n{BUDGET.replace('[', '[{model: expert_01}, ')}")
    for name in ("base", "expert_00", "expert_01"):
        drop(name)
        index_arrival(home, name, packs=True)
    for pack_id in home.packs.ids():
        flip(max(home.packs.path(pack_id).glob("*.parquet"), key=lambda p: p.stat().st_size))
    (recipe_file,) = recipe_files(home)
    with pytest.raises(DamagedPackError, match=r"packs of .* and expert_0. are damaged"):
        plan_recipe(home, recipe_file)
    assert home.packs.ids() == []
    assert due(home) == ["expert_00", "expert_01"]
