"""A family in codes is merged as the same family in plain numbers, and within its budget."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.domain.plan import MergePlan, TensorTask
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.execution.run import MergeOutcome, run_plan
from mergepipe_pipeline.execution.stages import plan_in_stages
from mergepipe_pipeline.facts.contents import Contents
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run, tensors
from tests.facts.test_input_segments import believe, flip
from tests.support.codes import FORMS, GPT_OSS_SETTINGS, Tensors, gpt_oss

pytest.importorskip("compressed_tensors")

SHAPES = {"up_proj": (192, 128), "down_proj": (128, 192)}
BUDGETS = ("100%", "25%", "10%")
METHODS = ("ties", "task_arithmetic")


def tame(stored: Tensors) -> Tensors:
    """The same with codes that are numbers, and scales whose products with them are no large ones.

    A merge refuses what is not finite.
    """
    for name, tensor in stored.items():
        raw = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else None
        if raw is not None:
            raw[(raw & 0x7F) == 0x7F] = 0x31
        elif tensor.element_size() == 1 and "scale" in name:
            tensor.view(torch.uint8).remainder_(12).add_(110)
        elif "scale" in name:
            tensor.clamp_(max=100)
    return stored


def family(folder: Path, form: str) -> None:
    """Base and two experts as codes, and as what another library makes of these."""
    for number, name in enumerate(("base", "a", "b")):
        coded: Tensors = {}
        plain: Tensors = {}
        for layer in range(2):
            g = torch.Generator().manual_seed(10 * number + layer)
            if form == "gpt-oss":
                stored = tame(gpt_oss(g, 2, 64, 4))
                module, values = "mlp", {"experts.gate_up_proj": meant_by_transformers(stored)}
                add(coded, plain, f"model.layers.{layer}.{module}.", stored, values)
                continue
            for leaf, shape in SHAPES.items():
                stored = tame(FORMS[form].stored(g, *shape))
                values = {"weight": FORMS[form].meant(stored, *shape)}
                add(coded, plain, f"model.layers.{layer}.mlp.{leaf}.", stored, values)
        settings = GPT_OSS_SETTINGS if form == "gpt-oss" else dict(FORMS[form].settings)
        write(folder / f"{name}-coded", coded, {"quantization_config": settings})
        write(folder / f"{name}-plain", plain, {})


def meant_by_transformers(stored: Tensors) -> torch.Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    values: torch.Tensor = convert_moe_packed_tensors(*stored.values())
    return values


def add(coded: Tensors, plain: Tensors, prefix: str, stored: Tensors, values: Tensors) -> None:
    coded |= {prefix + n: t.contiguous() for n, t in stored.items()}
    plain |= {prefix + n: t.contiguous() for n, t in values.items()}


def write(folder: Path, weights: Tensors, settings: dict[str, object]) -> None:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **settings}
    (folder / "config.json").write_text(json.dumps(config))


def merged(
    home: Warehouse, folder: Path, method: str, kind: str, budget: str, dtype: str = "bfloat16"
) -> MergeOutcome:
    return run(home, recipe(folder, method, kind, budget, dtype), block_elems=4096)


def recipe(
    folder: Path, method: str, kind: str, budget: str = "100%", dtype: str = "bfloat16"
) -> str:
    experts = "".join(
        f"- {{model: {folder}/{n}-{kind}, parameters: {{weight: 0.5, density: 0.5}}}}\n"
        for n in "ab"
    )
    text = f"merge_method: {method}\nbase_model: {folder}/base-{kind}\nmodels:\n{experts}"
    return f"{text}dtype: {dtype}\nbudget: {budget}\n"


@pytest.mark.parametrize("form", [*FORMS, "gpt-oss"])
def test_a_merge_of_codes_is_that_of_the_numbers_that_they_mean(
    home: Warehouse, tmp_path: Path, form: str
) -> None:
    family(tmp_path, form)
    for method, budget in ((m, b) for m in METHODS for b in BUDGETS):
        ours = merged(home, tmp_path, method, "coded", budget)
        s = ours.summary()
        assert s["expert_bytes_read"] == s["expert_bytes_planned"] <= s["budget_bytes"]
        stored = [sum(f.stat().st_size for f in tmp_path.glob(f"{n}-coded/*.safet*")) for n in "ab"]
        assert sum(stored) - s["expert_bytes_total"] < 2 * 8192  # headers
        # Scales make some blocks dearer than others, so that a plan of plain numbers takes others.
        theirs = run_plan(home, of_the_blocks(ours.plan, plain_plan(home, tmp_path, method)))
        a, b = tensors(ours.snapshot.path), tensors(theirs.snapshot.path)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[n], b[n]) for n in a), (method, budget)
        if budget == "100%":
            assert merged(home, tmp_path, method, "plain", budget).snapshot == theirs.snapshot
    config = json.loads((Path(ours.snapshot.path) / "config.json").read_text())
    assert "quantization_config" not in config


def plain_plan(home: Warehouse, folder: Path, method: str) -> MergePlan:
    return plan_in_stages(home, parse(recipe(folder, method, "plain"), name="p", where="p"))


def of_the_blocks(plan: MergePlan, other: MergePlan) -> MergePlan:
    """The other plan, with the ranges of the first, tensor by tensor and expert by expert."""
    ranges = {t.name: t.experts for layer in plan.layers for t in layer.tasks}

    def moved(task: TensorTask) -> TensorTask:
        pairs = zip(task.experts, ranges[task.name], strict=True)
        own = tuple(replace(e, covered=like.covered, read=like.read) for e, like in pairs)
        return replace(task, experts=own)

    layers = (replace(x, tasks=tuple(moved(t) for t in x.tasks)) for x in other.layers)
    return replace(other, layers=tuple(layers))


@pytest.mark.parametrize("form", [*FORMS, "gpt-oss"])
def test_the_error_of_a_merge_of_codes_stays_within_the_printed_bound(
    home: Warehouse, tmp_path: Path, form: str
) -> None:
    family(tmp_path, form)
    for method in METHODS:
        full = tensors(merged(home, tmp_path, method, "coded", "100%", "float32").snapshot.path)
        for budget in ("40%", "12%"):
            part = merged(home, tmp_path, method, "coded", budget, "float32")
            found = tensors(part.snapshot.path)
            error = sum(
                float((found[n].double() - v.double()).square().sum()) for n, v in full.items()
            )
            bound = part.plan.estimates.error_bound
            assert bound is not None
            assert 0 < error**0.5 <= bound


@pytest.mark.parametrize("form", ["fp8 in blocks", "MXFP8", "NVFP4, compressed-tensors", "gpt-oss"])
@pytest.mark.parametrize("model", ["a", "base"])
def test_a_bit_of_codes_or_scales_that_flips_before_they_are_decoded_is_named_and_nothing_is_known(
    home: Warehouse, tmp_path: Path, form: str, model: str
) -> None:
    family(tmp_path, form)
    clean = merged(home, tmp_path, "ties", "coded", "100%")
    root = tmp_path / f"{model}-coded"
    checkpoint = open_checkpoint(str(root), "x")
    # Samples from the middle tell the checkpoint from others.
    long = [t for t in checkpoint.tensors if t.nbytes > 320]
    for tensor in long[: len(long) // 4]:
        other = Warehouse.at(tmp_path / f"of {tensor.name}").ensure()
        Contents(other, checkpoint).learn()
        flip(root, tensor.name, 0.1)
        believe(other, root)
        with pytest.raises(CorruptionError, match="not those that were analysed") as error:
            merged(other, tmp_path, "ties", "coded", "100%")
        assert tensor.name in str(error.value)
        flip(root, tensor.name, 0.1)
        mended = merged(other, tmp_path, "ties", "coded", "100%")
        assert mended.snapshot.snapshot_id == clean.snapshot.snapshot_id


@pytest.mark.parametrize("form", ["fp8 in blocks", "MXFP8", "NVFP4, compressed-tensors", "gpt-oss"])
def test_packs_of_codes_give_levels_within_budgets_and_bounds_and_change_no_full_merge(
    home: Warehouse, tmp_path: Path, form: str
) -> None:
    family(tmp_path, form)
    full = merged(home, tmp_path, "ties", "coded", "100%", "float32")
    values = tensors(full.snapshot.path)
    packed = Warehouse.at(tmp_path / "packed").ensure()
    for name in ("base", "a", "b"):
        register(packed, tmp_path / f"{name}-coded", name)
    pack(packed, ["a", "b"], base="base")
    again = merged(packed, tmp_path, "ties", "coded", "100%", "float32")
    assert again.snapshot.snapshot_id == full.snapshot.snapshot_id
    for budget in ("25%", "5%"):
        part = merged(packed, tmp_path, "ties", "coded", budget, "float32")
        s, estimates = part.summary(), part.plan.estimates
        assert estimates.expert_bytes_packed > 0
        assert s["expert_bytes_read"] == s["expert_bytes_planned"] <= s["budget_bytes"]
        found = tensors(part.snapshot.path)
        error = sum(
            float((found[n].double() - v.double()).square().sum()) for n, v in values.items()
        )
        assert estimates.error_bound is not None
        assert 0 < error**0.5 <= estimates.error_bound
