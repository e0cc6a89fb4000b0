"""A family whose experts can be made worse, and an evaluator that sees it without a library."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

from mergepipe_pipeline.warehouse import Warehouse

TENSOR = "model.layers.0.mlp.up_proj.weight"
#: Prints the largest weight of a tensor in bfloat16.
EVALUATOR = f"""
import json, struct, sys
from pathlib import Path
for file in Path(sys.argv[-1]).glob("*.safetensors"):
    data = file.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    entry = json.loads(data[8:start]).get({TENSOR!r})
    if entry:
        first, end = (start + offset for offset in entry["data_offsets"])
        halves = (bytes(2) + data[i : i + 2] for i in range(first, end, 2))
        print(json.dumps({{"largest": max(abs(struct.unpack("<f", h)[0]) for h in halves)}}))
"""
GATE = (
    "evaluate: {command: [python, eval.py], retries: 0}\ngate: {largest: {max: 1, max_rise: 50%}}"
)


def recipe(base: str | Path, expert: str | Path, gate: str = GATE) -> str:
    """The text of a gated recipe that adds an expert's delta."""
    model = f"- {{model: {expert}, parameters: {{weight: 0.5}}}}"
    return f"merge_method: task_arithmetic\nbase_model: {base}\nmodels:\n{model}\n{gate}\n"


def standing(home: Warehouse, name: str, gate: str = GATE) -> None:
    """Write a gated standing recipe of base and expert_00, with its evaluator."""
    (home.recipes / "eval.py").write_text(EVALUATOR)
    home.recipe_path(name).write_text(recipe("base", "expert_00", gate))


def set_weight(expert: Path, value: float) -> None:
    """Give an expert another version: one weight of the tensor that is looked at."""
    file = expert / "model.safetensors"
    tensors = load_file(file)
    tensors[TENSOR][0, 0] = value
    save_file(tensors, file, metadata={"format": "pt"})
