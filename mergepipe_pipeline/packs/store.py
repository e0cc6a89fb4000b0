"""The folder of packs: each is found by the id that its contents give, so `find` is no search."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from threading import Lock

import numpy as np

from mergepipe_pipeline.catalog.seals import sealed_path, warn_once
from mergepipe_pipeline.domain.pack import (
    CHUNK_ELEMS,
    TIERS,
    PackedTensor,
    PackSource,
    TensorContent,
    Tier,
)
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.packs.index import (
    SUMMED_ELEMS,
    ChunkRows,
    Residuals,
    Sizes,
    TensorRow,
    damaged_pack,
    frames_path,
    pack_id_of,
    per_tier,
    read_index,
    sizes_of,
    summed,
    tails_from,
)

_PACK_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, eq=False)
class Pack:
    """A pack by the rows of its index, in the order of its files, and its other sealed files.

    Reading raises DamagedPackError for what is not as it was written.
    """

    root: Path
    rows: tuple[TensorRow, ...]
    chunks: Path
    sums: Path

    @property
    def pack_id(self) -> str:
        """The id, which names the folder."""
        return self.root.name

    @cached_property
    def tier_nbytes(self) -> Mapping[Tier, int]:
        """Sizes of the files of frames."""
        columns = [[row.nbytes[number] for row in self.rows] for number in range(len(TIERS))]
        return dict(zip(TIERS, map(sum, columns), strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of all frames."""
        return sum(self.tier_nbytes.values())

    @property
    def source(self) -> PackSource:
        """The name that a plan has of it."""
        return PackSource(self.pack_id, str(self.root))

    @cached_property
    def contents(self) -> Mapping[str, TensorContent]:
        """Tensors by name, in the order of the files."""
        return {r.content.name: r.content for r in self.rows}

    @cached_property
    def tensors(self) -> Mapping[str, PackedTensor]:
        """Tensors by name, in the order of the files; each is read when it is asked for."""
        return _Tensors(self)

    def holds(self, digests: Mapping[str, str]) -> bool:
        """Whether a checkpoint with these `digests` by tensor has all its tensors.

        The pack names them as its base does, the checkpoint perhaps otherwise.
        """
        return {row.content.digest for row in self.rows} <= set(digests.values())

    def sizes(self, block_elems: int) -> Iterator[tuple[TensorRow, Sizes, Residuals]]:
        """Per tensor in order `nbytes` [tiers, blocks] and `residual_sq` [levels, blocks].

        `block_elems` is a multiple of CHUNK_ELEMS.
        """
        path, elems = self.sums, SUMMED_ELEMS
        if block_elems % SUMMED_ELEMS:
            path, elems = self.chunks, CHUNK_ELEMS
        for row, nbytes, residual_sq in self._kept(path, elems):
            yield row, *summed(nbytes, residual_sq, block_elems // elems)

    def _kept(self, path: Path, block_elems: int) -> Iterator[tuple[TensorRow, Sizes, Residuals]]:
        """Do as `sizes`, of the blocks that one of the files has."""
        for row, kept in zip_longest(self.rows, ChunkRows(path).sizes()):
            if row is None or kept is None or kept[0] != row.content.name:
                raise damaged_pack(path, "the tensors of the index", "others")
            yield row, *sizes_of(kept[1], row, path, block_elems)


def indexed_pack(root: Path) -> Pack:
    """The pack in a folder, of which only the index was looked at. Raises as `open_pack`."""
    rows, meta = read_index(root)
    files = (sealed_path(root, s, getattr(meta, s)) for s in ("chunks", "sums"))
    return Pack(root, rows, *files)


def open_pack(root: Path) -> Pack:
    """The pack in a folder, which is named by its id.

    Raises DamagedPackError for a pack that is not as it was written, but for bytes inside of files
    that are read in parts; these are compared when they are read. Raises PackVersionError.
    """
    pack = indexed_pack(root)
    if (pack_id := pack_id_of([r.content for r in pack.rows])) != root.name:
        raise damaged_pack(
            root, f"the contents of pack {root.name[:16]}", f"those of {pack_id[:16]}"
        )
    if len(pack.contents) < len(pack.rows):
        raise damaged_pack(root, "tensors of different names", "a name twice")
    start_byte = np.zeros(len(TIERS), np.int64)
    for row in pack.rows:
        if row.start_byte != tuple(start_byte):
            raise damaged_pack(root, "frames of tensors one after the other", row.content.name)
        start_byte += row.nbytes
    for tier, expected in pack.tier_nbytes.items():
        path = frames_path(root, tier)
        found = f"{path.stat().st_size} bytes" if path.is_file() else "none"
        if found != f"{expected} bytes":
            raise damaged_pack(path, f"{expected} bytes", found)
    for path in (pack.chunks, pack.sums):
        if not path.is_file():
            raise damaged_pack(path, "the file", "none")
    return pack


class _Tensors(Mapping[str, PackedTensor]):
    """Tensors of a pack with their arrays, of which a few are held. Safe for threads."""

    def __init__(self, pack: Pack) -> None:
        self._pack, self._rows = pack, {r.content.name: r for r in pack.rows}
        self._chunks = ChunkRows(pack.chunks)
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __getitem__(self, name: str) -> PackedTensor:
        row = self._rows[name]
        with self._lock:
            *sizes, checksums = self._chunks[name]
        nbytes, residual_sq = sizes_of(sizes, row, self._pack.chunks)
        return PackedTensor(
            *row.content,
            row.unit,
            row.factors,
            row.threshold_bits,
            nbytes,
            per_tier(checksums, "<u8", row, self._pack.chunks),
            residual_sq,
            np.array(row.start_byte, np.int64),
            tails_from(row),
        )


def warn_damaged(path: Path, error: CorruptionError) -> None:
    """Warn of a damaged pack that is left out, once."""
    warn_once(
        path,
        error,
        "run `mergepipe pack` again; until then merges read the expert's own files; if these are "
        "in cold storage, copy them back first",
    )


class PackStore:
    """The folder `packs` of a warehouse."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, pack_id: str) -> Path:
        """Where a pack is or would be."""
        return self._folder / pack_id

    def ids(self) -> list[str]:
        """The ids of all packs, damaged ones among them; sorted."""
        try:
            names = os.listdir(self._folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in names if _PACK_ID.fullmatch(name))

    def open(self, pack_id: str) -> Pack:
        """The pack of an id that is there. Raises as `open_pack`."""
        return open_pack(self.path(pack_id))

    def find(self, pack_id: str) -> Pack | None:
        """The pack of an id; None if there is none that can be read, of which it warns once."""
        path = self.path(pack_id)
        if not path.is_dir():
            return None
        try:
            return self.open(pack_id)
        except CorruptionError as error:
            warn_damaged(path, error)
            return None

    def of(self, contents: Sequence[TensorContent]) -> Pack | None:
        """The pack of these tensors; None if there is none that can be read."""
        return self.find(pack_id_of(contents)) if contents else None
