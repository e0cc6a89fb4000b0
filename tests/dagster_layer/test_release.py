"""A release audits exactly what it publishes, whoever starts it and whatever ran before."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs.deploy import current_snapshot
from mergepipe_pipeline.verbs.publish import history
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop
from tests.dagster_layer.test_experts import jobs, sum_of

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
TENSOR = "model.layers.0.mlp.up_proj.weight"


def materialise(
    home: Warehouse, instance: dg.DagsterInstance, *assets: str
) -> dg.ExecuteInProcessResult:
    """What a click on assets of recipe `n` runs, and their checks."""
    keys = dg.AssetSelection.keys(*(["n", *asset.split("/")] for asset in assets))
    defs = build_definitions(home)
    job = defs.resolve_implicit_global_asset_job_def().get_subset(
        asset_selection=keys.resolve(defs.resolve_asset_graph())
    )
    return job.execute_in_process(instance=instance, raise_on_error=False)


def refs(home: Warehouse) -> list[str]:
    return home.refs.names()


def error_of(result: dg.ExecuteInProcessResult) -> str:
    (failed,) = [e for e in result.all_events if e.is_step_failure]
    return str(failed.step_failure_data.error)


def check_of(result: dg.ExecuteInProcessResult, name: str) -> dg.AssetCheckEvaluation:
    (found,) = [e for e in result.get_asset_check_evaluations() if e.check_name == name]
    return found


@pytest.fixture
def with_nan(home: Warehouse, ticker: Ticker, drop: Drop) -> Warehouse:
    """Recipe n, whose one expert has a NaN; its run has failed."""
    for name in ("base", "expert_00"):
        drop(name)
    file = home.inbox / "expert_00" / "model.safetensors"
    tensors = load_file(file)
    tensors[TENSOR][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    home.recipe_path("n").write_text(sum_of("base", "expert_00"))
    assert [r["success"] for r in ticker.tick()] == [True, True, False]
    return home


@pytest.fixture
def released(home: Warehouse, ticker: Ticker, drop: Drop) -> Warehouse:
    """Recipe n, released."""
    for name in ("base", "expert_00"):
        drop(name)
    home.recipe_path("n").write_text(sum_of("base", "expert_00"))
    assert jobs(ticker.tick()) == ["base", "expert_00", "merge_n"]
    return home


def shard_of(home: Warehouse) -> Path:
    snapshot = current_snapshot(home, "n")
    return Path(snapshot.path) / snapshot.manifest.shards[0].file


def flip(file: Path) -> None:
    """Flip one bit of the last weight."""
    file.chmod(0o644)
    with file.open("r+b") as opened:
        opened.seek(-1, 2)
        (byte,) = opened.read(1)
        opened.seek(-1, 2)
        opened.write(bytes([byte ^ 1]))


def test_a_click_on_release_alone_does_not_publish_what_a_check_refused(
    with_nan: Warehouse, instance: dg.DagsterInstance
) -> None:
    result = materialise(with_nan, instance, "release")
    assert not result.success
    assert f"1 in {TENSOR}" in error_of(result)
    assert refs(with_nan) == []


def test_a_click_on_release_alone_does_not_publish_a_snapshot_that_was_damaged_since(
    released: Warehouse, instance: dg.DagsterInstance
) -> None:
    flip(shard_of(released))
    result = materialise(released, instance, "release")
    assert "not the bytes that were written" in error_of(result)
    assert [r.number for r in history(released, "n")] == [1]


def test_a_click_on_release_alone_publishes_what_is_whole(
    released: Warehouse, instance: dg.DagsterInstance
) -> None:
    released.audit_path("n").write_text("{}")
    assert materialise(released, instance, "release").success
    assert {r.snapshot_id for r in history(released, "n")} == {
        current_snapshot(released, "n").snapshot_id
    }


def test_damaged_bytes_fail_each_check_alone_which_names_file_and_tensor(
    released: Warehouse, instance: dg.DagsterInstance
) -> None:
    file = shard_of(released)
    flip(file)
    defs, key = build_definitions(released), dg.AssetKey(["n", "snapshot"])
    graph = defs.resolve_asset_graph()
    for name in ("every_byte_verified", "all_finite"):
        # As a person has one check of a page run by hand, without the snapshot.
        alone = dg.AssetCheckKey(key, name)
        assert graph.get_execution_set_asset_and_check_keys(alone) == {alone}
        job = defs.resolve_implicit_global_asset_job_def().get_subset(
            asset_selection=set(), asset_check_selection={alone}
        )
        result = job.execute_in_process(instance=instance, raise_on_error=False)
        (check,) = result.get_asset_check_evaluations()
        assert check.check_name == name
        assert not check.passed
        assert file.name in (check.description or "")
        assert "tensor model." in (check.description or "")


def test_the_failed_check_of_a_nan_names_its_tensor(
    with_nan: Warehouse, instance: dg.DagsterInstance
) -> None:
    result = materialise(with_nan, instance, "snapshot")
    assert check_of(result, "every_byte_verified").passed
    check = check_of(result, "all_finite")
    assert not check.passed
    told = check.description or ""
    assert told.startswith(f"NaN or infinity: 1 in {TENSOR}; file ")
    assert any(shard.file in told for shard in current_snapshot(with_nan, "n").manifest.shards)
    assert "such values are in expert_00." in told
