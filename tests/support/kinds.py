"""One expert of every kind that a view can be, on disk, with what its δ is in NumPy.

Numbers lie on a binary grid coarse enough for every product and sum to be exact in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.view import Part, Run, TensorView, cropped, view_of
from tests.support.stored import (
    Floats,
    Stored,
    decode,
    delta_of_view,
    encode,
    low_rank_of,
    model_of,
    write,
)

#: Experts of one tensor `w`, by what makes them special.
KINDS = (
    "full",
    "low rank",
    "transposed low rank",
    "short low rank",
    "low rank on a full one",
    "delta",
    "cropped",
    "short",
    "gathered",
    "empty",
)


@dataclass(frozen=True)
class Kind:
    """A model of one tensor `w`, the stored tensors of its checkpoints, and δ float32 [N]."""

    model: Model
    stored: tuple[Mapping[str, Stored], ...]
    delta: Floats

    @property
    def view(self) -> TensorView:
        return self.model.views["w"]

    def __repr__(self) -> str:
        return self.model.name


@dataclass(frozen=True)
class Kinds:
    """A base of one tensor `w` with its values [N], and an expert of every kind."""

    base: Model
    values: Floats
    experts: Mapping[str, Kind]

    def __repr__(self) -> str:
        return "kinds"


def make_kinds(folder: Path, rows: int = 150, cols: int = 100, seed: int = 0) -> Kinds:
    """A base of [rows, cols] in BF16; experts in several dtypes."""
    rng = np.random.default_rng(seed)

    def grid(*shape: int, dtype: str = "BF16") -> Stored:
        return encode(rng.integers(-16, 17, shape) / 8, dtype)

    def factors(n_out: int, n_in: int, dtype: str) -> dict[str, Stored]:
        return {"w.a": grid(3, n_in, dtype=dtype), "w.b": grid(n_out, 3, dtype=dtype)}

    full = {"w": grid(rows, cols, dtype="F16")}
    tall = {"w": grid(rows + 20, cols)}
    pieces = {"p": grid(rows, cols), "q": grid(7, cols)}
    stored: dict[str, tuple[dict[str, Stored], ...]] = {
        "full": (full,),
        "low rank": (factors(rows, cols, "F32"),),
        "transposed low rank": (factors(cols, rows, "BF16"),),
        "short low rank": (factors(rows - 30, cols, "F16"),),
        "low rank on a full one": (full, factors(rows, cols, "BF16")),
        "delta": ({"w": grid(rows, cols, dtype="F32")},),
        "cropped": (tall,),
        "short": ({"w": grid(rows - 30, cols, dtype="F32")},),
        "gathered": (pieces,),
        "empty": (full,),
    }
    base_stored = grid(rows, cols)
    values = decode(base_stored)
    base = model_of(write(folder, "base", {"w": base_stored}))
    experts = {}
    for name, tables in stored.items():
        checkpoints = tuple(
            write(folder, f"{name.replace(' ', '-')}-{i}", t) for i, t in enumerate(tables)
        )
        whole = checkpoints[0].by_name.get("w")
        if name == "gathered":
            view = gathered_view(checkpoints[0].tensors, (rows, cols), rng)
        elif name == "empty":
            view = TensorView("w", "F16", (rows, cols))
        elif whole is None:
            low = low_rank_of(checkpoints[0], "w", 0.25, transposed=name.startswith("transposed"))
            shape = (rows - 30 if name.startswith("short") else rows, cols)
            view = TensorView("w", low.b.entry.dtype, shape, low_rank=low)
        elif name == "low rank on a full one":
            low = low_rank_of(checkpoints[1], "w", -2.0, source=1, transposed=False)
            view = TensorView("w", whole.dtype, whole.shape, (Part(0, whole),), low_rank=low)
        elif name == "delta":
            view = TensorView("w", whole.dtype, whole.shape, (Part(0, whole),), is_delta=True)
        elif name == "cropped":
            view = cropped(view_of(whole), rows)
        else:
            view = view_of(whole)
        delta = delta_of_view(view, tables, values)
        experts[name] = Kind(model_of(*checkpoints, views=[view]), tables, delta)
    assert tuple(experts) == KINDS
    return Kinds(base, values, experts)


def gathered_view(
    found: Sequence[TensorEntry], shape: tuple[int, int], rng: np.random.Generator
) -> TensorView:
    """Rows of several stored tensors in random order, as runs of one to three rows."""

    cols, runs, at = shape[1], [], 0
    while at < shape[0]:
        part = int(rng.integers(len(found)))
        n = min(int(rng.integers(1, 4)), shape[0] - at)
        first = int(rng.integers(found[part].shape[0] - n + 1))
        runs.append(Run(at * cols, part, first * cols, n * cols))
        at += n
    parts = tuple(Part(0, e) for e in found)
    view = TensorView("w", found[0].dtype, shape, parts, tuple(runs))
    assert sum(r.n_elems for r in runs) == prod(shape)
    return view


def random_cuts(numel: int, rng: np.random.Generator, most: int = 6) -> npt.NDArray[np.int64]:
    """Ascending edges from 0 to `numel` with a few between."""
    inner = rng.integers(1, numel, rng.integers(most + 1))
    return np.unique(np.concatenate([[0], inner, [numel]])).astype(np.int64)
