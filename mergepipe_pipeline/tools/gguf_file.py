"""GGUF files by their headers: what they say of a model, and where each tensor lies.

Every count and offset is a stranger's: each is compared with the file's size before it is followed.
The tensors lie one after the other in the order of the header, as llama.cpp demands.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mergepipe_pipeline.arrays import F32Array, U8Array
from mergepipe_pipeline.errors import CheckpointError, not_installed
from mergepipe_pipeline.storage.regular import text_of
from mergepipe_pipeline.storage.source import CheckpointSource, open_source

SUFFIX = ".gguf"
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_ALIGNMENT = "general.alignment"
_DEFAULT_ALIGNMENT, _MOST_ALIGNMENT = 32, 1 << 16
_MOST_HEADER_NBYTES = 64 << 20
_PIECE_NBYTES = 1 << 20
_MOST_NAME_NBYTES = 1 << 10
_MOST_DIMENSIONS = 4
_MOST_ELEMENTS = 1 << 48
_STRING, _ARRAY, _BOOL = 8, 9, 7
#: By the number of a type of metadata, its format.
_FORMATS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class Listed:
    """An array in the metadata: how many elements it has. Their values are not kept."""

    count: int


Value = int | float | bool | str | Listed


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor as it is stored: the name of its type, [rows …, columns], its bytes in the file."""

    kind: str
    shape: tuple[int, ...]
    start_byte: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open file whose header is sound: its metadata, its tensors by name, in their order."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, Packed]
    _source: CheckpointSource

    def read(self, name: str) -> U8Array:
        """The bytes of a tensor: [rows, bytes of a row], a vector as one row."""
        packed = self.tensors[name]
        data = np.empty(packed.nbytes, np.uint8)
        self._source.read_into(self.path.name, packed.start_byte, data.data)
        return data.reshape(prod(packed.shape[:-1]), -1)

    def floats(self, name: str) -> F32Array:
        """The numbers of a small tensor."""
        return decoded(self.read(name), self.tensors[name].kind).reshape(-1)


class Libraries(NamedTuple):
    """What the extra `gguf` brings."""

    gguf: Any
    transformers: Any
    tokenizers: Any
    #: How transformers makes a tokenizer of a GGUF file.
    vocabularies: Any


def libraries() -> Libraries:
    """The modules of the extra `gguf`. Raises MergePipeError if they are not installed."""
    try:
        import gguf
        import tokenizers
        import transformers
        from transformers.integrations.gguf import gguf_tokenizer_mapping
    except ImportError as error:
        what = "GGUF files need libraries that know them"
        raise not_installed(what, "gguf", error) from error
    return Libraries(gguf, transformers, tokenizers, gguf_tokenizer_mapping)


def decoded(rows: U8Array, kind: str) -> F32Array:
    """The numbers that bytes of whole rows mean, a row of them for each."""
    gguf = libraries().gguf
    values: F32Array = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    return values


@contextmanager
def opened(path: Path) -> Iterator[GgufFile]:
    """A GGUF file with a sound header. Raises CheckpointError for any other."""
    with open_source(str(path)) as source:
        header = _Header(source, path)
        metadata = header.metadata()
        yield GgufFile(path, metadata, header.tensors(_alignment(metadata, path)), source)


def refused(path: Path, place: str, expected: str, found: object) -> CheckpointError:
    """The error for a file whose header is not what it should be at `place`."""
    return CheckpointError(
        "A GGUF file is damaged, or not one that can be read",
        where=f"{path}, {text_of(place)}",
        expected=expected,
        found=text_of(str(found))[:200],
        next_step="get the file again, or one that llama.cpp's converter wrote",
    )


def _alignment(metadata: dict[str, Value], path: Path) -> int:
    value = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    if type(value) is not int or not 8 <= value <= _MOST_ALIGNMENT or value & (value - 1):
        raise refused(path, _ALIGNMENT, f"a power of two from 8 to {_MOST_ALIGNMENT}", value)
    return value


class _Header:
    """Reads the header front to back, a piece of the file at a time."""

    def __init__(self, source: CheckpointSource, path: Path) -> None:
        self._source, self._path = source, path
        self._file_nbytes = source.size(path.name)
        self._buffer = bytearray()
        self._at = 0
        magic = self._take(4, "the magic")
        if magic != _MAGIC:
            raise refused(path, "bytes 0 to 4", repr(_MAGIC), repr(magic))
        version = self._number("I", "the version")
        if version not in _VERSIONS:
            raise refused(path, "the version", "2 or 3, little-endian", version)
        self._n_tensors = self._number("Q", "the number of tensors")
        self._n_pairs = self._number("Q", "the number of metadata")

    def metadata(self) -> dict[str, Value]:
        """All keys, each once."""
        self._bound(self._n_pairs, 13, "the metadata")
        found: dict[str, Value] = {}
        for _ in range(self._n_pairs):
            key = self._name("a key of the metadata")
            if key in found:
                raise refused(self._path, key, "each key once", "the key again")
            found[key] = self._value(self._number("I", key), key)
        return found

    def tensors(self, alignment: int) -> dict[str, Packed]:
        """All tensors, which fill the rest of the file one after the other."""
        self._bound(self._n_tensors, 24 + 9, "the table of tensors")
        found: dict[str, Packed] = {}
        end = 0
        for _ in range(self._n_tensors):
            name = self._name("the name of a tensor")
            if name in found:
                raise refused(self._path, f"tensor {name}", "each name once", "the name again")
            kind, shape, nbytes = self._described(f"tensor {name}")
            offset = self._number("Q", f"tensor {name}")
            start = _aligned(end, alignment)
            if offset != start:
                raise refused(self._path, f"tensor {name}", f"offset {start}", f"offset {offset}")
            found[name] = Packed(kind, shape, start, nbytes)
            end = start + nbytes
        if not found:
            raise refused(self._path, "the table of tensors", "tensors", "none")
        first = _aligned(self._at, alignment)
        ends = {first + end, first + _aligned(end, alignment)}
        if self._file_nbytes not in ends:
            sizes = " or ".join(map(str, sorted(ends)))
            raise refused(
                self._path, "the whole", f"{sizes} bytes, as its header says", self._file_nbytes
            )
        return {
            name: Packed(p.kind, p.shape, first + p.start_byte, p.nbytes)
            for name, p in found.items()
        }

    def _described(self, place: str) -> tuple[str, tuple[int, ...], int]:
        """Type, shape with the columns last, and size of a tensor."""
        n_dimensions = self._number("I", place)
        if not 1 <= n_dimensions <= _MOST_DIMENSIONS:
            raise refused(self._path, place, f"1 to {_MOST_DIMENSIONS} dimensions", n_dimensions)
        shape = tuple(self._number("Q", place) for _ in range(n_dimensions))[::-1]
        if not all(shape) or prod(shape) > _MOST_ELEMENTS:
            raise refused(self._path, place, f"1 to {_MOST_ELEMENTS} elements", shape)
        kind = self._kind(self._number("I", place), place)
        gguf = libraries().gguf
        block, block_nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        if shape[-1] % block:
            raise refused(self._path, place, f"rows of whole blocks of {block}", shape)
        return kind, shape, prod(shape) // block * block_nbytes

    def _kind(self, number: int, place: str) -> str:
        """The name of a type that can be decoded: a block of zeros is."""
        gguf = libraries().gguf
        try:
            kind = gguf.GGMLQuantizationType(number)
            _, nbytes = gguf.GGML_QUANT_SIZES[kind]
            gguf.quants.dequantize(np.zeros((1, nbytes), np.uint8), kind)
        except (ValueError, KeyError, NotImplementedError) as error:
            expected = "a type that the package gguf decodes"
            raise refused(self._path, place, expected, f"type {number}") from error
        return str(kind.name)

    def _value(self, kind: int, place: str) -> Value:
        if kind == _STRING:
            return self._text(self._number("Q", place), place)
        if kind == _ARRAY:
            return self._listed(place)
        if kind not in _FORMATS:
            raise refused(self._path, place, "a type of metadata", f"type {kind}")
        if kind == _BOOL:
            byte = self._number("B", place)
            if byte > 1:
                raise refused(self._path, place, "0 or 1 for a truth value", byte)
            return bool(byte)
        code = _FORMATS[kind]
        (value,) = struct.unpack("<" + code, self._take(struct.calcsize(code), place))
        # The shortest decimal that means the same float32, as configs have it: 1e-06.
        return float(str(np.float32(value))) if code == "f" else value

    def _listed(self, place: str) -> Listed:
        """An array: its end is found, its values are passed over."""
        kind, count = self._number("I", place), self._number("Q", place)
        if kind != _STRING and kind not in _FORMATS:
            raise refused(self._path, place, "an array of numbers or texts", f"type {kind}")
        width = 8 if kind == _STRING else struct.calcsize(_FORMATS[kind])
        self._bound(count, width, place)
        if kind != _STRING:
            self._take(count * width, place)
            return Listed(count)
        for _ in range(count):
            nbytes = self._number("Q", place)
            if nbytes > _MOST_NAME_NBYTES:  # merges are looked for at each letter of a token
                raise refused(self._path, place, f"texts of {_MOST_NAME_NBYTES} bytes", nbytes)
            self._take(nbytes, place)
        return Listed(count)

    def _name(self, place: str) -> str:
        nbytes = self._number("Q", place)
        if not 1 <= nbytes <= _MOST_NAME_NBYTES:
            raise refused(self._path, place, f"1 to {_MOST_NAME_NBYTES} bytes", f"{nbytes} bytes")
        return self._text(nbytes, place)

    def _text(self, nbytes: int, place: str) -> str:
        try:
            return self._take(nbytes, place).decode()
        except UnicodeDecodeError as error:
            raise refused(self._path, place, "text in UTF-8", error) from error

    def _number(self, code: str, place: str) -> int:
        return int.from_bytes(self._take(struct.calcsize("<" + code), place), "little")

    def _bound(self, count: int, least_nbytes: int, place: str) -> None:
        """Raise CheckpointError if so many things of at least this size have no room."""
        room = min(self._file_nbytes, _MOST_HEADER_NBYTES) - self._at
        if count * least_nbytes > room:
            raise refused(self._path, place, f"what fits into {room} bytes", f"{count} elements")

    def _take(self, nbytes: int, place: str) -> bytes:
        self._bound(nbytes, 1, place)
        end = self._at + nbytes
        while len(self._buffer) < end:
            start = len(self._buffer)
            piece = min(max(_PIECE_NBYTES, end - start), self._file_nbytes - start)
            self._buffer += self._source.read_range(self._path.name, start, piece)
        taken = bytes(self._buffer[self._at : end])
        self._at = end
        return taken


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
