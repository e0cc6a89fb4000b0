"""The folder of packs: each is found by the id that its contents give, so `find` is no search."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product, zip_longest
from pathlib import Path
from threading import Lock

from mergepipe_pipeline.catalog.seals import warn_once
from mergepipe_pipeline.domain.pack import (
    CHUNK_ELEMS,
    TIERS,
    PackedTensor,
    PackSource,
    TensorContent,
    Tier,
)
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.packs.contents import holds
from mergepipe_pipeline.packs.index import (
    CHECKSUMS,
    CHUNKS,
    SUMMED_ELEMS,
    ChunkRows,
    PackIndex,
    Residuals,
    Sizes,
    TensorRow,
    damaged_pack,
    pack_id_of,
    per_tier,
    read_index,
    sizes_of,
    summed,
)

_PACK_ID = re.compile(r"[0-9a-f]{64}")
_LOSSY: tuple[tuple[Tier, ...], ...] = tuple(TIERS[:n] for n in (4, 3, 2, 1, 0))
_EXACT: tuple[tuple[Tier, ...], ...] = (("X20", "X"), ("X20",), ())
#: All that a pack may have: a tier goes with those that its level reads. The most first.
TIER_SETS = tuple(sorted(((*a, *b) for a, b in product(_LOSSY, _EXACT) if a or b), key=len))[::-1]


@dataclass(frozen=True, eq=False)
class Pack:
    """A pack whose index is as it was written. Reading raises CorruptionError for what is not."""

    pack_id: str
    root: Path
    index: PackIndex

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that it has."""
        return self.index.tiers

    @property
    def nbytes(self) -> int:
        """Bytes of all frames."""
        return int(self.index.tier_nbytes.sum())

    @property
    def source(self) -> PackSource:
        """The name that a plan has of it."""
        return PackSource(self.pack_id, str(self.root))

    @cached_property
    def contents(self) -> Mapping[str, TensorContent]:
        """Tensors by name, in the order of the files."""
        return {r.content.name: r.content for r in self.index.rows}

    @cached_property
    def tensors(self) -> Mapping[str, PackedTensor]:
        """Tensors by name, in the order of the files; each is read when it is asked for."""
        return _Tensors(self.index)

    def holds(self, digests: Mapping[str, str]) -> bool:
        """Whether a checkpoint with these `digests` by tensor has all its tensors."""
        return holds(self.contents.values(), digests)

    def sizes(self, block_elems: int) -> Iterator[tuple[TensorRow, Sizes, Residuals]]:
        """Per tensor in order `nbytes` [tiers, blocks] and `residual_sq` [levels, blocks].

        `block_elems` is a multiple of CHUNK_ELEMS.
        """
        path, elems = self.index.sums, SUMMED_ELEMS
        if block_elems % SUMMED_ELEMS:
            path, elems = self.index.chunks, CHUNK_ELEMS
        for row, nbytes, residual_sq in self._kept(path, elems):
            yield row, *summed(nbytes, residual_sq, block_elems // elems)

    def _kept(self, path: Path, block_elems: int) -> Iterator[tuple[TensorRow, Sizes, Residuals]]:
        """As `sizes`, of the blocks that a file of the index has."""
        for row, kept in zip_longest(self.index.rows, ChunkRows(path, CHUNKS).all()):
            if row is None or kept is None or kept[0] != row.content.name:
                raise damaged_pack(path, "the tensors of the index", "others")
            yield row, *sizes_of(kept[1], row, path, block_elems)


class _Tensors(Mapping[str, PackedTensor]):
    """Tensors of an index with their arrays, of which a few are held. Safe for threads."""

    def __init__(self, index: PackIndex) -> None:
        self._index, self._rows = index, {r.content.name: r for r in index.rows}
        self._chunks = ChunkRows(index.chunks, CHUNKS)
        self._checksums = ChunkRows(index.checksums, CHECKSUMS)
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __getitem__(self, name: str) -> PackedTensor:
        row = self._rows[name]
        with self._lock:
            chunks, (checksums,) = self._chunks[name], self._checksums[name]
        nbytes, residual_sq = sizes_of(chunks, row, self._index.chunks)
        return PackedTensor(
            *row.content,
            row.unit,
            row.threshold_bits,
            nbytes,
            per_tier(checksums, "<u8", row, self._index.checksums),
            residual_sq,
            row.start_byte,
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
        """The pack of an id that is there. Raises CorruptionError."""
        root = self.path(pack_id)
        return Pack(pack_id, root, read_index(root))

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

    def best(self, contents: Sequence[TensorContent]) -> Pack | None:
        """The pack of these tensors with the most tiers; None if there is none."""
        for tiers in TIER_SETS if contents else ():
            pack = self.find(pack_id_of(contents, tiers))
            if pack is not None:
                return pack
        return None
