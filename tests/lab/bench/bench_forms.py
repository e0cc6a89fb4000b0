"""`python -m tests.lab.bench.bench_forms`: merges of codes beside those of the same plain weights.

A family is written as fp8 by blocks, as MXFP8 and as MXFP4, and once more as bfloat16 as it is.
What analysis knows is known before; each merge reads cold inputs, and the forms take turns. A line
says what was read of experts, how long the merge took, its cores' seconds and its peak memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.lab.bench import FOLDER
from tests.lab.bench.family import cached_family, expert_name
from tests.lab.bench.layouts import PRESETS
from tests.lab.bench.measure import run, weight_files

Tensors = dict[str, torch.Tensor]
METHODS = {"ties": "weight: 0.3, density: 0.2", "task_arithmetic": "weight: 0.3"}
BUDGETS = (None, "25%", "10%")


def fp8_blocks(name: str, value: torch.Tensor) -> Tensors:
    """Codes of e4m3 with a float32 scale for each 128 × 128."""
    rows, cols = value.shape
    grid = -(-rows // 128), -(-cols // 128)
    padded = torch.zeros(grid[0] * 128, grid[1] * 128)
    padded[:rows, :cols] = value.float()
    blocks = padded.view(grid[0], 128, grid[1], 128)
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448
    codes = (blocks / scales[:, None, :, None]).view(padded.shape)[:rows, :cols]
    return {name: codes.to(torch.float8_e4m3fn).contiguous(), f"{name}_scale_inv": scales}


def mxfp8(name: str, value: torch.Tensor) -> Tensors:
    """Codes of e4m3 with an exponent for each 32."""
    groups, exponents = _exponents(value, 8)
    codes = (groups / exponents.exp2()[..., None]).clamp(-448, 448).reshape(value.shape)
    scales = (exponents + 127).to(torch.uint8)
    return {name: codes.to(torch.float8_e4m3fn), f"{name}_scale": scales}


def mxfp4(name: str, value: torch.Tensor) -> Tensors:
    """Codes of e2m1, two a byte, with an exponent for each 32."""
    groups, exponents = _exponents(value, 2)
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    scaled = (groups / exponents.exp2()[..., None]).reshape(value.shape)
    codes = torch.bucketize(scaled.abs(), edges).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return {f"{name}_packed": packed, f"{name}_scale": (exponents + 127).to(torch.uint8)}


def _exponents(value: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, groups, 32], and the power of two that takes the largest of each to 2^most."""
    groups = value.float().view(value.shape[0], -1, 32)
    largest = groups.abs().amax(-1).clamp(min=1e-30)
    return groups, torch.floor(torch.log2(largest)) - most


def _groups(**weights: object) -> dict[str, object]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


FORMS: dict[str, tuple[Callable[[str, torch.Tensor], Tensors] | None, dict[str, object]]] = {
    "bfloat16": (None, {}),
    "fp8 by blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "MXFP8": (mxfp8, _groups(num_bits=8, type="float", strategy="group", group_size=32)),
    "MXFP4": (mxfp4, _groups(num_bits=4, type="float", strategy="group", group_size=32)),
}


def main() -> None:
    """Write the forms, and print a line for each merge."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.bench.bench_forms")
    parser.add_argument("-k", type=int, default=5, help="experts")
    parser.add_argument("--preset", choices=PRESETS, default="qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--families", type=Path, default=FOLDER, help="beside them it writes")
    chosen = parser.parse_args()
    family = cached_family(chosen.families, chosen.preset, chosen.k)
    names = ["base", *map(expert_name, range(chosen.k))]
    folders = {form: _written(chosen.families / "forms", family, names, form) for form in FORMS}
    home = chosen.families / "forms" / "home"
    for form, folder in folders.items():
        _merge(home, folder, names, "ties", form, None, 0)  # what is to learn
    for number in range(1, chosen.rounds + 1):
        for method in METHODS:
            for budget in BUDGETS:
                for form, folder in folders.items():
                    _merge(home, folder, names, method, form, budget, number)


def _written(folder: Path, family: Path, names: list[str], form: str) -> Path:
    coded, said = FORMS[form]
    if coded is None:
        return family
    for name in names:
        made = folder / form.replace(" ", "-") / name
        if made.exists():
            continue
        making = made.with_name(f"making-{name}")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        tensors: Tensors = {}
        for file in sorted((family / name).glob("*.safetensors")):
            with safe_open(file, "pt") as stored:
                for tensor in stored.keys():  # noqa: SIM118
                    value = stored.get_tensor(tensor)
                    is_coded = tensor.endswith("_proj.weight")
                    tensors |= coded(tensor, value) if is_coded else {tensor: value}
        save_file(tensors, making / "model.safetensors")
        config = json.loads((family / name / "config.json").read_text())
        (making / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
        making.rename(made)
    return folder / form.replace(" ", "-")


def _merge(
    home: Path, folder: Path, names: list[str], method: str, form: str, budget: str | None, n: int
) -> None:
    recipe, log = home.with_name("recipe.yml"), home.with_name("log.json")
    experts = "".join(f"- {{model: {folder}/{e}}}\n" for e in names[1:])
    recipe.write_text(
        f"merge_method: {method}\nbase_model: {folder}/base\nmodels:\n{experts}"
        f"parameters: {{{METHODS[method]}}}\ndtype: bfloat16\nbudget: {budget or '100%'}\n"
    )
    for kept in ("objects", "actions", "snapshots"):  # no layer is known
        shutil.rmtree(home / kept, ignore_errors=True)
    command = [sys.executable, "-m", "mergepipe_pipeline.cli.main", "--home", str(home), "--json"]
    files = weight_files(folder / name for name in names)
    took = run([*command, "merge", str(recipe)], cold=files, log=log)
    said = json.loads(log.read_text())
    print(
        f"{n} {method} {budget or 'full'}, {form}: experts {said['expert_bytes_read'] / 1e6:.0f} "
        f"of {said['expert_bytes_total'] / 1e6:.0f} MB, {took.wall_s:.1f} s, "
        f"CPU {took.cpu_s:.1f} s, peak {took.rss_nbytes >> 20} MiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
