"""Records what mergekit 0.1.5 makes of the test family, as `mergekit.safetensors` beside this file.

Run with the peer installed (`pip install -e .[peer]`): `python -m tests.golden.make_golden`. The
family comes from `tests.support.family` (NumPy randomness, so it does not drift); its digest is
stored in the metadata.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from safetensors.torch import save_file

from tests.parity.peer import run_mergekit
from tests.support.family import make_family

GOLDEN = Path(__file__).parent / "mergekit.safetensors"
EXPERTS = 3
#: Recipe name to (method, third model's weight, global parameters).
RECIPES = {
    "linear": ("linear", "0.5", ""),
    "linear-sum": ("linear", "0.5", "{normalize: false}"),
    "task_arithmetic": ("task_arithmetic", "0.5", ""),
    "task_arithmetic-lambda": ("task_arithmetic", "-0.3", "{lambda: 0.8, normalize: true}"),
    "task_arithmetic-gradient": (
        "task_arithmetic",
        "[{filter: mlp, value: [0.2, 0.9]}, {value: 0.4}]",
        "",
    ),
    "ties": ("ties", "0.5", "{density: 0.2}"),
    "ties-sum": ("ties", "0.5", "{density: 0.6, normalize: false, lambda: 1.3}"),
    "ties-gradient": (
        "ties",
        "[0.1, 0.8]",
        "{density: [{filter: attn, value: 0.5}, {value: 0.3}]}",
    ),
}


def recipe(name: str, family: Path, extra: str = "") -> str:
    """The YAML of a recipe over a family."""
    method, third, parameters = RECIPES[name]
    lines = [f"merge_method: {method}"]
    lines += [f"base_model: {family / 'base'}"] if method != "linear" else []
    lines.append("models:")
    for i, weight in enumerate(("1.0", "0.7", third)):
        lines += [
            f"  - model: {family / f'expert_{i:02d}'}",
            f"    parameters: {{weight: {weight}}}",
        ]
    lines += [f"parameters: {parameters}"] if parameters else []
    return "\n".join([*lines, "dtype: float32", "out_dtype: bfloat16", extra, ""])


def family_digest(family: Path) -> str:
    """SHA-256 over the family's weight files."""
    running = hashlib.sha256()
    for file in sorted(family.glob("*/*.safetensors")):
        running.update(file.read_bytes())
    return running.hexdigest()


def main() -> None:
    """Record every recipe."""
    with tempfile.TemporaryDirectory() as folder:
        family = make_family(Path(folder), EXPERTS)
        out = {}
        for name in RECIPES:
            for tensor, value in run_mergekit(recipe(name, family)).items():
                out[f"{name}/{tensor}"] = value.contiguous()
        save_file(out, GOLDEN, metadata={"family": family_digest(family), "mergekit": "0.1.5"})


if __name__ == "__main__":
    main()
