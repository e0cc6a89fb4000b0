"""A part that one model alone has, such as a head for several tokens, stays as it is."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.warehouse import Warehouse

ALONE = "mtp.fc.weight"
BASED = ("task_arithmetic", "ties", "slerp", "model_stock")


def _with_part(folder: Path, target: Path) -> torch.Tensor:
    """A copy of a model with one tensor more; its values."""
    shutil.copytree(folder, target)
    values = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    (file,) = target.glob("*.safetensors")
    save_file({**load_file(file), ALONE: values}, file)
    return values


@pytest.mark.parametrize(
    ("method", "budget"),
    [*product(BASED, [None, "20%"]), ("linear", None), ("karcher", None)],
)
def test_a_part_of_the_base_alone_is_in_the_result_bit_for_bit(
    tmp_path: Path, home: Warehouse, family: Path, method: str, budget: str | None
) -> None:
    lead = tmp_path / "lead"
    is_based = method in BASED
    values = _with_part(family / ("base" if is_based else "expert_00"), lead)
    experts = [str(family / f"expert_0{i}") for i in range(1, 2 if method == "slerp" else 3)]
    models = experts if is_based else [str(lead), *experts]
    lines = [f"merge_method: {method}", "parameters: {t: 0.5}" if method == "slerp" else ""]
    lines += [f"base_model: {lead}"] if is_based else []
    weight = "{weight: 0.3}" if method in ("task_arithmetic", "ties", "linear") else "{}"
    lines += ["models:", *(f"- {{model: {m}, parameters: {weight}}}" for m in models)]
    done = merge(home, parse("\n".join(lines), name="r", where="r.yml"), budget=budget)
    snapshot = done.outcome.snapshot
    result = {
        k: v for f in Path(snapshot.path).glob("*.safetensors") for k, v in load_file(f).items()
    }
    assert torch.equal(result[ALONE].bfloat16(), values)
    assert any("no other model has, first mtp.fc.weight" in w for w in done.outcome.plan.warnings)
