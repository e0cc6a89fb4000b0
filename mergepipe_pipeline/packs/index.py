"""What is in a pack: sealed Parquet files beside the frames.

`index` has a row per tensor. `chunks` has, per chunk, the sizes of frames and the residuals, which
plans are made from, and `sums` the same of SUMMED_CHUNKS chunks each: plans of large merges need
nothing finer, and read a sixteenth. `checksums` has what frames are compared with when they are
read. These three are read a few tensors at a time. The seals cover the pack's id, so no file serves
another pack. A release reads what its own version of the codec wrote, and nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from mergepipe_pipeline.arrays import F32Array, I64Array, U32Array
from mergepipe_pipeline.catalog.arrow_tables import (
    FACTS_KEY,
    Key,
    corruption_named,
    decode,
    encode,
    encode_groups,
)
from mergepipe_pipeline.catalog.row_groups import RowGroups
from mergepipe_pipeline.catalog.seals import (
    find_sealed,
    place_of,
    read_sealed,
    seal_of,
    sealed_path,
    write_sealed,
)
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.pack import (
    CHUNK_ELEMS,
    CODEC_VERSION,
    PACK_FORMAT,
    TIERS,
    PackedTensor,
    TensorContent,
    Tier,
)
from mergepipe_pipeline.errors import CorruptionError, PackVersionError
from mergepipe_pipeline.storage.forms import Form, Sha256, Size, Text
from mergepipe_pipeline.text import listed

#: Chunks of the sums that a pack keeps, and their elements: 1 Mi.
SUMMED_CHUNKS = 16
SUMMED_ELEMS = SUMMED_CHUNKS * CHUNK_ELEMS
#: The next step that brings a damaged pack back.
REMADE = (
    "copy the original back first if it is in cold storage; then run `mergepipe repair`, and "
    "`mergepipe pack` again; where the original is there, `--no-packs` reads it until then"
)

Sizes = U32Array
Residuals = F32Array

#: Rows of `index`: facts of whole tensors; lists are in the order of TIERS.
INDEX = pa.schema(
    [
        ("tensor", pa.string()),
        ("base_tensor", pa.string()),
        ("dtype", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("digest", pa.string()),
        ("base_digest", pa.string()),
        ("unit", pa.float32()),
        ("threshold_bits", pa.uint32()),
        ("start_byte", pa.list_(pa.int64())),
        ("nbytes", pa.list_(pa.int64())),
    ]
)
#: Rows of `chunks`, `sums` and `checksums`: a tensor's arrays as little-endian bytes.
CHUNKS = pa.schema([("tensor", pa.string()), ("nbytes", pa.binary()), ("residual_sq", pa.binary())])
CHECKSUMS = pa.schema([("tensor", pa.string()), ("checksums", pa.binary())])
#: Bytes of arrays in a row group, for some hundred MiB of an expert; and in a file read whole.
_GROUP_NBYTES = 1 << 18
_WHOLE_NBYTES = 1 << 24
Seal = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
#: Of the codec, and of the files beside frames.
_VERSION = f"{CODEC_VERSION}.{PACK_FORMAT}"
_PerTier = Annotated[list[Size], Field(min_length=len(TIERS), max_length=len(TIERS))]


class _RowForm(Form):
    """A row of `index`, made by anybody."""

    tensor: Text
    base_tensor: Text
    dtype: Text
    shape: Annotated[list[Size], Field(max_length=16)]
    digest: Sha256
    base_digest: Sha256
    unit: float = Field(allow_inf_nan=True)
    threshold_bits: int = Field(ge=0, lt=1 << 32)
    start_byte: _PerTier
    nbytes: _PerTier


class _MetaForm(BaseModel):
    """What the index says beside its rows: the seals of its other files among it."""

    tiers: list[Tier]
    chunks: Seal
    checksums: Seal
    sums: Seal


@dataclass(frozen=True, eq=False)
class TensorRow:
    """One tensor of `index`; `start_byte` and `nbytes` are int64 [tiers]."""

    content: TensorContent
    unit: float
    threshold_bits: int
    start_byte: I64Array
    nbytes: I64Array


@dataclass(frozen=True, eq=False)
class PackIndex:
    """All tensors of a pack, in the order of its files, and the tiers that it has."""

    tiers: tuple[Tier, ...]
    rows: tuple[TensorRow, ...]
    chunks: Path
    sums: Path
    checksums: Path

    @property
    def tier_nbytes(self) -> I64Array:
        """int64 [tiers]: sizes of the files of frames."""
        total = np.zeros(len(TIERS), np.int64)
        for row in self.rows:
            total += row.nbytes
        return total


def pack_id_of(contents: Sequence[TensorContent], tiers: Sequence[Tier] = TIERS) -> str:
    """The id of a pack of these tensors in these tiers, in whatever order (64 hex)."""
    chosen = [t for t in TIERS if t in tiers]
    return digest_json([CODEC_VERSION, chosen, sorted(contents)])


def frames_name(tier: Tier) -> str:
    """The name of the file of one tier's frames."""
    return f"{tier}.frames"


def frames_path(root: Path, tier: Tier) -> Path:
    """The file of one tier's frames."""
    return root / frames_name(tier)


def write_index(
    staged: Path, final: Path, tiers: Sequence[Tier], of: Sequence[PackedTensor]
) -> None:
    """Write the sealed files of a pack that will be named `final`. Raises StorageFullError."""
    sealed = {}
    for stem, schema, row, most_nbytes in (
        ("chunks", CHUNKS, _chunks_row, _GROUP_NBYTES),
        ("sums", CHUNKS, _sums_row, _WHOLE_NBYTES),
        ("checksums", CHECKSUMS, _checksums_row, _GROUP_NBYTES),
    ):
        data = encode_groups(schema, _groups(schema, of, row, most_nbytes), {}, compression="none")
        sealed[stem] = seal_of(data, place_of(final, stem))
        write_sealed(staged, stem, data, sealed[stem])
    columns = zip(*map(_index_row, of), strict=True)
    table = pa.table([list(c) for c in columns] or [[] for _ in INDEX], schema=INDEX)
    data = encode(table, {"codec": _VERSION, "tiers": list(tiers), **sealed})
    write_sealed(staged, "index", data, seal_of(data, place_of(final, "index")))


def read_index(root: Path) -> PackIndex:
    """The index of the pack in a folder, which is named by its id.

    Raises CorruptionError for a pack that is not as it was written, but for bytes inside of files
    that are read in parts; these are compared when they are read. Raises PackVersionError.
    """
    rows, meta = _read_rows(root)
    tiers = tuple(t for t in TIERS if t in meta.tiers)
    files = (sealed_path(root, s, getattr(meta, s)) for s in ("chunks", "sums", "checksums"))
    index = PackIndex(tiers, rows, *files)
    _refuse_other(root, index)
    return index


def read_contents(root: Path) -> tuple[TensorContent, ...]:
    """The tensors of the pack in a folder, by its index alone.

    Raises CorruptionError and PackVersionError.
    """
    return tuple(row.content for row in _read_rows(root)[0])


def _read_rows(root: Path) -> tuple[tuple[TensorRow, ...], _MetaForm]:
    """The rows of the index in a folder, and what it says beside them.

    Raises CorruptionError and PackVersionError.
    """
    paths = find_sealed(root, "index")
    if len(paths) != 1:
        raise damaged_pack(root, "one sealed index", f"{len(paths)}")
    (path,) = paths
    data = read_sealed(path)
    with corruption_named(str(path)):  # its columns are those of its version: they may be others
        meta = json.loads(pq.read_schema(pa.BufferReader(data)).metadata[FACTS_KEY])
        version = str(meta["codec"])
    if version != _VERSION:
        raise PackVersionError(
            "A pack was written by another version of the codec; nothing is wrong with the expert",
            pack_id=root.name,
            where=str(root),
            expected=f"version {_VERSION} of the codec",
            found=f"version {version}",
            next_step="write it again: `mergepipe pack` and the expert's name; until then merges "
            "read the original",
        )
    table, _ = decode(data, str(path), INDEX)
    try:
        rows = tuple(map(_tensor_row, _ROWS.validate_python(table.to_pylist())))
        return rows, _MetaForm.model_validate(meta)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        found = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise damaged_pack(path, "an index of tensors", found) from invalid


def _refuse_other(root: Path, index: PackIndex) -> None:
    """Raise CorruptionError unless the folder holds the files that its index names."""
    pack_id = pack_id_of([r.content for r in index.rows], index.tiers)
    if pack_id != root.name:
        raise damaged_pack(
            root, f"the contents of pack {root.name[:16]}", f"those of {pack_id[:16]}"
        )
    if len({row.content.name for row in index.rows}) < len(index.rows):
        raise damaged_pack(root, "tensors of different names", "a name twice")
    start_byte = np.zeros(len(TIERS), np.int64)
    for row in index.rows:
        is_placed = np.array_equal(row.start_byte, start_byte)
        if not is_placed:
            raise damaged_pack(root, "frames of tensors one after the other", row.content.name)
        start_byte += row.nbytes
    sizes = dict(zip(TIERS, start_byte.tolist(), strict=True))
    for tier in index.tiers:
        path = frames_path(root, tier)
        nbytes = path.stat().st_size if path.is_file() else None
        if nbytes != sizes[tier]:
            raise damaged_pack(path, f"{sizes[tier]} bytes", _size_text(nbytes))
    for sealed in (index.chunks, index.sums, index.checksums):
        if not sealed.is_file():
            raise damaged_pack(sealed, "the file", "none")


class ChunkRows:
    """A file of `chunks`, `sums` or `checksums`, by tensor; a file is open only while it is read.

    Raises CorruptionError, here and while reading, for what is not as it was written.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path, self._schema = path, schema
        self._held: dict[str, tuple[bytes, ...]] = {}
        with self._open() as file:
            self._keys = {name: key for key in file.keys for name in key}

    def __getitem__(self, tensor: str) -> tuple[bytes, ...]:
        """The bytes of a tensor's arrays. Those of its row group are held until another is read."""
        held = self._held
        if tensor not in held:
            if tensor not in self._keys:
                raise damaged_pack(self._path, f"tensor {tensor}", "none of this name")
            with self._open() as file:
                held = self._held = self._rows(file, self._keys[tensor])
        return held[tensor]

    def all(self) -> Iterator[tuple[str, tuple[bytes, ...]]]:
        """The name of each tensor and the bytes of its arrays, while the file stays open."""
        with self._open() as file:
            for key in file.keys:
                yield from self._rows(file, key).items()

    def _open(self) -> RowGroups:
        try:
            return RowGroups(self._path, self._schema)
        except FileNotFoundError:
            raise damaged_pack(self._path, "the file", "none") from None

    def _rows(self, file: RowGroups, key: Key) -> dict[str, tuple[bytes, ...]]:
        names, *arrays = (column.to_pylist() for column in file.read(key).columns)
        if tuple(names) != key or any(None in array for array in arrays):
            raise damaged_pack(self._path, f"rows of {listed(key, 1)}", "others")
        return dict(zip(names, zip(*arrays, strict=True), strict=True))


def per_tier(
    data: bytes, dtype: str, row: TensorRow, path: Path, block_elems: int = CHUNK_ELEMS
) -> npt.NDArray[Any]:
    """[tiers, blocks] of the bytes of a tensor's array. Raises CorruptionError if it has others.

    Compiled code relies on it.
    """
    blocks = -(-math.prod(row.content.shape) // block_elems)
    nbytes = len(TIERS) * blocks * np.dtype(dtype).itemsize
    if len(data) != nbytes:
        name = row.content.name
        raise damaged_pack(path, f"{nbytes} bytes of an array of {name}", f"{len(data)}")
    return np.frombuffer(data, dtype).reshape(len(TIERS), blocks)


def sizes_of(
    arrays: Sequence[bytes], row: TensorRow, path: Path, block_elems: int = CHUNK_ELEMS
) -> tuple[Sizes, Residuals]:
    """`nbytes` and `residual_sq` of a tensor of a file of `CHUNKS`. Raises as `per_tier`."""
    nbytes, residual_sq = (
        per_tier(data, dtype, row, path, block_elems)
        for data, dtype in zip(arrays, ("<u4", "<f4"), strict=True)
    )
    if (nbytes.sum(axis=1, dtype=np.int64) != row.nbytes).any() or not (residual_sq >= 0).all():
        expected = f"sizes and residuals of {row.content.name} as the index has them"
        raise damaged_pack(path, expected, "others")
    return nbytes, residual_sq


def summed(nbytes: Sizes, residual_sq: Residuals, n: int) -> tuple[Sizes, Residuals]:
    """`nbytes` [tiers, columns] and `residual_sq` [levels, columns] of each n columns.

    The last may be fewer.
    """
    if n == 1:
        return nbytes, residual_sq
    starts = np.arange(0, nbytes.shape[1], n)
    exactly = np.add.reduceat(residual_sq, starts, axis=1, dtype=np.float64)
    # To float32, and up: the bound has to hold.
    rounded = np.nextafter(exactly.astype(np.float32), np.float32(np.inf))
    total = np.add.reduceat(nbytes, starts, axis=1, dtype=np.uint32)
    return total, np.where(exactly > 0, rounded, np.float32(0))


def damaged_pack(path: Path, expected: str, found: str) -> CorruptionError:
    """The error for a pack that is not as it was written."""
    return CorruptionError(
        "A pack was changed after it was written",
        where=str(path),
        expected=expected,
        found=found,
        next_step=REMADE,
    )


def _groups(
    schema: pa.Schema,
    tensors: Sequence[PackedTensor],
    row_of: Callable[[PackedTensor], tuple[str | bytes, ...]],
    most_nbytes: int,
) -> Iterator[tuple[Key, pa.Table]]:
    """Row groups of a few tensors each, in order."""
    rows: list[tuple[str | bytes, ...]] = []
    nbytes = 0
    for number, tensor in enumerate(tensors, 1):
        rows.append(row_of(tensor))
        nbytes += sum(len(array) for array in rows[-1][1:])
        if nbytes >= most_nbytes or number == len(tensors):
            names, *arrays = (list(column) for column in zip(*rows, strict=True))
            yield tuple(map(str, names)), pa.table([names, *arrays], schema=schema)
            rows, nbytes = [], 0


def _chunks_row(t: PackedTensor) -> tuple[str | bytes, ...]:
    return t.name, _bytes(t.nbytes, "<u4"), _bytes(t.residual_sq, "<f4")


def _sums_row(t: PackedTensor) -> tuple[str | bytes, ...]:
    nbytes, residual_sq = summed(t.nbytes, t.residual_sq, SUMMED_CHUNKS)
    return t.name, _bytes(nbytes, "<u4"), _bytes(residual_sq, "<f4")


def _checksums_row(t: PackedTensor) -> tuple[str | bytes, ...]:
    return t.name, _bytes(t.checksums, "<u8")


def _index_row(t: PackedTensor) -> tuple[Any, ...]:
    nbytes = t.nbytes.astype(np.int64).sum(axis=1).tolist()
    return (
        t.name,
        t.base_name,
        t.dtype,
        list(t.shape),
        t.digest,
        t.base_digest,
        t.unit,
        t.threshold_bits,
        t.start_byte.tolist(),
        nbytes,
    )


def _tensor_row(row: _RowForm) -> TensorRow:
    shape = tuple(row.shape)
    content = TensorContent(
        row.tensor, row.base_tensor, row.dtype, shape, row.digest, row.base_digest
    )
    start, nbytes = (np.array(column, np.int64) for column in (row.start_byte, row.nbytes))
    return TensorRow(content, row.unit, row.threshold_bits, start, nbytes)


_ROWS = TypeAdapter(list[_RowForm])


def _bytes(array: npt.NDArray[Any], dtype: str) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()


def _size_text(nbytes: int | None) -> str:
    return "none" if nbytes is None else f"{nbytes} bytes"
