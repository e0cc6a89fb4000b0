"""The results of analyses: statistics and magnitudes of experts against bases, in files by base.

An analysis is up to three files: of tensors, of blocks, of magnitudes. The first is written last
and names the seals of the other files, so that a missing or exchanged one is noticed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from mergepipe_pipeline.catalog import stats_tables as tables
from mergepipe_pipeline.catalog.formats import BLOCK_STATS
from mergepipe_pipeline.catalog.magnitude_files import (
    MAGNITUDES,
    decode_magnitudes,
    encode_magnitudes,
)
from mergepipe_pipeline.catalog.row_groups import RowGroups, write_groups
from mergepipe_pipeline.catalog.seals import (
    drop,
    find_sealed,
    name_parts,
    place_of,
    read_facts,
    seal_of,
    sealed_path,
    version,
    write_sealed,
)
from mergepipe_pipeline.domain.stats import ExpertStats, Magnitudes, TensorStats
from mergepipe_pipeline.errors import CorruptionError

Pair = tuple[str, str]


class Content(NamedTuple):
    """All that statistics follow from: the bytes compared, and the name that draws the signs."""

    digest: str
    base_digest: str
    dtype: str
    base_dtype: str
    base_tensor: str


class Source(NamedTuple):
    """An expert's tensor that was analysed, by the ids of base and expert."""

    base_id: str
    checkpoint_id: str
    tensor: str


class _Analysis(NamedTuple):
    """The files of one analysis, and the (expert's tensor, base's tensor) in them."""

    tensors: Path
    blocks: Path
    magnitudes: Path | None
    pairs: frozenset[Pair]

    @property
    def is_there(self) -> bool:
        """Whether all its files are there, damaged or not."""
        return self.blocks.exists() and (self.magnitudes is None or self.magnitudes.exists())


class Analyses:
    """The folder of block statistics of a catalog."""

    def __init__(self, folder: Path) -> None:
        self._all = folder / BLOCK_STATS

    def put_stats(self, stats: ExpertStats) -> None:
        """Store an analysis; earlier ones of other tensors stay.

        Blocks and magnitudes are written first: the tensors' file shows that it is whole.
        """
        folder, stem = self._all / stats.base_id, _stem(stats.checkpoint_id, stats.block_elems)
        seal = None
        if any(t.block_magnitudes for t in stats.tensors):
            magnitudes = encode_magnitudes(stats)
            _, seal = name_parts(write_groups(folder, f"{stem}.magnitudes", magnitudes))
        place = place_of(folder, f"{stem}.blocks")
        tensors, blocks = tables.encode_stats(stats, seal, partial(seal_of, place=place))
        write_sealed(folder, f"{stem}.blocks", blocks)
        write_sealed(folder, f"{stem}.tensors", tensors)

    def stats(
        self, base_id: str, checkpoint_id: str, block_elems: int, *, without: Collection[str] = ()
    ) -> ExpertStats | None:
        """The statistics of an expert against a base, without magnitudes; None if there are none.

        `without` names what stays empty ("sketch", "sample", "hist"): that is most of the bytes.
        """
        by_pair: dict[Pair, TensorStats] = {}
        analyses = self._of(base_id, checkpoint_id, block_elems)
        for analysis in analyses:
            blocks = read_facts(analysis.blocks, bytes)
            tensors = None if blocks is None else read_facts(analysis.tensors, bytes)
            if blocks is not None and tensors is not None:
                where = str(analysis.tensors), str(analysis.blocks)
                by_pair |= tables.decode_stats(tensors, blocks, *where, without).by_pair
        if not analyses:
            return None
        return ExpertStats(base_id, checkpoint_id, block_elems, tuple(by_pair.values()))

    def histograms(
        self, base_id: str, checkpoint_id: str, block_elems: int
    ) -> dict[Pair, tables.Histogram]:
        """The histograms that `stats` may leave out, from the small file alone."""
        histograms: dict[Pair, tables.Histogram] = {}
        for analysis in self._of(base_id, checkpoint_id, block_elems):
            tensors = read_facts(analysis.tensors, bytes)
            if tensors is not None:
                histograms |= tables.decode_histograms(tensors, str(analysis.tensors))
        return histograms

    def magnitudes(
        self, base_id: str, checkpoint_id: str, block_elems: int, pairs: Collection[Pair]
    ) -> Iterator[tuple[Pair, Magnitudes]]:
        """The magnitudes of `pairs` (expert's tensor, base's tensor), where they have some.

        One is held at a time: all of them are near a hundredth of the expert.
        """
        missing = set(pairs)
        for analysis in self._of(base_id, checkpoint_id, block_elems):
            if analysis.magnitudes is None or missing.isdisjoint(analysis.pairs):
                continue
            seen = version(analysis.magnitudes)
            try:
                with RowGroups(analysis.magnitudes, MAGNITUDES) as file:
                    for pair, magnitudes in decode_magnitudes(file, missing):
                        missing.remove(pair)
                        yield pair, magnitudes
            except FileNotFoundError:
                continue
            except CorruptionError as error:
                drop(analysis.magnitudes, error, seen)

    def known_pairs(self, base_id: str, checkpoint_id: str, block_elems: int) -> set[Pair]:
        """The (expert's tensor, base's tensor) whose analysis has all its files."""
        pairs: set[Pair] = set()
        for analysis in self._of(base_id, checkpoint_id, block_elems):
            if analysis.is_there and _is_whole(analysis.blocks, version(analysis.blocks)):
                pairs |= analysis.pairs
        return pairs

    def missing_pairs(
        self, base_id: str, checkpoint_id: str, block_elems: int, pairs: Iterable[Pair]
    ) -> list[Pair]:
        """The part of `pairs` (expert's tensor, base's tensor) that has no statistics yet."""
        present = self.known_pairs(base_id, checkpoint_id, block_elems)
        return [pair for pair in pairs if pair not in present]

    def known_digests(self, base_id: str, model_id: str, block_elems: int) -> dict[str, str]:
        """Tensor name to digest as analyses of a model (or of experts of this base) saw them."""
        is_base = base_id == model_id
        name, digest = ("base_tensor", "base_digest") if is_base else ("tensor", "digest")
        digests: dict[str, str] = {}
        for path in self._files(base_id, None if is_base else model_id, block_elems):
            rows = read_facts(path, partial(_rows, path, (name, digest)))
            digests |= {tensor: its for tensor, its in rows or () if its}
        return digests

    def contents(self, block_elems: int) -> dict[Content, Source]:
        """Where the statistics of each analysed content are."""
        sources: dict[Content, Source] = {}
        columns = ("tensor", *Content._fields)
        bases = sorted(self._all.iterdir()) if self._all.is_dir() else []
        for path in (p for base in bases for p in self._files(base.name, None, block_elems)):
            analysis = _analysis(path, version(path))
            if analysis is None or not analysis.is_there:
                continue
            checkpoint_id = path.name.partition(".")[0]
            rows = read_facts(path, partial(_rows, path, columns))
            for tensor, *fields in rows or ():
                content = Content(*fields)
                if content.digest and content.base_digest:
                    sources[content] = Source(path.parent.name, checkpoint_id, tensor)
        return sources

    def _files(self, base_id: str, checkpoint_id: str | None, block_elems: int) -> list[Path]:
        """Files of tensors against a base, of one expert or of all."""
        folder = self._all / base_id
        if checkpoint_id is not None:
            return find_sealed(folder, f"{_stem(checkpoint_id, block_elems)}.tensors")
        return [p for p in find_sealed(folder) if f"{_stem('', block_elems)}.tensors." in p.name]

    def _of(self, base_id: str, checkpoint_id: str, block_elems: int) -> list[_Analysis]:
        files = self._files(base_id, checkpoint_id, block_elems)
        analyses = (_analysis(path, version(path)) for path in files)
        return [analysis for analysis in analyses if analysis is not None]


def _rows(path: Path, columns: Sequence[str], data: bytes) -> list[tuple[Any, ...]]:
    return tables.decode_rows(data, str(path), columns)


def _stem(checkpoint_id: str, block_elems: int) -> str:
    return f"{checkpoint_id}.b{block_elems}"


# One verb reads these several times for every expert.
@lru_cache(maxsize=512)
def _analysis(path: Path, version: tuple[int, int] | None) -> _Analysis | None:
    """The analysis that a file of tensors belongs to; None if it is damaged."""

    def decode(data: bytes) -> _Analysis:
        pairs, blocks, magnitudes = tables.decode_pairs(data, str(path))
        stem = path.name.partition(".tensors.")[0]
        return _Analysis(
            path,
            sealed_path(path.parent, f"{stem}.blocks", blocks),
            sealed_path(path.parent, f"{stem}.magnitudes", magnitudes) if magnitudes else None,
            pairs,
        )

    return read_facts(path, decode)


@lru_cache(maxsize=512)
def _is_whole(path: Path, version: tuple[int, int] | None) -> bool:
    return read_facts(path, lambda _: True) is not None
