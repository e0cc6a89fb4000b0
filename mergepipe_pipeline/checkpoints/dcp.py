"""The tables of a folder that `torch.distributed.checkpoint` wrote: tensors, chunks, places.

`.metadata` is a pickle of them, read by `inert_pickle`. A chunk is one part of a tensor, a box; it
lies in a `.distcp` file as `torch.save` wrote it, a zip of which only the directory and the small
pickle are read. What is compressed, strided or in another format is refused by name.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, TypeGuard

from mergepipe_pipeline.checkpoints.inert_pickle import OUTSIDE, Thing, read_pickle
from mergepipe_pipeline.dtypes import TORCH_NAME, itemsize
from mergepipe_pipeline.errors import CheckpointError, IncompleteCheckpointError
from mergepipe_pipeline.storage.source import RangedFiles

METADATA = ".metadata"
SUFFIX = ".distcp"
#: Runs of one tensor's elements that lie together in a file: many where columns are cut.
MOST_RUNS = 1 << 16
_MOST_ELEMS = 1 << 62
_LOCAL_HEADER_NBYTES = 30
#: Of a tensor's zip, what stands before and behind its elements is shorter.
_END_NBYTES = 2048
_MOST_DIRECTORY_NBYTES, _MOST_PICKLE_NBYTES = 1 << 16, 1 << 14
_TABLES = "torch.distributed.checkpoint.metadata"
_PLACE = "torch.distributed.checkpoint.filesystem._StorageInfo"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_DTYPES = {f"torch.{name}": code for code, name in TORCH_NAME.items()}
_KNOWN = frozenset(
    (
        *(
            f"{_TABLES}.{name}"
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        *(f"{_OLD}.{name}" for name in ("MEM_FORMAT_ENCODING", "TensorProperties")),
        *(f"pathlib{part}.PosixPath" for part in ("", "._local")),
        _PLACE,
        "collections.OrderedDict",
        "torch.Size",
        "torch.serialization._get_layout",
        *_DTYPES,
    )
)
_STORAGES = {
    "torch.DoubleStorage": "F64",
    "torch.FloatStorage": "F32",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
    "torch.LongStorage": "I64",
    "torch.IntStorage": "I32",
    "torch.ShortStorage": "I16",
    "torch.CharStorage": "I8",
    "torch.ByteStorage": "U8",
    "torch.BoolStorage": "BOOL",
    "torch.ComplexFloatStorage": "C64",
}
_REBUILD = "torch._utils._rebuild_tensor_v"
_KNOWN_OF_TENSORS = frozenset(
    (
        f"{_REBUILD}2",
        f"{_REBUILD}3",
        "collections.OrderedDict",
        "torch.storage.UntypedStorage",
        *_STORAGES,
        *_DTYPES,
    )
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor's elements, and the bytes [start, start + nbytes) of the zip with them."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start_byte: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ChunkedTensor:
    """A tensor as `.metadata` describes it; `path` are the keys that led to it, if it says so."""

    name: str
    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def runs(self, where: str) -> list[tuple[int, int, int, int]]:
        """All elements in order: first one, number, and where they are: chunk, first one in it.

        Raises CheckpointError for chunks with holes, that overlap, or that are cut too fine.
        """
        found: list[tuple[int, int, int, int]] = []
        for number, chunk in enumerate(self.chunks):
            inner = _whole_from(self.shape, chunk.sizes)
            if len(found) + prod(chunk.sizes[:inner]) > MOST_RUNS:
                raise CheckpointError(
                    "A tensor of a training run is cut along other dimensions than the first",
                    where=f"{where}, tensor {self.name}",
                    expected=f"at most {MOST_RUNS} runs of elements",
                    found=f"shape {list(self.shape)} in {len(self.chunks)} chunks, as of "
                    f"{list(chunk.sizes)}",
                    next_step=EXPORT,
                )
            found += _runs(self.shape, chunk, inner, number)
        found.sort()
        at = 0
        for start, n, _, _ in found:
            if start != at:
                break
            at += n
        if at != prod(self.shape) or at != sum(n for _, n, _, _ in found):
            raise bad(f"{where}, tensor {self.name}", "chunks that are together the tensor")
        return found


#: What makes a checkpoint of what is not read here.
EXPORT = (
    "write it as safetensors where it was trained: `torch.distributed.checkpoint.format_utils."
    "dcp_to_torch_save`, then `mergepipe convert`"
)


def bad(where: str, expected: str, found: str = "others") -> CheckpointError:
    """The error for tables that contradict themselves or the files."""
    return CheckpointError(
        "The tables of a training run's checkpoint do not fit together",
        where=where,
        expected=expected,
        found=found,
        next_step="copy the folder again; if it is so where it comes from, save the step again",
    )


def read_metadata(raw: bytes, where: str) -> list[ChunkedTensor]:
    """The tensors that `.metadata` describes, by name; nothing of it is run.

    Raises CheckpointError for anything but such tables.
    """
    top = _state(read_pickle(raw, _KNOWN, where), f"{_TABLES}.Metadata", where)
    tables, stored, paths = (
        top.get(key) for key in ("state_dict_metadata", "storage_data", "planner_data")
    )
    if not isinstance(tables, dict) or not isinstance(stored, dict):
        raise bad(where, "tables of tensors and of their places", "none")
    places = {_index(key, where): place for key, place in stored.items()}
    named = paths if isinstance(paths, dict) else {}
    return [
        _tensor(name, table, named.get(name), places, where)
        for name, table in sorted(tables.items(), key=lambda item: str(item[0]))
        if not (isinstance(table, Thing) and table.kind == f"{_TABLES}.BytesStorageMetadata")
    ]


_Places = Mapping[tuple[object, object], object]


def _tensor(
    name: object, table: object, path: object, places: _Places, where: str
) -> ChunkedTensor:
    where = f"{where}, tensor {str(name)[:200]}"
    state = _state(table, f"{_TABLES}.TensorStorageMetadata", where)
    properties = state.get("properties")
    kept = properties.state if isinstance(properties, Thing) else None
    kind = kept[0].kind if type(kept) is tuple and kept and type(kept[0]) is Thing else "no type"
    shape, chunks = _size(state.get("size"), where), state.get("chunks")
    if kind not in _DTYPES or type(name) is not str or not isinstance(chunks, list):
        raise bad(where, "a name, a list of chunks, and a type of whole bytes", kind[:80])
    if prod(shape) * itemsize(_DTYPES[kind]) > _MOST_ELEMS:
        raise bad(where, "a size that a file can have", str(shape)[:80])
    found = []
    for each in chunks:
        chunk = _state(each, f"{_TABLES}.ChunkStorageMetadata", where)
        offsets, sizes = (_size(chunk.get(key), where) for key in ("offsets", "sizes"))
        ends = [o + s for o, s in zip(offsets, sizes, strict=False)]
        if (
            len(offsets) != len(shape)
            or len(sizes) != len(shape)
            or any(end > n for end, n in zip(ends, shape, strict=True))
        ):
            raise bad(where, f"chunks inside of {list(shape)}", f"{offsets}, {sizes}"[:80])
        if prod(sizes):
            found.append(_chunk(name, offsets, sizes, places, where))
    keys = path if type(path) is tuple and all(type(k) in (str, int) for k in path) else ()
    return ChunkedTensor(name, tuple(map(str, keys)), _DTYPES[kind], shape, tuple(found))


def _chunk(
    name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], places: _Places, where: str
) -> Chunk:
    place = _state(places.get((name, offsets)), _PLACE, where)
    file, start, nbytes = (place.get(key) for key in ("relative_path", "offset", "length"))
    if place.get("transform_descriptors"):
        raise CheckpointError(
            "A tensor of a training run is compressed",
            where=where,
            expected="tensors as they are, as torch writes them by default",
            found=f"transforms: {_said(place['transform_descriptors'])}",
            next_step="save the step without `_extensions`, or load it where it was trained and "
            "save it as safetensors",
        )
    if type(file) is not str or not _is_natural(start) or not _is_natural(nbytes):
        found = ", ".join(map(_said, (file, start, nbytes)))
        raise bad(where, "a file, an offset and a length", found)
    return Chunk(offsets, sizes, file, start, nbytes)


def _index(key: object, where: str) -> tuple[object, object]:
    state = _state(key, f"{_TABLES}.MetadataIndex", where)
    offset = state.get("offset")
    if type(state.get("fqn")) is not str:
        raise bad(where, "places by the names of tensors", _said(state.get("fqn")))
    return state["fqn"], None if offset is None else _size(offset, where)


def _state(value: object, kind: str, where: str) -> dict[Any, Any]:
    """The attributes of a thing of this kind."""
    if isinstance(value, Thing) and value.kind == kind:
        if isinstance(value.state, dict):
            return value.state
        if value.state is None:
            return {}
    raise bad(where, f"a {kind.rpartition('.')[2]}", type(value).__name__)


def _size(value: object, where: str) -> tuple[int, ...]:
    """The numbers of a torch.Size."""
    if isinstance(value, Thing) and value.kind == "torch.Size":
        args = value.args
        sizes = args[0] if type(args) is tuple and len(args) == 1 else None
        if type(sizes) is tuple and len(sizes) <= 64 and all(map(_is_natural, sizes)):
            return sizes
    raise bad(where, "a size of natural numbers", type(value).__name__)


def _said(value: object) -> str:
    """A plain value, or what it is: a nest of tuples takes for ever to be written or hashed."""
    if type(value) is list:
        return ", ".join(map(_said, value[:3]))
    return str(value)[:80] if type(value) in (str, int, float, bool) else type(value).__name__


def _is_natural(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _MOST_ELEMS


def _whole_from(shape: Sequence[int], sizes: Sequence[int]) -> int:
    """The dimension along which a box is cut last: below it, it has all there is."""
    cut = [d for d, (n, s) in enumerate(zip(shape, sizes, strict=True)) if n != s]
    return cut[-1] if cut else 0


def _runs(
    shape: Sequence[int], chunk: Chunk, inner: int, number: int
) -> Iterator[tuple[int, int, int, int]]:
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    first = sum(o * s for o, s in zip(chunk.offsets, strides, strict=True))
    n = prod(chunk.sizes[inner:])
    for i, place in enumerate(product(*map(range, chunk.sizes[:inner]))):
        shift = sum(p * s for p, s in zip(place, strides, strict=False))
        yield first + shift, n, number, i * n


class _Window(io.RawIOBase):
    """Bytes [start, start + nbytes) of a file; what is read is at the ends, and there at once."""

    def __init__(self, files: RangedFiles, chunk: Chunk) -> None:
        self._files, self._chunk, self._at = files, chunk, 0
        self.nbytes = chunk.nbytes
        self._ends: list[tuple[int, bytes]] = []

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self.nbytes)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self.nbytes - self._at)
        n = left if size < 0 else min(size, left)
        if n > _MOST_DIRECTORY_NBYTES + _LOCAL_HEADER_NBYTES:
            raise zipfile.BadZipFile("a directory of many files")
        if not n:  # behind the end, where a damaged directory may point
            return b""
        at, self._at = self._at, self._at + n
        for start, piece in self._ends:
            if start <= at and at + n <= start + len(piece):
                return piece[at - start : at - start + n]
        start, stop = at, at + n
        if stop <= _END_NBYTES:
            start, stop = 0, min(_END_NBYTES, self.nbytes)
        elif start >= self.nbytes - _END_NBYTES:
            start, stop = self.nbytes - _END_NBYTES, self.nbytes
        whole = bytearray(stop - start)
        place = self._chunk.start_byte + start
        self._files.read_into(self._chunk.file, place, memoryview(whole))
        self._ends.append((start, bytes(whole)))
        return bytes(whole[at - start : at - start + n])


def data_start(files: RangedFiles, chunk: Chunk, dtype: str, where: str) -> int:
    """Where a chunk's elements begin in its file, in order and little-endian.

    Raises IncompleteCheckpointError for a file that is too short, CheckpointError for what is
    stored otherwise.
    """
    where = f"{where}, bytes {chunk.start_byte} to {chunk.start_byte + chunk.nbytes}"
    if chunk.start_byte + chunk.nbytes > files.size(chunk.file):
        raise IncompleteCheckpointError(
            "A file of a training run's checkpoint is too short",
            where=where,
            expected=f"at least {chunk.start_byte + chunk.nbytes} bytes",
            found=f"{files.size(chunk.file)} bytes",
            next_step="let the save or the copy finish, or copy the file again",
        )
    window = _Window(files, chunk)
    if window.read(4) != b"PK\x03\x04":
        raise _other_form(where, "no zip, as of `SerializationFormat.SAFETENSORS` or compressed")
    try:
        entries = {
            entry.filename.partition("/")[2]: entry for entry in zipfile.ZipFile(window).infolist()
        }
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as error:
        raise _other_form(where, f"a damaged zip: {error}") from error
    order = _small(window, entries, "byteorder", where) if "byteorder" in entries else b"little"
    if order != b"little":
        raise _other_form(where, "numbers that are big-endian")
    pickled = read_pickle(_small(window, entries, "data.pkl", where), _KNOWN_OF_TENSORS, where)
    data = entries.get(f"data/{_storage_of(pickled, chunk.sizes, dtype, where)}")
    nbytes = prod(chunk.sizes) * itemsize(dtype)
    if data is None or data.file_size != nbytes:
        raise _other_form(where, "more or fewer elements than the tables say")
    return chunk.start_byte + _place(window, data, where)


def _storage_of(value: object, sizes: tuple[int, ...], dtype: str, where: str) -> str:
    """The key of the storage of which a tensor is all. Raises CheckpointError for another one."""
    args = value.args if isinstance(value, Thing) and value.kind.startswith(_REBUILD) else None
    if type(args) is not tuple or len(args) < 6 or not isinstance(args[0], Thing):
        raise _other_form(where, "no plain tensor")
    storage, offset, size, stride = args[:4]
    stated = storage.args
    if storage.kind != OUTSIDE or type(stated) is not tuple or len(stated) != 5:
        raise _other_form(where, "a tensor without a storage")
    kind = stated[1].kind if isinstance(stated[1], Thing) else ""
    own = args[6].kind if len(args) > 6 and isinstance(args[6], Thing) else ""
    if dtype not in (_STORAGES.get(kind), _DTYPES.get(own)):
        raise _other_form(where, f"elements of {own or kind}, where the tables say {dtype}")
    if offset != 0 or size != sizes or not _is_contiguous(sizes, stride):
        raise _other_form(where, "a part of a storage, or a transpose")
    return _said(stated[2])


def _is_contiguous(size: tuple[int, ...], stride: object) -> bool:
    plain = [prod(size[d + 1 :]) for d in range(len(size))]
    return (
        type(stride) is tuple
        and len(stride) == len(size)
        and all(s == p or n == 1 for n, s, p in zip(size, stride, plain, strict=True))
    )


def _small(window: _Window, entries: Mapping[str, zipfile.ZipInfo], name: str, where: str) -> bytes:
    entry = entries.get(name)
    if entry is None or entry.file_size > _MOST_PICKLE_NBYTES:
        raise _other_form(where, f"no {name}, or a large one")
    window.seek(_place(window, entry, where))
    return window.read(entry.file_size)


def _place(window: _Window, entry: zipfile.ZipInfo, where: str) -> int:
    """Where the bytes of a file in the zip begin."""
    window.seek(entry.header_offset)
    header = window.read(_LOCAL_HEADER_NBYTES)
    names = sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    start = entry.header_offset + _LOCAL_HEADER_NBYTES + names
    is_stored = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size
    if not header.startswith(b"PK\x03\x04") or not is_stored or entry.flag_bits & 1:
        raise _other_form(where, f"{entry.filename[:80]} compressed or damaged")
    if entry.header_offset < 0 or start + entry.file_size > window.nbytes:
        raise _other_form(where, f"{entry.filename[:80]} beyond its end")
    return start


def _other_form(where: str, found: str) -> CheckpointError:
    return CheckpointError(
        "A tensor of a training run is stored in a form that is not read",
        where=where,
        expected="a contiguous tensor in a zip, uncompressed, as torch.save writes it",
        found=found,
        next_step=f"copy the file again if it is damaged; else {EXPORT}",
    )
