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
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.spec.blocks import BlockGrid
from mergepipe_pipeline.spec.checkpoint import Checkpoint
from mergepipe_pipeline.spec.model import Model, view_digest
from mergepipe_pipeline.spec.stats import ExpertStats, TensorStats
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
        """Those of `pairs` (expert's tensor, base's tensor) that must be read.

        Statistics of the others are now there under the expert's id.
        """
        if len(expert.checkpoints) > 1 or expert.is_partial or not self._is_expected(expert):
            return list(pairs)
        sources: dict[tuple[str, str], dict[Pair, Source]] = {}
        contents = _contents(self._warehouse, expert, self._base, pairs, self._progress)
        own = self._base.model_id, expert.model_id
        for pair, content in contents.items():
            source = self._contents.get(content)
            # What an expert lacks of its own analysis (a damaged file) is only had by reading.
            if source and (source.base_id, source.checkpoint_id) != own:
                sources.setdefault((source.base_id, source.checkpoint_id), {})[pair] = source
        done: set[Pair] = set()
        for ids, wanted in sources.items():
            for taken in self._taken(*ids, wanted):
                if taken:
                    self._catalog.put_stats(ExpertStats(*own, self._grid.block_elems, taken))
                done |= {(t.tensor, t.base_tensor) for t in taken}
        return [pair for pair in pairs if pair not in done]

    def _taken(
        self, base_id: str, checkpoint_id: str, wanted: Mapping[Pair, Source]
    ) -> Iterator[tuple[TensorStats, ...]]:
        """Statistics for `wanted` from an expert that has them, as much at once as may be held."""
        key = base_id, checkpoint_id, self._grid.block_elems
        known = self._catalog.stats(*key)
        by_source: dict[Pair, list[TensorStats]] = {}
        for (name, base_name), source in wanted.items():
            if known and (stats := known.by_pair.get((source.tensor, base_name))):
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
        # Magnitudes that turned out to be damaged are not left out of a copy: they are read again.
        whole = self._catalog.known_pairs(*key)
        yield (*held, *chain.from_iterable(ts for p, ts in by_source.items() if p in whole))

    def _is_expected(self, expert: Model) -> bool:
        """Whether an earlier version of the name is known, or a checkpoint that looks the same."""
        own = expert.checkpoint
        if self._catalog.digests(own.checkpoint_id) is not None:
            return True
        others = {i: known for i, known in self._known.items() if i != own.checkpoint_id}
        return any(own.name in names or _look(own) == look for look, names in others.values())

    @cached_property
    def _contents(self) -> Mapping[Content, Source]:
        return self._catalog.contents(self._grid.block_elems)

    @cached_property
    def _known(self) -> dict[str, tuple[Look, set[str]]]:
        """Checkpoints whose digests are known, by id: what they look like, and their names."""
        known: dict[str, tuple[Look, set[str]]] = {}
        for name in self._catalog.names():
            for registration in self._catalog.history(name):
                c = registration.checkpoint
                if self._catalog.digests(c.checkpoint_id) is not None:
                    known.setdefault(c.checkpoint_id, (_look(c), set()))[1].add(name)
        return known


def _look(c: Checkpoint) -> Look:
    return tuple((f.nbytes, f.header_sha256, f.probe_sha256) for f in c.files)


def _contents(
    warehouse: Warehouse,
    expert: Model,
    base: Model,
    pairs: Sequence[Pair],
    progress: Progress | None,
) -> dict[Pair, Content]:
    """What is compared, of the pairs of which both tensors are as stored."""
    mine, theirs = (
        [ensure_digests(warehouse, c, progress) for c in model.checkpoints]
        for model in (expert, base)
    )
    out = {}
    for pair in pairs:
        a, b = expert.views[pair[0]], base.views[pair[1]]
        if a.whole and b.whole:
            digests = view_digest(a, mine), view_digest(b, theirs)
            out[pair] = Content(*digests, a.dtype, b.dtype, b.name)
    return out
