"""A base and two experts of it that can be merged, some of whose tensors no pack holds."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.replace import move_to_cold
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.stored import Stored, encode, write

#: Elements of three chunks.
_SHAPE = (300, 500)


def _tensors(rng: np.random.Generator, base: dict[str, Stored] | None) -> dict[str, Stored]:
    """Those of a base, or of an expert: the base's with small normal deltas."""
    kinds = {
        "model.layers.0.a.weight": ("BF16", _SHAPE),
        "model.layers.0.b.weight": ("F16", _SHAPE),
        "model.layers.1.c.weight": ("F32", _SHAPE),
        "model.layers.1.fp8.weight": ("F8_E4M3", (20, 30)),  # in no pack
        "model.layers.1.norm.weight": ("BF16", _SHAPE[:1]),
    }
    drawn = {
        name: encode(0.02 * rng.standard_normal(shape), dtype)
        for name, (dtype, shape) in kinds.items()
    }
    if base is not None:
        for name, (dtype, shape, data) in base.items():
            if dtype in ("BF16", "F16", "F32"):
                size = {"BF16": "<u2", "F16": "<u2", "F32": "<u4"}[dtype]
                bits = np.frombuffer(data, size)
                step = 1 if size == "<u2" else 1 << 12
                moved = bits + step * rng.integers(0, 9, bits.shape).astype(size)
                drawn[name] = dtype, shape, moved.astype(size).tobytes()
    ids = np.arange(3, dtype="<i8").tobytes()
    return {**drawn, "model.layers.0.ids": ("I64", (3,), ids)}


def write_family(tmp: Path) -> None:
    """Folders `base`, `e0` and `e1` below `tmp`."""
    rng = np.random.default_rng(5)
    base = _tensors(rng, None)
    for name in ("base", "e0", "e1"):
        (tmp / name).mkdir(parents=True)
        write(tmp / name, name, base if name == "base" else _tensors(rng, base))
        (tmp / name / "config.json").write_text('{"architectures": ["Toy"]}')


def packed_family(tmp: Path, family: Path, *, away: tuple[str, ...] = ()) -> Warehouse:
    """A warehouse with copies of a family, its experts packed, and some of them moved away."""
    warehouse = Warehouse.at(tmp / "home").ensure()
    for name in ("base", "e0", "e1"):
        shutil.copytree(family / name, tmp / name)
        register(warehouse, tmp / name, name, None if name == "base" else "base")
    for made in pack(warehouse, ["e0", "e1"]):
        if made.name in away:
            move_to_cold(warehouse, made, tmp / "cold")
    return warehouse
