"""The bytes that a pack and other stores of fine-tunes need for an expert, exact to the bit.

    pip install -c constraints.txt ".[delta-codecs]"
    python -m tests.lab.bench_llm.exact BASE EXPERT [EXPERT …] [--home FOLDER]

Each codec gets an expert's weights and those of its base, tensor by tensor as they are stored in 16
bits, and gives the expert's back, which is compared. Seconds are of all cores. Of a pack the
exact levels count, and its seconds are of all levels. A codec that is not installed has no row.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from mergepipe_pipeline.domain.pack import TIERS_OF
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.replace import move_to_cold, unpack
from mergepipe_pipeline.warehouse import Warehouse

#: Gives the bytes of an expert's tensor from those that it was packed to and the base's.
Back = Callable[[Any, bytes], bytes]
Codec = tuple[Callable[[bytes, bytes], Any], Back, Callable[[Any], int]]


@dataclass(frozen=True, slots=True)
class Row:
    """What a codec needs for an expert: a share of its bytes, seconds of core in and out."""

    codec: str
    share: float
    in_s: float
    out_s: float


def main() -> int:
    """Print a row per codec and expert."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("experts", type=Path, nargs="+")
    parser.add_argument("--home", type=Path)
    given = parser.parse_args()
    print(f"{'expert':>12} {'codec':>28} {'bytes':>7} {'in, s':>7} {'out, s':>7}")
    for expert in given.experts:
        for row in rows(given.base, expert, given.home):
            said = f"{row.codec:>28} {row.share:>7.1%} {row.in_s:>7.1f} {row.out_s:>7.1f}"
            print(f"{expert.name:>12} {said}", flush=True)
    return 0


def rows(base: Path, expert: Path, home: Path | None = None) -> Iterator[Row]:
    """The pack's row, and one of each codec that is installed. Raises SystemExit for a wrong byte.

    Tensors that are equal to the base's have no bytes in a pack, and next to none in a delta.
    """
    yield _ours(base, expert, home)
    before, after = (dict(_tensors(folder)) for folder in (base, expert))
    for name, make in CODECS.items():
        try:
            taken, back, nbytes_of = make()
        except ImportError:
            continue
        packed, began = {}, time.process_time()
        with redirect_stdout(StringIO()):
            for key, raw in after.items():
                packed[key] = taken(raw, before[key])
            in_s, began = time.process_time() - began, time.process_time()
            for key, held in packed.items():
                if bytes(back(held, before[key])) != after[key]:
                    raise SystemExit(f"{name} gives other bytes for {key}")
        nbytes = sum(map(nbytes_of, packed.values()))
        share = nbytes / sum(map(len, after.values()))
        yield Row(name, share, in_s, time.process_time() - began)


def _ours(base: Path, expert: Path, home: Path | None) -> Row:
    with tempfile.TemporaryDirectory(dir=home) as place:
        warehouse = Warehouse.at(Path(place) / "w").ensure()
        copy = Path(place) / expert.name
        shutil.copytree(expert, copy)
        register(warehouse, base, "base")
        register(warehouse, copy, expert.name, "base")
        began = time.process_time()
        (made,) = pack(warehouse, [expert.name])
        in_s = time.process_time() - began
        move_to_cold(warehouse, made, Path(place) / "cold")
        began = time.process_time()
        unpack(warehouse, expert.name)
        out_s = time.process_time() - began
        if dict(_tensors(copy)) != dict(_tensors(expert)):
            raise SystemExit("the pack gives other bytes")
        exact = sum(made.tier_nbytes[tier] for tier in TIERS_OF["X"])
        return Row("pack, exact levels", exact / made.expert_nbytes, in_s, out_s)


def _tensors(folder: Path) -> Iterator[tuple[str, bytes]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in sorted(opened.keys()):
                yield name, opened.get_tensor(name).view(torch.uint8).numpy().tobytes()


def _xor(a: bytes, b: bytes) -> bytes:
    return (np.frombuffer(a, np.uint8) ^ np.frombuffer(b, np.uint8)).tobytes()


def _planes(raw: bytes) -> bytes:
    """The low bytes of all numbers of 16 bits, then the high ones."""
    return np.frombuffer(raw, np.uint8).reshape(-1, 2).T.tobytes()


def _joined(raw: bytes) -> bytes:
    return np.frombuffer(raw, np.uint8).reshape(2, -1).T.tobytes()


def _zstd() -> Codec:
    import zstandard

    into, out = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
    return (
        lambda raw, base: into.compress(_planes(_xor(raw, base))),
        lambda held, base: _xor(_joined(out.decompress(held)), base),
        len,
    )


def _zipnn(*, is_delta: bool) -> Callable[[], Codec]:
    def make() -> Codec:
        from zipnn import ZipNN

        codec = ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)
        if not is_delta:
            return (
                lambda raw, _: codec.compress(bytearray(raw)),  # it changes what it gets
                lambda held, _: bytes(codec.decompress(held)),
                len,
            )
        return (
            lambda raw, base: codec.compress(bytearray(_xor(raw, base))),
            lambda held, base: _xor(bytes(codec.decompress(held)), base),
            len,
        )

    return make


def _z4ai() -> Codec:
    import z4ai

    return (
        lambda raw, base: z4ai.compress_delta(raw, base, dtype="bf16", threads=1),
        lambda held, base: bytes(z4ai.decompress_delta(held, base)),
        len,
    )


def _fireworks(form: str) -> Callable[[], Codec]:
    def make() -> Codec:
        import fireworks_delta_compression as fireworks

        def tensor(raw: bytes) -> torch.Tensor:
            return torch.frombuffer(bytearray(raw), dtype=torch.bfloat16)

        def back(held: Any, base: bytes) -> bytes:
            delta, checksum = held
            found = fireworks.delta_decompress(
                src=tensor(base), compressed_diff=delta, checksum=checksum, compression_format=form
            )
            return bytes(found.view(torch.uint8).numpy().tobytes())

        return (
            lambda raw, base: fireworks.delta_compress(
                src=tensor(base), dst=tensor(raw), compression_format=form
            ),
            back,
            lambda held: int(held[0].nbytes),
        )

    return make


CODECS: dict[str, Callable[[], Codec]] = {
    "zstd of XOR, bytes apart": _zstd,
    "zipnn": _zipnn(is_delta=False),
    "zipnn of XOR": _zipnn(is_delta=True),
    "fireworks arc_v2": _fireworks("arc_v2"),
    "fireworks arc_v3": _fireworks("arc_v3"),
    "z4ai delta": _z4ai,
}

if __name__ == "__main__":
    sys.exit(main())
