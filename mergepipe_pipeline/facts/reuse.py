"""Takes statistics over from equal contents: a new version of an expert, or a copy by another name.

Reading for digests is cheaper than analysing, but dearer than doing both at once; so digests come
first only where there is reason to expect known contents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain

from mergepipe_pipeline.catalog.analyses import Content, Source
from mergepipe_pipeline.contents.tensor_digests import ensure_digests
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.model import Model, view_digest
from mergepipe_pipeline.domain.stats import ExpertStats, TensorStats
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.warehouse import Warehouse

Pair = tuple[str, str]
#: What a checkpoint looks like without its names: size, header and probe of every file.
Look = tuple[tuple[int, str, str], ...]
#: Magnitudes, of 8 bytes, that are held at once.
_MOST_ENTRIES = 1 << 24


class StatsReuse:
    """Copies statistics of equal contents for the experts of one base; the catalog is read once."""

    def __init__(
        self, warehouse: Warehouse, base: Model, grid: BlockGrid, progress: Progress | None = None
    ) -> None:
        self._warehouse, self._base, self._grid, self._progress = warehouse, base, grid, progress
        self._catalog = warehouse.catalog

    def rest(self, expert: Model, pairs: Sequence[Pair]) -> list[Pair]:
        """The part of `pairs` (expert's tensor, base's tensor) that must be read.

        Statistics of the rest are now in the catalog under the expert's id.
        """
        if len(expert.checkpoints) > 1 or expert.is_partial or not self._is_expected(expert):
            return list(pairs)
        sources: dict[tuple[str, str], dict[Pair, Source]] = {}
        contents = _contents(self._warehouse, expert, self._base, pairs, self._progress)
        own = self._base.model_id, expert.model_id
        for pair, content in contents.items():
            source = self._contents.get(content)
            # What an expert's own analysis lacks (a damaged file) takes a read.
            if source and (source.base_id, source.checkpoint_id) != own:
                sources.setdefault((source.base_id, source.checkpoint_id), {})[pair] = source
        done: set[Pair] = set()
        for ids, tensors in sources.items():
            for taken in self._taken(*ids, tensors):
                if taken:
                    self._catalog.put_stats(ExpertStats(*own, self._grid.block_elems, taken))
                done |= {(t.tensor, t.base_tensor) for t in taken}
        return [pair for pair in pairs if pair not in done]

    def _taken(
        self, base_id: str, checkpoint_id: str, tensors: Mapping[Pair, Source]
    ) -> Iterator[tuple[TensorStats, ...]]:
        """Statistics for `tensors` from an expert that has them, as much at once as may be held."""
        key = base_id, checkpoint_id, self._grid.block_elems
        source_stats = self._catalog.stats(*key)
        by_source: dict[Pair, list[TensorStats]] = {}
        for (name, base_name), source in tensors.items():
            if source_stats and (stats := source_stats.by_pair.get((source.tensor, base_name))):
                by_source.setdefault((source.tensor, base_name), []).append(
                    replace(stats, tensor=name)
                )
        held: list[TensorStats] = []
        entries = 0
        for pair, magnitudes in self._catalog.magnitudes(*key, by_source):
            held += (replace(t, block_magnitudes=magnitudes) for t in by_source.pop(pair))
            entries += len(magnitudes.bits)
            if entries > _MOST_ENTRIES:
                yield tuple(held)
                held, entries = [], 0
        # Pairs whose magnitudes turned out to be damaged are not copied: they are read again.
        whole = self._catalog.known_pairs(*key)
        yield (*held, *chain.from_iterable(ts for p, ts in by_source.items() if p in whole))

    def _is_expected(self, expert: Model) -> bool:
        """Whether an earlier version of the name is known, or a checkpoint that looks the same."""
        own = expert.checkpoint
        if self._catalog.digests(own.checkpoint_id) is not None:
            return True
        others = {i: seen for i, seen in self._digested.items() if i != own.checkpoint_id}
        return any(own.name in names or _look(own) == look for look, names in others.values())

    @cached_property
    def _contents(self) -> Mapping[Content, Source]:
        return self._catalog.contents(self._grid.block_elems)

    @cached_property
    def _digested(self) -> dict[str, tuple[Look, set[str]]]:
        """Checkpoints whose digests are known, by id: what they look like, and their names."""
        digested: dict[str, tuple[Look, set[str]]] = {}
        for name in self._catalog.names():
            for registration in self._catalog.history(name):
                c = registration.checkpoint
                if self._catalog.digests(c.checkpoint_id) is not None:
                    digested.setdefault(c.checkpoint_id, (_look(c), set()))[1].add(name)
        return digested


def _look(c: Checkpoint) -> Look:
    return tuple((f.nbytes, f.header_sha256, f.probe_sha256) for f in c.files)


def _contents(
    warehouse: Warehouse,
    expert: Model,
    base: Model,
    pairs: Sequence[Pair],
    progress: Progress | None,
) -> dict[Pair, Content]:
    """The contents of the pairs whose tensors are both as stored."""
    digests, base_digests = (
        [ensure_digests(warehouse, c, progress) for c in model.checkpoints]
        for model in (expert, base)
    )
    contents = {}
    for pair in pairs:
        a, b = expert.views[pair[0]], base.views[pair[1]]
        if a.whole and b.whole:
            of_pair = view_digest(a, digests), view_digest(b, base_digests)
            contents[pair] = Content(*of_pair, a.dtype, b.dtype, b.name)
    return contents
