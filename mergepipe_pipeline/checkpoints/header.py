"""The safetensors format: 8 bytes of length, a JSON header, one buffer without holes.

Parses, validates and builds headers; touches no file. Accepts nothing that the safetensors library
refuses (https://github.com/huggingface/safetensors), and less where two readers could see two
files: a key twice, an unknown field, a blank before the brace, tensors as lists; and types below
one byte.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any

from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.domain.codes import SCALES
from mergepipe_pipeline.dtypes import ITEMSIZE
from mergepipe_pipeline.errors import CheckpointError, IncompleteCheckpointError
from mergepipe_pipeline.storage.json_text import parse_json

LENGTH_NBYTES = 8
MAX_HEADER_NBYTES = 100_000_000
_MAX_ELEMS = 1 << 62
#: The order in which the library sorts dtypes when it writes: widest first.
_RANK = [
    "U64",
    "I64",
    "F64",
    "C64",
    "F32",
    "U32",
    "I32",
    "BF16",
    "F16",
    "U16",
    "I16",
    "F8_E8M0",
    "F8_E4M3",
    "F8_E5M2",
    "F8_E4M3FNUZ",
    "F8_E5M2FNUZ",
    "I8",
    "U8",
    "BOOL",
]

#: A Git LFS pointer is shorter (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md).
_POINTER_NBYTES = 1024

Described = tuple[str, str, tuple[int, ...]]


def header_nbytes(first8: bytes, file_nbytes: int, file: str) -> int:
    """Length of the JSON header, from a file's first 8 bytes. Raises CheckpointError."""
    if len(first8) < LENGTH_NBYTES or file_nbytes < LENGTH_NBYTES:
        raise IncompleteCheckpointError(
            "A file is too short to be safetensors",
            where=file,
            expected="at least 8 bytes",
            found=f"{file_nbytes} bytes",
            next_step="copy the file again",
        )
    _refuse_text(first8, file_nbytes, file)
    length = int.from_bytes(first8, "little")
    if length > MAX_HEADER_NBYTES:
        raise CheckpointError(
            "A safetensors header states an absurd length",
            where=file,
            expected=f"at most {MAX_HEADER_NBYTES} bytes",
            found=f"{length} bytes",
            next_step="this is no safetensors file, or a damaged one: get it again",
        )
    if length + LENGTH_NBYTES > file_nbytes:
        raise IncompleteCheckpointError(
            "A file is shorter than its safetensors header",
            where=file,
            expected=f"at least {length + LENGTH_NBYTES} bytes",
            found=f"{file_nbytes} bytes",
            next_step="copy the file again",
        )
    return length


def _refuse_text(first8: bytes, file_nbytes: int, file: str) -> None:
    """Refuse what downloads leave in a weight file's place: a Git LFS pointer, a web page."""
    if first8 == b"version " and file_nbytes < _POINTER_NBYTES:
        raise CheckpointError(
            "This is a Git LFS pointer, not the weights",
            where=file,
            expected="a safetensors file",
            found=f"a text of {file_nbytes} bytes that names the file",
            next_step="run `git lfs pull` in that folder",
        )
    if first8.lstrip().lower().startswith((b"<!doc", b"<html")):
        raise CheckpointError(
            "A web page was saved in place of the file",
            where=file,
            expected="a safetensors file",
            found=f"HTML of {file_nbytes} bytes",
            next_step="download the file again; the page may say why it was sent instead",
        )


def parse_header(
    raw: bytes, file_nbytes: int, file: str
) -> tuple[list[TensorEntry], dict[str, str]]:
    """Tensor entries in buffer order and the metadata, from the JSON header `raw` of `file`.

    Raises CheckpointError for anything the format forbids, IncompleteCheckpointError for a file
    that ends before its tensors do.
    """
    entries, metadata = _parsed(raw, file_nbytes, file)
    return list(entries), dict(metadata)


@lru_cache(maxsize=32)  # the experts of a base have its header
def _parsed(
    raw: bytes, file_nbytes: int, file: str
) -> tuple[Sequence[TensorEntry], Mapping[str, str]]:
    header = _load(raw, file)
    metadata = header.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _bad(file, "__metadata__", "strings only", "another type")
    entries = [
        _entry(name, value, file, LENGTH_NBYTES + len(raw)) for name, value in header.items()
    ]
    entries.sort(key=lambda e: (e.start_byte, e.nbytes))
    at = LENGTH_NBYTES + len(raw)
    for e in entries:
        if e.start_byte != at:
            raise _bad(
                file, e.name, f"data at byte {at}, after its neighbour", f"byte {e.start_byte}"
            )
        at += e.nbytes
    if at > file_nbytes:
        raise IncompleteCheckpointError(
            "A shard is truncated",
            where=file,
            expected=f"{at} bytes as its header says",
            found=f"{file_nbytes} bytes",
            next_step="copy the file again",
        )
    if at < file_nbytes:
        raise CheckpointError(
            "A shard has bytes after its last tensor",
            where=file,
            expected=f"{at} bytes",
            found=f"{file_nbytes} bytes",
            next_step="the file is damaged: get it again",
        )
    return entries, metadata


def tensor_order(tensors: Sequence[Described], coded: Collection[str] = ()) -> list[Described]:
    """Tensors as the library lays them out: widest dtype first, then by name.

    The scales of what is `coded` follow its codes, which stand where the scales would: these are
    known last.
    """
    pairs = {name + end: name for name in coded for end in ("", SCALES)}

    def place(t: Described) -> tuple[int, str, str]:
        name, dtype, _ = t
        return _RANK.index("F32" if name in pairs else dtype), pairs.get(name, name), name

    return sorted(tensors, key=place)


def build_header(
    tensors: Sequence[Described], metadata: dict[str, str], coded: Collection[str] = ()
) -> bytes:
    """Length and padded JSON header for `tensors` (name, dtype, shape)."""
    body: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    at = 0
    for name, dtype, shape in tensor_order(tensors, coded):
        nbytes = prod(shape) * ITEMSIZE[dtype]
        body[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    raw = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % LENGTH_NBYTES)
    return len(raw).to_bytes(LENGTH_NBYTES, "little") + raw


def _load(raw: bytes, file: str) -> dict[str, Any]:
    try:
        if raw[:1] != b"{":
            raise ValueError("it does not start with '{'")
        header = parse_json(raw, _whole)
    except ValueError as error:
        raise CheckpointError(
            "A safetensors header is not valid JSON",
            where=file,
            expected="a JSON object",
            found=str(error)[:200],
            next_step="this is no safetensors file, or a damaged one: get it again",
        ) from error
    assert isinstance(header, dict)
    return header


def _whole(text: str) -> int:
    if text == "-0":  # the library reads it as a float, and refuses it
        raise ValueError("-0 is no natural number")
    return int(text)


def _entry(name: str, value: Any, file: str, data_start: int) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _bad(file, name, "dtype, shape and data_offsets", str(value)[:80])
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise CheckpointError(
            "A tensor has a dtype that is not read",
            where=f"{file}, {name}",
            expected="a dtype of whole bytes: " + ", ".join(ITEMSIZE),
            found=repr(dtype)[:80],
            next_step="convert the checkpoint to one of these dtypes",
        )
    if not _naturals(shape):
        raise _bad(file, name, "a shape of natural numbers", str(shape)[:80])
    if _overflows(shape):
        found = f"the shape {str(shape)[:80]}"
        raise _bad(file, name, "a shape whose product fits the tensor's byte range", found)
    if not _naturals(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise _bad(file, name, "two ascending offsets", str(offsets)[:80])
    if offsets[1] - offsets[0] != prod(shape) * ITEMSIZE[dtype]:
        raise _bad(
            file,
            name,
            f"{prod(shape) * ITEMSIZE[dtype]} bytes for {dtype} {shape}",
            f"{offsets[1] - offsets[0]} bytes",
        )
    return TensorEntry(name, dtype, tuple(shape), file, data_start + offsets[0])


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v <= _MAX_ELEMS for v in values)


def _overflows(shape: list[int]) -> bool:
    """Stops at the first product too large, so that a hostile shape costs no time."""
    return any(n > _MAX_ELEMS for n in accumulate(shape, lambda a, b: min(a * b, _MAX_ELEMS + 1)))


def _bad(file: str, tensor: str, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        "A safetensors header is not valid",
        where=f"{file}, {tensor}",
        expected=expected,
        found=found,
        next_step="the file is damaged or hostile: get it again",
    )
