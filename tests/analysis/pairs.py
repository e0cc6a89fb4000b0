"""Pairs of checkpoints on disk, and what their deltas are, in NumPy alone.

Shares nothing with the core: files are written byte by byte, dtypes decoded from their definitions.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.analysis import stream
from mergepipe_pipeline.spec.checkpoint import Checkpoint
from mergepipe_pipeline.storage.checkpoint import open_checkpoint

Floats = npt.NDArray[np.float32]
#: (dtype code, shape, stored bytes).
Stored = tuple[str, tuple[int, ...], bytes]
#: Elements per window in tests: a few thousand elements then make several windows.
WINDOW_ELEMS = 8192


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


def delta_of(expert: Stored, base: Stored) -> Floats:
    """δ = float32(expert) − float32(base), float32 [N]."""
    return decode(expert) - decode(base)


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


@contextmanager
def on_disk(
    expert: Mapping[str, Stored], base: Mapping[str, Stored], window_elems: int = WINDOW_ELEMS
) -> Iterator[tuple[Checkpoint, Checkpoint]]:
    """Both checkpoints in a temporary folder, with short windows meanwhile."""
    with (
        TemporaryDirectory() as folder,
        mock.patch.object(stream, "WINDOW_ELEMS", window_elems),
    ):
        yield write(Path(folder), "expert", expert), write(Path(folder), "base", base)
