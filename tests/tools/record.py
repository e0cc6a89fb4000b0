"""What mergekit's tools make of the tests' families; `python -m tests.tools.record` does it again.

Each takes ten seconds to start, so that tests compare with the record.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.family import make_family
from tests.tools.mixtures import (
    FAMILIES,
    TOKENIZERS,
    apart,
    digest,
    is_gate,
    read,
    write_config,
    write_tokenizer,
)
from tests.tools.mixtures import make_family as make_mixture_family
from tests.tools.vocabularies import METHODS, SIDES, K, new_tokens, pair

RECORD = Path(__file__).with_name("mergekit.json")
RANK = 8


def run(tool: str, *words: object) -> None:
    """One of mergekit's commands; what it prints is shown if it fails."""
    command = [str(Path(sys.executable).with_name(tool)), *map(str, words), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    print(done.stderr[-2000:], file=sys.stderr)


@contextmanager
def workplace() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def lora_errors(adapter: Path, base: Path, tuned: Path) -> dict[str, float]:
    """‖change − B·A‖ / ‖change‖ of each linear layer, by tensor, in float64."""
    factors, found = load_file(adapter / "adapter_model.safetensors"), {}
    scale = _scale(json.loads((adapter / "adapter_config.json").read_text()))
    one, other = (read(folder) for folder in (base, tuned))
    for name, value in other.items():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{key}A.weight" in factors:
            change = value.double() - one[name].double()
            b, a = factors[f"{key}B.weight"].double(), factors[f"{key}A.weight"].double()
            found[name] = float((change - scale * b @ a).norm() / change.norm())
    return found


def _scale(config: dict[str, Any]) -> float:
    return float(config["lora_alpha"] / config["r"])


def extract_lora(folder: Path) -> Any:
    """The errors of mergekit's factors of the family's second expert."""
    family = make_family(folder / "family", 2)
    base, tuned = family / "base", family / "expert_01"
    words = ("--model", tuned, "--base-model", base, "--out-path", folder / "out")
    run("mergekit-extract-lora", *words, "--max-rank", RANK)
    return lora_errors(folder / "out", base, tuned)


def moe(folder: Path) -> Any:
    """Of each family and gate mode: the gates, and a digest of all else."""
    found: dict[str, dict[str, Any]] = {}
    for arch in FAMILIES:
        family = make_mixture_family(folder / arch, arch)
        for mode in ("hidden", "cheap_embed"):
            config, out = write_config(family, arch, mode), folder / f"{arch}-{mode}"
            run("mergekit-moe", config, out)
            made = apart(read(out))
            gates = {n: _rounded(t) for n, t in made.items() if is_gate(n)}
            found.setdefault(arch, {})[mode] = {"digest": digest(made), "gates": gates}
    return found


def moe_tokenizers(folder: Path) -> Any:
    """The gates of a family whose base has each of the tokenizers, in each gate mode."""
    family = make_mixture_family(folder / "mistral", "mistral")
    found: dict[str, dict[str, Any]] = {}
    for name, how in TOKENIZERS.items():
        write_tokenizer(family / "base", *how)
        for mode in ("hidden", "cheap_embed"):
            config, out = write_config(family, "mistral", mode), folder / f"{name}-{mode}"
            run("mergekit-moe", config, out)
            gates = {n: _rounded(t) for n, t in read(out).items() if is_gate(n)}
            found.setdefault(name, {})[mode] = gates
    return found


def _rounded(tensor: torch.Tensor) -> list[list[float]]:
    return [[round(x, 7) for x in row] for row in tensor.tolist()]


def transplant_tokenizer(folder: Path) -> Any:
    """The rows of new tokens, of each method, untied and tied."""
    found: dict[str, dict[str, Any]] = {}
    for tied in (False, True):
        recipient, donor = pair(folder / str(tied), tied=tied)
        new = list(new_tokens(recipient, donor).values())
        for method, name in METHODS.items():
            out = folder / f"{tied}-{method}"
            run("mergekit-tokensurgeon", recipient, donor, out, "-a", name, "-k", K)
            made = read(out)
            rows = {side: _rounded(made[side][new]) for side in SIDES if side in made}
            found.setdefault(method, {})[str(tied)] = rows
    return found


TOOLS = {
    "extract-lora": extract_lora,
    "moe": moe,
    "moe-tokenizers": moe_tokenizers,
    "transplant-tokenizer": transplant_tokenizer,
}


def main(*names: str) -> None:
    """Record the named tools, or all."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for name in names or TOOLS:
        with workplace() as folder:
            record[name] = TOOLS[name](folder)
    RECORD.write_text(json.dumps(record, indent=None, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
