"""What is known of a pair, an expert against a base: sealed files in one folder.

An analysis is a file `bN` by the length N of its blocks, with a row for each pair of tensors.
Facts that operators asked for later are in files by their key. A damaged file is reported and
counts as absent, so that its facts are found again; earlier files of other tensors stay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from mergepipe_pipeline.catalog import arrow_tables
from mergepipe_pipeline.catalog import stats_tables as tables
from mergepipe_pipeline.catalog.arrow_tables import Key
from mergepipe_pipeline.catalog.formats import FACTS
from mergepipe_pipeline.catalog.row_groups import read_parts
from mergepipe_pipeline.catalog.seals import find_sealed, read_facts, version, write_sealed
from mergepipe_pipeline.domain.stats import ExpertStats, Histogram, Magnitudes

#: (expert's tensor, base's tensor).
Pair = tuple[str, str]
#: The numbers of one fact, as its maker orders them.
Fact = tuple[float, ...]


class Content(NamedTuple):
    """All that statistics follow from: the bytes compared, and the name that draws the samples."""

    digest: str
    base_digest: str
    dtype: str
    base_dtype: str
    base_tensor: str


class Origin(NamedTuple):
    """An expert's tensor that was analysed, by the ids of base and expert."""

    base_id: str
    checkpoint_id: str
    tensor: str


class PairFacts:
    """The facts of one expert, or of a group of them, against one base."""

    def __init__(self, folder: Path, base_id: str, owner_id: str) -> None:
        self.base_id, self.owner_id = base_id, owner_id
        self._folder = folder / FACTS / base_id / owner_id

    def put_stats(self, stats: ExpertStats) -> None:
        """Store an analysis; earlier ones of other tensors stay. Raises StorageFullError."""
        write_sealed(self._folder, f"b{stats.block_elems}", tables.encode_stats(stats))

    def stats(self, block_elems: int, *, without: Collection[str] = ()) -> ExpertStats:
        """The statistics, without magnitudes.

        `without` names what stays empty ("sample", "hist"): that is most of the bytes.
        """
        columns = tables.columns_without(without)
        found = (t for part in self._read(block_elems, columns) for t in tables.decode_stats(part))
        by_pair = {(t.tensor, t.base_tensor): t for t in found}
        return ExpertStats(self.base_id, self.owner_id, block_elems, tuple(by_pair.values()))

    def histograms(self, block_elems: int) -> dict[Pair, Histogram]:
        """The histograms that `stats` may leave out."""
        columns = ["tensor", "base_tensor", "hist_bins", "hist_counts"]
        histograms: dict[Pair, Histogram] = {}
        for part in self._read(block_elems, columns):
            histograms |= tables.decode_histograms(part)
        return histograms

    def magnitudes(
        self, block_elems: int, pairs: Collection[Pair]
    ) -> Iterator[tuple[Pair, Magnitudes]]:
        """The magnitudes of `pairs`, where they have some.

        Those of one row group are held at a time: all of them are near a hundredth of the expert.
        """
        asked = set(pairs)
        columns = ["tensor", "base_tensor", *tables.MAGNITUDES]
        for path in self._files(block_elems):
            for key in keys_of(path):
                if asked.intersection(key):
                    part = _read_part(path, [key], columns)
                    for pair, magnitudes in tables.decode_magnitudes(part) if part else ():
                        if pair in asked:
                            asked.remove(pair)
                            yield pair, magnitudes

    def known_pairs(self, block_elems: int) -> set[Pair]:
        """The pairs of tensors that were analysed, as far as footers tell."""
        files = self._files(block_elems)
        return {pair for path in files for key in keys_of(path) for pair in key}

    def missing_pairs(self, block_elems: int, pairs: Iterable[Pair]) -> list[Pair]:
        """The part of `pairs` that was not analysed yet."""
        known = self.known_pairs(block_elems)
        return [pair for pair in pairs if pair not in known]

    def put_fact(self, key: str, facts: Mapping[str, Fact]) -> None:
        """Remember facts of tensors under `key`; earlier ones of the key stay."""
        write_sealed(self._folder, key, arrow_tables.encode_facts(facts, key))

    def fact(self, key: str) -> dict[str, Fact]:
        """All facts under `key`, by tensor; empty if none is known."""
        facts: dict[str, Fact] = {}
        for path in find_sealed(self._folder, key):
            decode = partial(arrow_tables.decode_facts, where=str(path))
            facts |= read_facts(path, decode) or {}
        return facts

    def _files(self, block_elems: int) -> list[Path]:
        return find_sealed(self._folder, f"b{block_elems}")

    def _read(self, block_elems: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        for path in self._files(block_elems):
            part = _read_part(path, None, columns)
            if part is not None:
                yield part


def known_contents(folder: Path, block_elems: int) -> dict[Content, Origin]:
    """Where in a catalog's folder the statistics of each analysed content are."""
    sources: dict[Content, Origin] = {}
    for path in sorted((folder / FACTS).glob(f"*/*/b{block_elems}.*.parquet")):
        part = _read_part(path, None, ("tensor", *Content._fields))
        base_id, checkpoint_id = path.parts[-3:-1]
        for row in part.to_pylist() if part else ():
            tensor = row.pop("tensor")
            if row["digest"] and row["base_digest"]:
                sources[Content(**row)] = Origin(base_id, checkpoint_id, tensor)
    return sources


def keys_of(path: Path) -> tuple[Key, ...]:
    """The keys of an analysis' row groups; empty for a file that is gone or damaged."""
    return _keys_of(path, version(path))


# One verb asks several times for every expert.
@lru_cache(maxsize=512)
def _keys_of(path: Path, _version: tuple[int, int] | None) -> tuple[Key, ...]:
    return read_parts(path, tables.PAIR_STATS, lambda file: file.keys) or ()


def _read_part(path: Path, keys: Sequence[Key] | None, columns: Sequence[str]) -> pa.Table | None:
    """Columns of some row groups (None: of all); None for a file that is gone or damaged."""
    return read_parts(
        path,
        tables.PAIR_STATS,
        lambda file: file.read_all(file.keys if keys is None else keys, columns),
    )
