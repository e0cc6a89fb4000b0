"""An expert and its base with every kind of tensor, in a warehouse."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.stored import Stored, encode, write

#: Elements of tensors of two chunks and a bit, as BF16, F16 and F32.
ROWS, COLS = 300, 500


def base_tensors(seed: int = 0) -> dict[str, Stored]:
    """Tensors with levels, and some without: fp8, integers, and one that the expert has longer."""
    rng = np.random.default_rng(seed)

    def drawn(dtype: str, *shape: int) -> Stored:
        return encode(0.02 * rng.standard_normal(shape), dtype)

    return {
        "model.layers.0.a.weight": drawn("BF16", ROWS, COLS),
        "model.layers.0.b.weight": drawn("F16", ROWS, COLS),
        "model.layers.0.c.weight": drawn("F32", ROWS, COLS),
        "model.layers.1.equal.weight": drawn("BF16", ROWS, COLS),
        "model.layers.1.fp8.weight": drawn("F8_E4M3", 20, 30),
        "model.layers.1.ids": ("I64", (3,), np.arange(3, dtype="<i8").tobytes()),
        "model.layers.1.norm.weight": drawn("BF16", COLS),
        "model.longer.weight": drawn("BF16", 10, 10),
    }


def expert_tensors(base: Mapping[str, Stored], seed: int = 1) -> dict[str, Stored]:
    """The base's tensors with small changes, some of them none; NaN and −0 among the values."""
    rng = np.random.default_rng(seed)
    out = dict(base)
    for name, (dtype, shape, data) in base.items():
        if name.endswith((".a.weight", ".b.weight", ".c.weight", "norm.weight")):
            size = {"BF16": "<u2", "F16": "<u2", "F32": "<u4"}[dtype]
            bits = np.frombuffer(data, size).copy()
            bits += rng.integers(0, 40, bits.shape).astype(size)
            if len(bits) > 1000:
                bits[:3] = (1 << (8 * bits.itemsize)) - 1, 1 << (8 * bits.itemsize - 1), 0
            out[name] = dtype, shape, bits.tobytes()
    out["model.longer.weight"] = encode(rng.standard_normal((12, 10)), "BF16")
    out["model.own.weight"] = encode(rng.standard_normal((7, 3)), "BF16")
    return out


def warehouse_of(tmp: Path, experts: int = 1) -> Warehouse:
    """A warehouse with `base`, and experts `e0` … of it."""
    warehouse = Warehouse.at(tmp / "home").ensure()
    base = base_tensors()
    folders = {"base": base} | {f"e{i}": expert_tensors(base, i + 1) for i in range(experts)}
    for name, tensors in folders.items():
        (tmp / name).mkdir()
        write(tmp / name, name, tensors)
        register(warehouse, tmp / name, name, None if name == "base" else "base")
    return warehouse
