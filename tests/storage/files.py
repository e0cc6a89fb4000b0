"""Makes safetensors files for tests, without the code under test."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def raw_file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A file of a stated header length, header bytes (or JSON material) and data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def described(
    dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8), **more: Any
) -> dict[str, Any]:
    """One tensor of a header; 8 bytes of float32 by default."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def sharded(folder: Path) -> Path:
    """Three float32 tensors in two shards with an index."""
    folder.mkdir()
    a, b = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    x = np.arange(6, dtype=np.float32)
    save_file({"a": x.reshape(2, 3), "b": x}, folder / a)
    save_file({"c": x}, folder / b)
    write_index(folder, {"a": a, "b": a, "c": b})
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    """`model.safetensors.index.json` with this weight map."""
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def drop(path: Path) -> None:
    """Take a file out of the page cache."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
