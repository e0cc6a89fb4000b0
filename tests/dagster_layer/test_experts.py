"""Adapters and deltas through Dagster: what lands, what it touches, what is merged anew."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.assets.experts import EXPERT_INDEX, build_expert_index, experts_of
from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.facts.contents import content_of
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs.publish import history
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop
from tests.execution.test_run import tensors
from tests.support.family import tensors_of

pytestmark = pytest.mark.filterwarnings("ignore::Warning")

LAYERS = {"embed", "00", "01", "head"}
#: An adapter as a model of its own, on the base, and on another model.
REFERENCES = ("lora", "base+lora", "expert_00+lora")


def write_lora(folder: Path, seeds: tuple[int, int] = (0, 1), alpha: int = 8) -> Path:
    """A PEFT adapter on q_proj of both layers; `seeds[i]` makes layer i's factors."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": alpha, "target_modules": ["q_proj"]}
    factors = {}
    for layer, seed in enumerate(seeds):
        rng = np.random.default_rng([layer, seed])
        stem = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        for part, shape in (("A", (2, 64)), ("B", (64, 2))):
            values = 0.1 * rng.standard_normal(shape, dtype=np.float32)
            factors[f"{stem}{part}.weight"] = torch.from_numpy(values)
    save_file(factors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_delta(folder: Path, layers: tuple[float, float]) -> Path:
    """Deltas of up_proj of both layers, all elements being `layers[i]`."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        f"model.layers.{i}.mlp.up_proj.weight": torch.full((128, 64), v)
        for i, v in enumerate(layers)
    }
    save_file(values, folder / "model.safetensors", metadata={"mergepipe": "delta"})
    return folder


def sum_of(base: str, *models: str) -> str:
    rows = "".join(f"- {{model: {m}, parameters: {{weight: 0.5}}}}\n" for m in models)
    return f"merge_method: task_arithmetic\nbase_model: {base}\nmodels:\n{rows}"


def jobs(runs: list[dict[str, Any]]) -> list[str]:
    assert all(r["success"] for r in runs), runs
    return [r["partition"] or r["job"] for r in runs]


def remerged(run: dict[str, Any]) -> set[str]:
    return {layer for layer, reused in run["layers_reused"].items() if not reused}


def merged(home: Warehouse, ref: str) -> dict[str, torch.Tensor]:
    return tensors(home.snapshots / history(home, ref)[-1].snapshot_id)


def test_an_adapter_that_lands_runs_the_recipes_that_name_it_and_no_other(
    home: Warehouse, ticker: Ticker, drop: Drop
) -> None:
    for name in ("base", "expert_00", "expert_01"):
        drop(name)
    skills = [f"skill_{i}" for i in range(len(REFERENCES))]
    # Weights of their own, so that no recipe finds its layers merged by another.
    for skill, reference, weight in zip(skills, REFERENCES, ("0.5", "0.4", "0.3"), strict=True):
        text = sum_of("base", "expert_01", reference).replace("0.5", weight)
        home.recipe_path(skill).write_text(text)
    merges = [f"merge_{skill}" for skill in skills]
    home.recipe_path("other").write_text(sum_of("base", "expert_00", "expert_01"))
    assert jobs(ticker.tick()) == ["base", "expert_00", "expert_01", "merge_other"]
    write_lora(home.inbox / "lora")
    assert jobs(ticker.tick()) == ["lora", *merges]
    first = {skill: merged(home, skill) for skill in skills}
    write_lora(home.inbox / "lora", seeds=(0, 7))
    runs = ticker.tick()
    assert jobs(runs) == ["lora", *merges]
    for run, skill in zip(runs[1:], skills, strict=True):
        assert remerged(run) == {"01"}
        second = merged(home, skill)
        changed = {n for n, value in second.items() if not torch.equal(value, first[skill][n])}
        assert changed == {"model.layers.1.self_attn.q_proj.weight"}
    assert ticker.tick() == []


def test_an_adapter_and_its_base_may_land_together(home: Warehouse, ticker: Ticker) -> None:
    home.recipe_path("skill").write_text(sum_of("base", "lora"))
    write_lora(home.inbox / "lora")
    assert jobs(ticker.tick()) == ["lora"]
    base = tensors_of(0, None)
    (home.inbox / "base").mkdir()
    save_file(base, home.inbox / "base" / "model.safetensors", metadata={"format": "pt"})
    assert jobs(ticker.tick()) == ["base", "merge_skill"]
    factors = load_file(home.inbox / "lora" / "adapter_model.safetensors")
    for name, value in merged(home, "skill").items():
        stem = "base_model.model." + name.removesuffix("weight")
        want = base[name].double()
        if f"{stem}lora_A.weight" in factors:
            a, b = (factors[f"{stem}lora_{part}.weight"].double() for part in "AB")
            want = want + 0.5 * (8 / 2) * (b @ a)
        torch.testing.assert_close(value, want.to(torch.bfloat16), rtol=8e-3, atol=1e-6)


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors", "half"])
def test_a_half_uploaded_adapter_waits_until_it_is_whole(
    home: Warehouse, ticker: Ticker, tmp_path: Path, missing: str
) -> None:
    whole = write_lora(tmp_path / "lora")
    folder = home.inbox / "lora"
    folder.mkdir()
    for file in sorted(whole.iterdir()):
        if file.name != missing:
            shutil.copy(file, folder)
    if missing == "half":
        weights = (whole / "adapter_model.safetensors").read_bytes()
        (folder / "adapter_model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert ticker.tick() == []
    assert "lora" in ticker.reasons()[0]
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    assert jobs(ticker.tick()) == ["lora"]


def test_a_change_of_the_adapters_scale_alone_reaches_the_release(
    home: Warehouse, ticker: Ticker, drop: Drop
) -> None:
    drop("base")
    home.recipe_path("skill").write_text(sum_of("base", "lora"))
    write_lora(home.inbox / "lora")
    assert jobs(ticker.tick()) == ["base", "lora", "merge_skill"]
    write_lora(home.inbox / "lora", alpha=16)
    runs = ticker.tick()
    assert jobs(runs) == ["lora", "merge_skill"]
    assert remerged(runs[1]) == {"00", "01"}
    assert [r.number for r in history(home, "skill")] == [1, 2]


def test_a_new_version_of_a_delta_merges_the_layers_it_changes(
    home: Warehouse, ticker: Ticker, drop: Drop
) -> None:
    for name in ("base", "expert_00"):
        drop(name)
    home.recipe_path("skill").write_text(sum_of("base", "expert_00", "delta"))
    write_delta(home.inbox / "delta", (0.25, 0.5))
    assert jobs(ticker.tick()) == ["base", "delta", "expert_00", "merge_skill"]
    write_delta(home.inbox / "delta", (0.25, -0.5))
    runs = ticker.tick()
    assert jobs(runs) == ["delta", "merge_skill"]
    assert remerged(runs[1]) == {"01"}
    assert set(runs[1]["layers_reused"]) == LAYERS


def test_a_base_with_an_adapter_on_it_has_the_layers_of_the_base(
    home: Warehouse, ticker: Ticker, drop: Drop
) -> None:
    for name in ("base", "expert_00"):
        drop(name)
    write_lora(home.inbox / "lora")
    home.recipe_path("skill").write_text(sum_of("base+lora", "expert_00"))
    runs = ticker.tick()
    assert jobs(runs) == ["base", "expert_00", "lora", "merge_skill"]
    assert set(runs[-1]["layers_reused"]) == LAYERS
    write_lora(home.inbox / "lora", seeds=(7, 1))
    runs = ticker.tick()
    assert jobs(runs) == ["lora", "merge_skill"]
    assert remerged(runs[1]) == {"00"}


def test_an_expert_is_measured_against_the_base_of_each_recipe_when_it_lands(
    home: Warehouse, ticker: Ticker, drop: Drop
) -> None:
    drop("base")
    home.recipe_path("skill").write_text(sum_of("base", "lora", "expert_00"))
    write_lora(home.inbox / "lora")
    assert jobs(ticker.tick()) == ["base", "lora"]
    rows = home.catalog.sql("select distinct tensor from tensor_stats order by 1")[1]
    assert [r[0] for r in rows] == [f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)]


def test_files_renamed_while_they_are_looked_at_do_not_stop_the_inbox(
    home: Warehouse, ticker: Ticker, drop: Drop
) -> None:
    drop("base")
    write_lora(home.inbox / "lora")
    (home.inbox / "lora" / ".adapter_model.safetensors.tmp").symlink_to("gone")
    (home.inbox / "an odd name").mkdir()
    register(home, home.inbox / "base", "base")
    assert jobs(ticker.tick()) == ["base", "lora"]


def test_a_backfill_of_experts_is_one_run_in_which_one_that_fails_stops_no_other(
    home: Warehouse, drop: Drop, instance: dg.DagsterInstance
) -> None:
    names = ["base", "broken", "expert_00"]
    for name in names:
        drop(name, "base" if name == "broken" else name)
    (home.inbox / "broken" / "model.safetensors").write_bytes(b"no header")
    instance.add_dynamic_partitions(experts_of(home).name or "", names)
    policy = build_expert_index(experts_of(home)).backfill_policy
    assert policy is not None
    assert policy.max_partitions_per_run is None
    job = build_definitions(home).resolve_implicit_global_asset_job_def()
    result = job.get_subset(asset_selection={EXPERT_INDEX}).execute_in_process(
        # As the daemon's backfill asks for partitions that follow one another.
        tags={"dagster/asset_partition_range_start": "base"}
        | {"dagster/asset_partition_range_end": "expert_00"},
        instance=instance,
        raise_on_error=False,
    )
    (failed,) = [e for e in result.all_events if e.is_step_failure]
    assert "broken: A safetensors header" in str(failed.step_failure_data.error)
    assert instance.get_materialized_partitions(EXPERT_INDEX) == {"base", "expert_00"}
    for name in ("base", "expert_00"):
        found = instance.get_latest_data_version_record(EXPERT_INDEX, partition_key=name)
        assert found is not None
        made = found.asset_materialization
        assert made is not None
        version = (made.tags or {})["dagster/data_version"]
        assert version == content_of(home.catalog, home.catalog.get(name).checkpoint)
