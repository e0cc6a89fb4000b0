"""GGUF files as model folders: each tensor is decoded by itself and laid out as transformers'."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mergepipe_pipeline.arrays import F32Array, I64Array, U8Array
from mergepipe_pipeline.checkpoints.stored import as_float32
from mergepipe_pipeline.dtypes import ITEMSIZE, LARGEST, TORCH_NAME
from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.snapshots.model_folder import grouped, shard_name
from mergepipe_pipeline.storage.hashing import file_sha256
from mergepipe_pipeline.storage.json_text import json_bytes
from mergepipe_pipeline.storage.side_files import CONFIG, side_files
from mergepipe_pipeline.storage.source import open_source
from mergepipe_pipeline.tools.convert import converted_origin, unchanged
from mergepipe_pipeline.tools.gguf_file import SUFFIX, GgufFile, decoded, opened
from mergepipe_pipeline.tools.gguf_model import Model, Target, model_of, tokenizer_files
from mergepipe_pipeline.tools.models import stored
from mergepipe_pipeline.tools.result import Draft, Made, check_place, drafted
from mergepipe_pipeline.warehouse import Warehouse

#: Types that are kept as they are; others become bfloat16 where nothing else is asked for.
_KEPT, _DEFAULT = ("F32", "F16", "BF16"), "BF16"
_SHARD_NBYTES = 4 << 30
_PIECE_ELEMS = 4 << 20
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".safetensors")
_VOCABULARY = "tokenizer.json"


def gguf_file(given: Path) -> Path | None:
    """The GGUF file that is meant: itself, or the only one of a folder without other weights.

    Raises CheckpointError for a folder with several.
    """
    if given.is_file():
        return given if given.suffix == SUFFIX else None
    names = sorted(p.name for p in given.iterdir()) if given.is_dir() else []
    found = [n for n in names if n.endswith(SUFFIX)]
    if not found or any(n.endswith(_PICKLES) for n in names):
        return None
    if len(found) > 1:
        raise CheckpointError(
            "Which GGUF file is meant cannot be told",
            where=str(given),
            expected=f"one file that ends in {SUFFIX}",
            found=", ".join(found[:5]),
            next_step="give the file itself; join parts with `llama-gguf-split --merge`",
        )
    return given / found[0]


def convert_gguf(
    warehouse: Warehouse,
    given: Path,
    path: Path,
    out: str | Path | None,
    dtype: str | None,
    progress: Progress,
) -> Made:
    """Write a GGUF file as the folder `out`, or as a snapshot of the warehouse.

    The tokenizer's files of the folder `given` are taken if it has them, else the file's own. Every
    number is cast to `dtype` (of safetensors); without one, types are kept and codes become BF16.
    """
    place = None if out is None else check_place(out, warehouse.root, ("convert", given.name))
    with drafted(warehouse, "convert", place) as draft:
        with unchanged([path]), opened(path) as file:
            tensors = _Tensors(file, model_of(file), dtype)
            beside = _beside(given)
            draft.side_files |= beside or tokenizer_files(file, draft.folder)
            draft.side_files[CONFIG] = tensors.config()
            with progress.task(f"read {path.name}", path.stat().st_size) as advance:
                digests = {path.name: file_sha256(path, advance)}
            _write(tensors, draft, progress)
        parameters = {} if dtype is None else {"dtype": dtype}
        origin = converted_origin("gguf", given, digests, parameters)
        tokenizer = "the folder's" if beside else "the file's"
        return draft.finish(origin, {"files": digests, "tokenizer": tokenizer, **tensors.told()})


def _write(tensors: _Tensors, draft: Draft, progress: Progress) -> None:
    shards = grouped(tensors.model.targets, tensors.nbytes_of, _SHARD_NBYTES)
    with progress.task(f"convert {tensors.file.path.name}", tensors.nbytes) as advance:
        for number, targets in enumerate(shards, 1):
            name = shard_name(number, len(shards)) if shards[1:] else "model.safetensors"
            described = [(t.name, tensors.dtype(t), t.shape) for t in targets]
            draft.shard(name, described, tensors.read, advance)


def _beside(given: Path) -> dict[str, bytes]:
    """The tokenizer's files of a folder that is given; nothing of one without a vocabulary."""
    if not given.is_dir():
        return {}
    with open_source(str(given)) as source:
        sizes = dict(side_files(source, str(given)))
        sizes.pop(CONFIG, None)
        return {
            name: source.read_range(name, 0, nbytes)
            for name, nbytes in sizes.items()
            if _VOCABULARY in sizes
        }


@dataclass
class _Tensors:
    """The tensors as they are written: their types, their bytes, and what rounding changed."""

    file: GgufFile
    model: Model
    asked: str | None
    _rounded: int = 0
    _by_name: dict[str, Target] = field(init=False)

    def __post_init__(self) -> None:
        self._by_name = {t.name: t for t in self.model.targets}

    def dtype(self, target: Target) -> str:
        """The safetensors type that a tensor is written in."""
        kind = self.file.tensors[target.stored].kind
        return self.asked or (kind if kind in _KEPT else _DEFAULT)

    def config(self) -> bytes:
        """`config.json`, with the type of most numbers."""
        counts: Counter[str] = Counter()
        for target in self.model.targets:
            counts[self.dtype(target)] += prod(target.shape)
        dtype = TORCH_NAME[counts.most_common(1)[0][0]]
        return json_bytes({**self.model.config, "dtype": dtype})

    @property
    def nbytes(self) -> int:
        """All bytes that are written."""
        return sum(map(self.nbytes_of, self.model.targets))

    def nbytes_of(self, target: Target) -> int:
        """The bytes of a tensor as it is written."""
        return prod(target.shape) * ITEMSIZE[self.dtype(target)]

    def told(self) -> dict[str, Any]:
        """What became of the tensors."""
        kinds = Counter(self.file.tensors[t.stored].kind for t in self.model.targets)
        return {
            "tensors": len(self.model.targets),
            "stored_as": dict(sorted(kinds.items())),
            "written_as": self.asked or f"as stored, codes as {_DEFAULT}",
            "rounding": "to nearest, ties to even",
            "rounded": self._rounded,
        }

    def read(self, name: str) -> memoryview:
        """A tensor's bytes as they are written, decoded a piece of rows at a time."""
        target = self._by_name[name]
        dtype, kind = self.dtype(target), self.file.tensors[target.stored].kind
        rows, is_vector = self.file.read(target.stored), len(target.shape) == 1
        order = _order(target)
        if order is not None and not is_vector:
            rows = rows[order]
        out = np.empty(self.nbytes_of(target), np.uint8)
        step = max(1, _PIECE_ELEMS * len(rows) // prod(target.shape))
        at = 0
        for start in range(0, len(rows), step):
            values = decoded(rows[start : start + step], kind).reshape(-1)
            if order is not None and is_vector:
                values = values[order]
            data = self._stored(values - np.float32(target.shift), target, dtype)
            out[at : at + len(data)] = data
            at += len(data)
        return out.data

    def _stored(self, values: F32Array, target: Target, dtype: str) -> U8Array:
        """The bytes of numbers in a type. Raises CheckpointError for one that it cannot hold."""
        finite = values[np.isfinite(values)]
        most = float(np.abs(finite).max(initial=0))
        data = np.frombuffer(bytearray(stored(values, dtype)), np.uint8)
        if most > LARGEST[dtype]:
            raise CheckpointError(
                "A number of a GGUF file is too large for the type that is asked for",
                where=f"{self.file.path}, tensor {target.stored}",
                expected=f"at most {LARGEST[dtype]:g}",
                found=f"{most:g}",
                next_step="use --dtype bfloat16 or float32",
            )
        if dtype != "F32":
            self._rounded += int((as_float32(data, dtype).numpy() != values).sum())
        return data


def _order(target: Target) -> I64Array | None:
    """Which stored row comes where: llama.cpp pairs neighbours, transformers halves of a head."""
    if not target.heads:
        return None
    rows = np.arange(target.shape[0]).reshape(target.heads, -1, 2)
    return rows.swapaxes(1, 2).reshape(-1)
