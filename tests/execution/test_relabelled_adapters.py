"""Equal bytes under another dtype are other weights, also in an adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run

_KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def _adapter(folder: Path, hidden: int, relabelled: str) -> Path:
    """A LoRA in bfloat16, but for the factors of these names: their bytes count as float16."""
    draw = torch.Generator().manual_seed(1)
    shapes = {"A": (4, hidden), "B": (hidden, 4)}
    values = {
        f"{_KEY}{name}.weight": (torch.randn(shape, generator=draw) * 0.05).bfloat16()
        for name, shape in shapes.items()
    }
    for name in relabelled:
        values[f"{_KEY}{name}.weight"] = values[f"{_KEY}{name}.weight"].view(torch.float16)
    folder.mkdir()
    save_file(values, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("relabelled", ["A", "B", "AB"])
@pytest.mark.parametrize("below", ["base", "expert_00"])
def test_a_corrected_header_of_an_adapter_is_another_adapter(
    home: Warehouse, tmp_path: Path, family: Path, relabelled: str, below: str
) -> None:
    hidden = json.loads((family / "base" / "config.json").read_text())["hidden_size"]
    results = []
    for name, labels in (("before", ""), ("after", relabelled)):
        adapter = _adapter(tmp_path / name, hidden, labels)
        text = (
            f"merge_method: task_arithmetic\nbase_model: {family}/base\nout_dtype: float32\n"
            f"models: [{{model: {family}/{below}+{adapter}, parameters: {{weight: 1}}}}]\n"
        )
        used, fresh = run(home, text), run(Warehouse.at(tmp_path / f"{name}-w").ensure(), text)
        assert used.plan.plan_id == fresh.plan.plan_id
        assert used.snapshot.snapshot_id == fresh.snapshot.snapshot_id
        tensors = [load_file(f) for f in Path(used.snapshot.path).glob("*.safetensors")]
        (value,) = (t for part in tensors for k, t in part.items() if "layers.0.self_attn.q_" in k)
        results.append(value)
    assert not torch.equal(*results)
