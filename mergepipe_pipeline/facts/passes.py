"""Completes what is known of experts: equal contents are taken over, and the rest is read.

Reading for digests is cheaper than analysing, but dearer than doing both at once; so digests come
first only where there is reason to expect known contents: a new version of an expert, or a copy by
another name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING

from mergepipe_pipeline.catalog.contents import refuse_changed
from mergepipe_pipeline.catalog.pairs import Content, Origin, Pair
from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.threads import release_freed
from mergepipe_pipeline.concurrency.workers import TaskQueue, Workers
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.model import Model, view_digest
from mergepipe_pipeline.domain.segments import Segments
from mergepipe_pipeline.domain.stats import TensorStats
from mergepipe_pipeline.facts.contents import Contents
from mergepipe_pipeline.facts.input_segments import made_place, pass_inputs

if TYPE_CHECKING:
    from mergepipe_pipeline.facts.analysed import AnalysedExpert

#: What a checkpoint looks like without its names: size, header and probe of every file.
Look = tuple[tuple[int, str, str], ...]
#: Each holds a few windows of its own in memory.
_EXPERTS_PER_PASS = 16
#: Expert bytes between two savings of what a pass has done.
_SAVE_NBYTES = 4 << 30
#: Magnitudes, of 8 bytes, that are held at once.
_MOST_ENTRIES = 1 << 24


def complete(experts: Sequence[AnalysedExpert]) -> None:
    """Make the statistics of experts of one base and grid known, for the pairs they were asked for.

    One pass reads the base once for all of them. What it has done is remembered as it goes, so that
    a crash costs little; it also yields digests.
    """
    if not experts:
        return
    first = experts[0]
    models = [first.base, *(e.expert for e in experts)]
    checkpoints = [c for model in models for c in model.checkpoints]
    for checkpoint in checkpoints:
        Contents(first.warehouse, checkpoint, first.progress).verify()
    known = _KnownContents(first)
    unread = [(e, pairs) for e in experts if (pairs := known.unread(e, e.missing()))]
    for start in range(0, len(unread), _EXPERTS_PER_PASS):
        _analyze(unread[start : start + _EXPERTS_PER_PASS])
    for checkpoint in checkpoints if unread else ():  # they may have changed while they were read
        Contents(first.warehouse, checkpoint, first.progress).verify()


class _KnownContents:
    """Statistics of equal contents, for the experts of one base; the catalog is read once."""

    def __init__(self, first: AnalysedExpert) -> None:
        self._catalog, self._grid = first.warehouse.catalog, first.grid

    def unread(self, e: AnalysedExpert, pairs: Sequence[Pair]) -> list[Pair]:
        """The part of `pairs` that must be read; statistics of the others are known now."""
        one = len(e.expert.checkpoints) == 1 and not e.expert.is_partial
        if not pairs or not one or not self._is_expected(e.expert.checkpoint):
            return list(pairs)
        sources: dict[tuple[str, str], dict[Pair, Origin]] = {}
        own = e.base.model_id, e.expert.model_id
        for pair, content in _contents(e, pairs).items():
            source = self._contents.get(content)
            # What an expert's own analysis lacks (a damaged file) takes a read.
            if source and (source.base_id, source.checkpoint_id) != own:
                sources.setdefault((source.base_id, source.checkpoint_id), {})[pair] = source
        done: set[Pair] = set()
        for ids, tensors in sources.items():
            for taken in self._taken(*ids, tensors):
                e.put(taken)
                done |= {(t.tensor, t.base_tensor) for t in taken}
        return [pair for pair in pairs if pair not in done]

    def _taken(
        self, base_id: str, checkpoint_id: str, tensors: Mapping[Pair, Origin]
    ) -> Iterator[tuple[TensorStats, ...]]:
        """Statistics for `tensors` from an expert that has them, as much at once as may be held."""
        facts, elems = self._catalog.facts(base_id, checkpoint_id), self._grid.block_elems
        known = facts.stats(elems).by_pair
        by_source: dict[Pair, list[TensorStats]] = {}
        for (name, base_name), source in tensors.items():
            if stats := known.get((source.tensor, base_name)):
                renamed = replace(stats, tensor=name)
                by_source.setdefault((source.tensor, base_name), []).append(renamed)
        held: list[TensorStats] = []
        entries = 0
        for pair, magnitudes in facts.magnitudes(elems, by_source):
            held += (replace(t, block_magnitudes=magnitudes) for t in by_source.pop(pair))
            entries += len(magnitudes.bits)
            if entries > _MOST_ENTRIES:
                yield tuple(held)
                held, entries = [], 0
        # Pairs whose magnitudes turned out to be damaged are not copied: they are read again.
        whole = facts.known_pairs(elems)
        yield (*held, *chain.from_iterable(ts for p, ts in by_source.items() if p in whole))

    def _is_expected(self, own: Checkpoint) -> bool:
        """Whether an earlier version of the name is known, or a checkpoint that looks the same."""
        if self._catalog.digests(own.checkpoint_id) is not None:
            return True
        others = {i: seen for i, seen in self._digested.items() if i != own.checkpoint_id}
        return any(own.name in names or _look(own) == look for look, names in others.values())

    @cached_property
    def _contents(self) -> Mapping[Content, Origin]:
        return self._catalog.known_contents(self._grid.block_elems)

    @cached_property
    def _digested(self) -> dict[str, tuple[Look, set[str]]]:
        """Checkpoints whose digests are known, by id: what they look like, and their names."""
        known = self._catalog.digested()
        digested: dict[str, tuple[Look, set[str]]] = {}
        for name in self._catalog.names():
            for registration in self._catalog.history(name):
                c = registration.checkpoint
                if c.checkpoint_id in known:
                    digested.setdefault(c.checkpoint_id, (_look(c), set()))[1].add(name)
        return digested


def _look(c: Checkpoint) -> Look:
    return tuple((f.nbytes, f.header_sha256, f.probe_sha256) for f in c.files)


def _contents(e: AnalysedExpert, pairs: Sequence[Pair]) -> dict[Pair, Content]:
    """The contents of the pairs whose tensors are both as stored."""
    digests, base_digests = (
        [Contents(e.warehouse, c, e.progress).learn() for c in model.checkpoints]
        for model in (e.expert, e.base)
    )
    contents = {}
    for pair in pairs:
        a, b = e.expert.views[pair[0]], e.base.views[pair[1]]
        if a.whole and b.whole:
            of_pair = view_digest(a, digests), view_digest(b, base_digests)
            contents[pair] = Content(*of_pair, a.dtype, b.dtype, b.name)
    return contents


def _analyze(batch: Sequence[tuple[AnalysedExpert, Sequence[Pair]]]) -> None:
    """Read a batch of experts beside their base, and remember what the pass finds as it goes."""
    from mergepipe_pipeline.analysis.statistics import analyze_experts

    first = batch[0][0]
    with_pairs = [(e.expert, pairs) for e, pairs in batch]
    nbytes = sum(m.views[tensor].stored_nbytes for m, pairs in with_pairs for tensor, _ in pairs)
    names = ", ".join(m.name for m, _ in with_pairs[:3]) + (", …" if len(batch) > 3 else "")
    models = [*(m for m, _ in with_pairs), first.base]
    inputs = pass_inputs(first.warehouse, models, first.progress)
    with (
        first.progress.task(f"analyze {names}", nbytes) as advance,
        Workers(threads.CATALOG, finish_all=True) as keepers,
    ):
        findings = _Findings([e for e, _ in batch], keepers.queue())
        tasks = analyze_experts(with_pairs, first.base, first.grid, progress=advance, known=inputs)
        for done in tasks:
            for number, stats in done:
                findings.add(number, stats)
            if findings.unsaved_nbytes >= _SAVE_NBYTES:
                findings.save()
        findings.save()
        findings.wait()


class _Findings:
    """Statistics and digests of a pass over experts and their base, not yet handed to the disk."""

    def __init__(self, experts: Sequence[AnalysedExpert], saving: TaskQueue[None]) -> None:
        self._experts, self._saving = experts, saving
        self._base, self._catalog = experts[0].base, experts[0].warehouse.catalog
        self._known: dict[str, Mapping[str, str]] = {}
        self._stats: list[list[TensorStats]] = [[] for _ in experts]
        self._digested: dict[str, tuple[Checkpoint, dict[str, tuple[Segments, ...]]]] = {}
        self._made: dict[str, dict[str, tuple[Segments, ...]]] = {}
        self.unsaved_nbytes = 0

    def add(self, number: int, stats: TensorStats) -> None:
        """Take the statistics of a tensor of an expert.

        Raises CorruptionError if the tensor has other content than when it was read before.
        """
        expert = self._experts[number].expert
        self._stats[number].append(stats)
        self._add_digests(expert, stats.tensor, stats.segments)
        self._add_digests(self._base, stats.base_tensor, stats.base_segments)
        self.unsaved_nbytes += expert.views[stats.tensor].stored_nbytes

    def _add_digests(self, model: Model, tensor: str, taken: tuple[Segments, ...]) -> None:
        if not taken:
            return
        view = model.views[tensor]
        if view.is_made:
            owner, name = made_place(view, [c.checkpoint_id for c in model.checkpoints])
            self._made.setdefault(owner, {})[name] = taken
            return
        part = view.stored[0]
        checkpoint, name = model.checkpoints[part.source], part.entry.name
        checkpoint_id = checkpoint.checkpoint_id
        if checkpoint_id not in self._known:
            self._known[checkpoint_id] = self._catalog.contents(checkpoint_id).known()
        refuse_changed(self._known[checkpoint_id], checkpoint, name, taken[0].content)
        self._digested.setdefault(checkpoint_id, (checkpoint, {}))[1][name] = taken

    def save(self) -> None:
        """Hand them to the disk, after what was saved before is written."""
        self.wait()
        for expert, tensors in zip(self._experts, self._stats, strict=True):
            if tensors:
                self._saving.put(partial(expert.put, tuple(tensors)))
                tensors.clear()
        for checkpoint_id, (checkpoint, taken) in self._digested.items():
            files = self._catalog.contents(checkpoint_id)
            self._saving.put(partial(files.put, taken, checkpoint.by_name))
        for owner, made in self._made.items():
            self._saving.put(partial(self._catalog.contents(owner).put_made, made))
        self._digested, self._made = {}, {}
        self.unsaved_nbytes = 0

    def wait(self) -> None:
        """Wait until all is written. Raises what saving raised."""
        for _ in self._saving.rest():
            pass
        release_freed()  # allocators would keep it: 614 MiB at the end of 20 experts, not 489
