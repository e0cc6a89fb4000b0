"""Checkpoints on disk and what their tensors are, in NumPy alone.

Shares nothing with the core: files are written byte by byte, dtypes decoded from their definitions,
views gathered by fancy indexing.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.view import LowRank, Part, TensorView, view_of

Floats = npt.NDArray[np.float32]
#: (dtype code, shape, stored bytes).
Stored = tuple[str, tuple[int, ...], bytes]


def content_of(stored: Stored, segment_elems: int = 1 << 16) -> str:
    """The digest of a tensor's content: over half the BLAKE3 of each run of so many elements."""
    dtype, _, data = stored
    step = segment_elems * {"F8": 1, "BF": 2, "F1": 2, "F3": 4, "I6": 8, "F6": 8}[dtype[:2]]
    parts = [blake3(data[i : i + step]).digest()[:16] for i in range(0, len(data), step)]
    return blake3(b"".join(parts)).hexdigest()


def encode(values: npt.ArrayLike, dtype: str, shape: tuple[int, ...] | None = None) -> Stored:
    """`values` stored as a dtype; fp8 and BF16 by cutting off bits, not by rounding."""
    array = np.asarray(values, dtype=np.float32)
    if dtype == "BF16":
        data = (array.view(np.uint32) >> 16).astype("<u2").tobytes()
    elif dtype == "F8_E5M2":
        data = (array.astype("<f2").view("<u2") >> 8).astype(np.uint8).tobytes()
    elif dtype == "F8_E4M3":
        codes = _e4m3(np.arange(256, dtype=np.uint8))
        finite = np.where(np.isnan(codes), np.inf, codes)
        data = np.abs(array[..., None] - finite).argmin(axis=-1).astype(np.uint8).tobytes()
    else:
        data = array.astype({"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]).tobytes()
    return dtype, array.shape if shape is None else shape, data


def decode(stored: Stored) -> Floats:
    """Stored bytes as float32 [N], from the definition of the dtype."""
    dtype, _, data = stored
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E5M2":
        return (np.frombuffer(data, np.uint8).astype("<u2") << 8).view("<f2").astype(np.float32)
    if dtype == "F8_E4M3":
        return _e4m3(np.frombuffer(data, np.uint8))
    kind = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]
    return np.frombuffer(data, kind).astype(np.float32)


def _e4m3(codes: npt.NDArray[np.uint8]) -> Floats:
    """Four exponent bits with bias 7, three of mantissa, no infinity, all ones is NaN."""
    sign = np.where(codes >> 7, -1.0, 1.0)
    exponent, mantissa = ((codes >> 3) & 15).astype(int), (codes & 7) / 8
    value = np.where(exponent, (1 + mantissa) * 2.0 ** (exponent - 7), mantissa * 2.0**-6)
    return np.where((codes & 127) == 127, np.nan, sign * value).astype(np.float32)


def write(folder: Path, name: str, tensors: Mapping[str, Stored]) -> Checkpoint:
    """A single-file checkpoint, opened."""
    header, at = {}, 0
    for tensor, (dtype, shape, data) in tensors.items():
        if dtype != "I64":
            assert len(data) == len(encode(np.zeros(prod(shape)), dtype)[2])
        header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file = folder / f"{name}.safetensors"
    body = b"".join(data for _, _, data in tensors.values())
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return open_checkpoint(str(file), name)


def model_of(*checkpoints: Checkpoint, views: Sequence[TensorView] = ()) -> Model:
    """The model of these views, or of all tensors of its one checkpoint."""
    found = views or [view_of(t) for t in checkpoints[0].tensors]
    return Model(checkpoints[0].name, checkpoints, {v.name: v for v in found})


def low_rank_of(
    checkpoint: Checkpoint, name: str, scale: float = 2.0, source: int = 0, *, transposed: bool
) -> LowRank:
    """The update of the factors `name.a` and `name.b` of a checkpoint."""
    a, b = (Part(source, checkpoint.by_name[f"{name}.{end}"]) for end in "ab")
    return LowRank(a, b, scale, transposed)


def gathered(view: TensorView, sources: Sequence[Mapping[str, Stored]]) -> Floats:
    """The stored elements of a view, float32 [numel]; `sources` are tensors by name."""
    parts = [decode(sources[p.source][p.entry.name]) for p in view.stored]
    if not view.runs:
        return parts[0]
    index = np.empty(view.numel, dtype=np.int64)
    offsets = np.cumsum([0, *(len(p) for p in parts)])
    for run in view.runs:
        here = slice(run.start_elem, run.start_elem + run.n_elems)
        index[here] = offsets[run.part] + np.arange(run.at_elem, run.at_elem + run.n_elems)
    found: Floats = np.concatenate(parts)[index]
    return found


def delta_of_view(
    view: TensorView, sources: Sequence[Mapping[str, Stored]], base: Floats
) -> Floats:
    """δ against `base` [N], float32 [N]: zero beyond the view's end."""
    delta = np.zeros(len(base), dtype=np.float32)
    inside = delta[: view.numel]
    if view.stored:
        inside += gathered(view, sources)
        inside -= 0 if view.is_delta else base[: view.numel]
    if low := view.low_rank:
        assert isinstance(low, LowRank)
        inside += update_of(low, sources)
    return delta


def update_of(low: LowRank, sources: Sequence[Mapping[str, Stored]]) -> Floats:
    """scale · b·a or its transpose, float32 [N] of a product in float64."""
    a, b = (
        decode(sources[p.source][p.entry.name]).reshape(p.entry.shape).astype(np.float64)
        for p in (low.a, low.b)
    )
    update = low.scale * (b @ a)
    return np.asarray((update.T if low.transposed else update).reshape(-1), dtype=np.float32)
