"""The sealed Parquet files of a pack beside the frames.

`index` has a row per tensor. `chunks` has, per chunk, the sizes of frames and the residuals, which
plans are made from, and the checksums that frames are compared with when they are read; `sums` has
sizes and residuals of SUMMED_CHUNKS chunks each: plans of large merges need nothing finer, and read
a sixteenth. Both are read a few tensors at a time. The seals cover the pack's id, so no file serves
another pack. A release reads what its own version of the codec wrote, and nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError

from mergepipe_pipeline.arrays import F32Array, U32Array
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
    write_sealed,
)
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.bounds import Size
from mergepipe_pipeline.domain.pack import (
    CHUNK_ELEMS,
    CODEC_VERSION,
    FACTORED,
    PACK_FORMAT,
    STEPPED,
    TAIL_LENGTH,
    TIERS,
    PackedTensor,
    TensorContent,
    Tier,
)
from mergepipe_pipeline.errors import CorruptionError, DamagedPackError, PackVersionError
from mergepipe_pipeline.text import listed

#: Chunks of the sums that a pack keeps, and their elements: 1 Mi.
SUMMED_CHUNKS = 16
SUMMED_ELEMS = SUMMED_CHUNKS * CHUNK_ELEMS
#: The next step that brings a damaged pack back.
REMADE = (
    "copy the original back first if it is in cold storage; then run `mergepipe repair`, and "
    "`mergepipe pack` again; where the original is there, `--no-packs` reads it until then"
)

#: Of a tensor without factors.
NO_TAILS: F32Array = np.empty((0, TAIL_LENGTH), np.float32)

Sizes = U32Array
Residuals = F32Array

_CONTENT = pa.struct(
    [
        ("name", pa.string()),
        ("base_name", pa.string()),
        ("dtype", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("digest", pa.string()),
        ("base_digest", pa.string()),
    ]
)
#: Rows of `index`: a `TensorRow` each.
INDEX = pa.schema(
    [
        ("content", _CONTENT),
        ("unit", pa.float32()),
        ("factors", pa.string()),
        ("threshold_bits", pa.uint32()),
        ("tails", pa.binary()),
        ("start_byte", pa.list_(pa.int64())),
        ("nbytes", pa.list_(pa.int64())),
    ]
)
#: Rows of `chunks`: a tensor's arrays as little-endian bytes; those of `sums` lack the checksums.
_ARRAYS = {"nbytes": "<u4", "residual_sq": "<f4", "checksums": "<u8"}
CHUNKS = pa.schema([("tensor", pa.string()), *((name, pa.binary()) for name in _ARRAYS)])
SUMS = pa.schema(list(CHUNKS)[:3])
#: Bytes of arrays in a row group, for some hundred MiB of an expert; and in a file read whole.
_GROUP_NBYTES = 1 << 18
_WHOLE_NBYTES = 1 << 24
_Seal = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
_PerTier = Annotated[tuple[Size, ...], Field(min_length=len(TIERS), max_length=len(TIERS))]
#: Of the codec, and of the files beside frames.
_VERSION = f"{CODEC_VERSION}.{PACK_FORMAT}"


def _checked_tails(data: bytes) -> bytes:
    nbytes = 4 * TAIL_LENGTH * (len(FACTORED) + len(STEPPED))
    if len(data) not in (0, nbytes) or not np.isfinite(np.frombuffer(data, "<f4")).all():
        raise ValueError(f"tails of {nbytes} bytes, or none, and of numbers that are finite")
    return data


class IndexMeta(BaseModel):
    """The seals of the other files, which the index has beside its rows."""

    chunks: _Seal
    sums: _Seal


@dataclass(frozen=True)
class TensorRow:
    """One tensor of `index`; of each tier where its frames begin, and their bytes."""

    content: TensorContent
    unit: float
    factors: Annotated[str, Field(pattern="^([0-9a-f]{16})?$")]
    threshold_bits: Annotated[int, Field(ge=0, lt=1 << 32)]
    tails: Annotated[bytes, AfterValidator(_checked_tails)]
    start_byte: _PerTier
    nbytes: _PerTier


_ROWS = TypeAdapter(tuple[TensorRow, ...])


def pack_id_of(contents: Sequence[TensorContent]) -> str:
    """The id of a pack of these tensors, in whatever order (64 hex)."""
    return digest_json([CODEC_VERSION, TIERS, sorted(contents)])


def frames_name(tier: Tier) -> str:
    """The name of the file of one tier's frames."""
    return f"{tier}.frames"


def frames_path(root: Path, tier: Tier) -> Path:
    """The file of one tier's frames."""
    return root / frames_name(tier)


def write_index(staged: Path, final: Path, of: Sequence[PackedTensor]) -> None:
    """Write the sealed files of a pack that will be named `final`. Raises StorageFullError."""
    sealed = {}
    for stem, schema, row, most_nbytes in (
        ("chunks", CHUNKS, _chunks_row, _GROUP_NBYTES),
        ("sums", SUMS, _sums_row, _WHOLE_NBYTES),
    ):
        data = encode_groups(schema, _groups(schema, of, row, most_nbytes), {}, compression="none")
        sealed[stem] = seal_of(data, place_of(final, stem))
        write_sealed(staged, stem, data, sealed[stem])
    rows = [
        {
            "content": t.content._asdict(),
            "unit": t.unit,
            "factors": t.factors,
            "threshold_bits": t.threshold_bits,
            "tails": _bytes(t.tails, "<f4"),
            "start_byte": t.start_byte,
            "nbytes": t.nbytes.sum(axis=1, dtype=np.int64),
        }
        for t in of
    ]
    table = pa.Table.from_pylist(rows, schema=INDEX)
    data = encode(table, {"codec": _VERSION, **sealed})
    write_sealed(staged, "index", data, seal_of(data, place_of(final, "index")))


def read_index(root: Path) -> tuple[tuple[TensorRow, ...], IndexMeta]:
    """The rows of the index of the pack in a folder, and what it says beside them.

    Raises DamagedPackError, and PackVersionError.
    """
    paths = find_sealed(root, "index")
    if len(paths) != 1:
        raise damaged_pack(root, "one sealed index", f"{len(paths)}")
    (path,) = paths
    with damage_named(path):
        data = read_sealed(path)
        with corruption_named(str(path)):  # its columns are those of its version: maybe others
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
    with damage_named(path):
        table, _ = decode(data, str(path), INDEX)
    try:
        rows = _ROWS.validate_python(table.to_pylist())
        return rows, IndexMeta.model_validate(meta)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        found = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise damaged_pack(path, "an index of tensors", found) from invalid


class ChunkRows:
    """A file `chunks` or `sums`, by tensor; it is open only while it is read.

    Raises DamagedPackError, here and while reading, for what is not as it was written.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._schema = path, CHUNKS if path.name.startswith("chunks.") else SUMS
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

    def sizes(self) -> Iterator[tuple[str, tuple[bytes, ...]]]:
        """The name of each tensor, and the bytes of its sizes and residuals."""
        with self._open() as file:
            for key in file.keys:
                yield from self._rows(file, key, SUMS.names).items()

    def _open(self) -> RowGroups:
        try:
            with damage_named(self._path):
                return RowGroups(self._path, self._schema)
        except FileNotFoundError:
            raise damaged_pack(self._path, "the file", "none") from None

    def _rows(
        self, file: RowGroups, key: Key, columns: Sequence[str] | None = None
    ) -> dict[str, tuple[bytes, ...]]:
        with damage_named(self._path):
            names, *arrays = (column.to_pylist() for column in file.read(key, columns).columns)
        if tuple(names) != key or any(None in array for array in arrays):
            raise damaged_pack(self._path, f"rows of {listed(key, 1)}", "others")
        return dict(zip(names, zip(*arrays, strict=True), strict=True))


def tails_from(row: TensorRow) -> F32Array:
    """The tails of a tensor, [levels that approximate, TAIL_LENGTH], or none."""
    return np.frombuffer(row.tails, "<f4").reshape(-1, TAIL_LENGTH)


def per_tier(
    data: bytes, dtype: str, row: TensorRow, path: Path, block_elems: int = CHUNK_ELEMS
) -> npt.NDArray[Any]:
    """[tiers, blocks] of the bytes of a tensor's array. Raises DamagedPackError for others.

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
    """`nbytes` and `residual_sq` of a tensor, of the bytes of both. Raises as `per_tier`."""
    nbytes, residual_sq = (
        per_tier(data, dtype, row, path, block_elems)
        for data, dtype in zip(arrays, ("<u4", "<f4"), strict=True)
    )
    if tuple(nbytes.sum(axis=1, dtype=np.int64)) != row.nbytes or not (residual_sq >= 0).all():
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


def damaged_pack(path: Path, expected: str | None, found: str | None) -> DamagedPackError:
    """The error for a pack whose folder, or a file in it, is not as it was written."""
    return DamagedPackError(
        "A pack was changed after it was written",
        pack_id=path.parent.name if "." in path.name else path.name,
        where=str(path),
        expected=expected,
        found=found,
        next_step=REMADE,
    )


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Say of a damaged sealed file of a pack that the pack is."""
    try:
        yield
    except DamagedPackError:
        raise
    except CorruptionError as error:
        raise damaged_pack(path, error.expected, error.found) from error


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
    return t.name, *(_bytes(getattr(t, name), dtype) for name, dtype in _ARRAYS.items())


def _sums_row(t: PackedTensor) -> tuple[str | bytes, ...]:
    nbytes, residual_sq = summed(t.nbytes, t.residual_sq, SUMMED_CHUNKS)
    return t.name, _bytes(nbytes, "<u4"), _bytes(residual_sq, "<f4")


def _bytes(array: npt.NDArray[Any], dtype: str) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()
