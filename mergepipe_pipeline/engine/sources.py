"""A plan's checkpoints and packs, open for reading: experts gated, the base in full.

The gate is here: an expert's reader refuses any element outside the plan, and what it counts is
what the kernel was asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from mergepipe_pipeline.errors import CheckpointChangedError
from mergepipe_pipeline.packs.elements import PackedElements
from mergepipe_pipeline.packs.reader import Allowed, PackReader
from mergepipe_pipeline.spec.blocks import Range, clip, coalesce
from mergepipe_pipeline.spec.pack import TIERS_OF, Tier
from mergepipe_pipeline.spec.plan import ExpertInput, LayerTask, MergePlan
from mergepipe_pipeline.spec.segments import COARSE_ELEMS, KnownSegments
from mergepipe_pipeline.spec.view import Part, TensorView
from mergepipe_pipeline.storage.open_checkpoint import open_checkpoint
from mergepipe_pipeline.storage.reader import BlockReader, Tally
from mergepipe_pipeline.storage.source import Reading, open_source
from mergepipe_pipeline.storage.uncached import fits_page_cache
from mergepipe_pipeline.tensors.verified import Verifier


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes read of experts, through the gate, and of the base; the seconds that all took."""

    expert_nbytes: int = 0
    base_nbytes: int = 0
    read_s: float = 0.0

    def __add__(self, other: Read) -> Read:
        return Read(
            self.expert_nbytes + other.expert_nbytes,
            self.base_nbytes + other.base_nbytes,
            self.read_s + other.read_s,
        )

    def __sub__(self, other: Read) -> Read:
        return Read(
            self.expert_nbytes - other.expert_nbytes,
            self.base_nbytes - other.base_nbytes,
            self.read_s - other.read_s,
        )


class SourcePool:
    """Readers for the sources of one plan; a context manager that closes their files.

    What is read for the merge is compared with the segments that are `known`; None: with nothing.
    Raises CheckpointChangedError when a checkpoint is not the one that was planned.
    """

    def __init__(self, plan: MergePlan, known: KnownSegments | None = None) -> None:
        self._stack = ExitStack()
        self.known = known
        self._readers: dict[tuple[int, bool], BlockReader] = {}
        self._before: dict[tuple[int, bool], BlockReader] = {}
        self._packs: dict[tuple[int, bool], PackReader] = {}
        self._tallies = {True: Tally(), False: Tally()}
        self._plan = plan
        # A budget is of bytes that storage delivers: nothing is fetched on the side.
        self._reading: Reading = "exact" if fits_page_cache(_planned_nbytes(plan)) else "once"
        self._lock = threading.Lock()

    def __enter__(self) -> SourcePool:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def reads_ahead(self) -> bool:
        """Whether the disk may be told of reads to come: what it fetches then must have a place."""
        return self._reading == "exact"

    def expert(self, source: int) -> BlockReader:
        """The gated reader of an expert: exactly the plan's ranges."""
        return self._reader(source, gated=True)

    def base(self, source: int) -> BlockReader:
        """The ungated reader of the base (or of the model that stands in for one)."""
        return self._reader(source, gated=False)

    def expert_before(self, source: int) -> BlockReader:
        """As `expert`, for bytes that the merge itself will read and count."""
        return self._reader(source, gated=True, before=True)

    def base_before(self, source: int) -> BlockReader:
        """As `base`, for bytes that the merge itself will read and count."""
        return self._reader(source, gated=False, before=True)

    def packed(self, e: ExpertInput, *, before: bool = False) -> PackedElements | None:
        """What an expert's input gets of a pack, as the plan says; `before` as above.

        Raises CorruptionError for a pack that is not as it was written.
        """
        if e.packed is None:
            return None
        key = e.packed.pack, before
        with self._lock:
            if key not in self._packs:
                self._packs[key] = self._open_pack(*key)
            reader = self._packs[key]
        return PackedElements(reader, e.packed, e.digest)

    def verifier(self, view: TensorView, digest: str) -> Verifier | None:
        """What compares one reading of a view with its segments.

        Raises CheckpointChangedError if these are not of the content that the plan names.
        """
        if self.known is None or not view.stored:
            return None
        known = self.known.of_view(view)
        if view.whole and known.segment_elems == COARSE_ELEMS and known.content != digest:
            raise CheckpointChangedError(
                "What the catalog knows of a tensor is not what the plan was made from",
                where=f"{known.where}, tensor {view.name}",
                expected=f"content {digest[:16]}",
                found=f"content {known.content[:16]}",
                next_step="run the same command again: it plans anew",
            )
        return Verifier(view, known)

    def verify_unchanged(self) -> None:
        """Raise CheckpointChangedError if any file read so far is not the planned one any more."""
        for reader in (*self._readers.values(), *self._before.values()):
            reader.verify_unchanged()

    def read_here(self) -> Read:
        """What the thread that asks has read for the merge so far."""
        expert, base = self._tallies[True], self._tallies[False]
        return Read(expert.nbytes, base.nbytes, expert.read_s + base.read_s)

    def _reader(self, source: int, *, gated: bool, before: bool = False) -> BlockReader:
        key, readers = (source, gated), self._before if before else self._readers
        with self._lock:  # one reader per source: workers ask at once, and each counts its bytes
            if key not in readers:
                readers[key] = self._open(source, gated=gated, before=before)
            return readers[key]

    def _open(self, number: int, *, gated: bool, before: bool) -> BlockReader:
        planned = self._plan.sources[number]
        checkpoint = open_checkpoint(planned.root, planned.name, probes=False)
        if checkpoint.stamp != planned.stamp:
            raise CheckpointChangedError(
                "A checkpoint changed after the plan was made",
                where=planned.root,
                expected=planned.stamp,
                found=checkpoint.stamp,
                next_step="run the merge again: it plans anew from the files as they are",
            )
        # What is read before will be read again.
        reading: Reading = "exact" if before else self._reading
        files = self._stack.enter_context(open_source(planned.root, reading))
        allowed = access_set(self._plan.layers, number) if gated else None
        return BlockReader(files, checkpoint, allowed, None if before else self._tallies[gated])

    def _open_pack(self, number: int, before: bool) -> PackReader:
        tally = Tally() if before else self._tallies[True]
        reading: Reading = "exact" if before else self._reading
        allowed = packed_access_set(self._plan.layers, number)
        reader = PackReader(self._plan.packs[number], allowed, tally, reading)
        return self._stack.enter_context(reader)


def _planned_nbytes(plan: MergePlan) -> int:
    """Bytes that a plan reads, the base's included, and writes."""
    tasks = [task for layer in plan.layers for task in layer.tasks]
    base = sum(task.base.view.nbytes for task in tasks if task.base)
    return (
        base
        + sum(lay.expert_bytes_planned for lay in plan.layers)
        + sum(t.out_nbytes for t in tasks)
    )


def access_set(layers: Sequence[LayerTask], source: int) -> dict[str, tuple[Range, ...]]:
    """Stored tensor to the element ranges of `source` that the layers read as an expert's."""
    ranges: dict[str, list[Range]] = {}
    for layer in layers:
        for task in layer.tasks:
            for e in task.experts:
                for part, found in _parts_read(e):
                    if part.source == source:
                        ranges.setdefault(part.entry.name, []).extend(found)
    return {name: coalesce(r) for name, r in ranges.items()}


def packed_access_set(layers: Sequence[LayerTask], pack: int) -> Allowed:
    """Tensor and tier of a pack to the elements that the layers read of it."""
    ranges: dict[tuple[str, Tier], list[Range]] = {}
    for e in (e for layer in layers for task in layer.tasks for e in task.experts):
        if e.packed is not None and e.packed.pack == pack:
            for r in e.packed.ranges:
                for tier in TIERS_OF[r.level]:
                    found = ranges.setdefault((e.packed.tensor, tier), [])
                    found.append((r.start_elem, r.stop_elem))
    return {key: coalesce(found) for key, found in ranges.items()}


def _parts_read(e: ExpertInput) -> Iterator[tuple[Part, Sequence[Range]]]:
    """The stored tensors of one input, with the ranges of their elements that it reads."""
    view = e.view
    if e.read and view.low_rank:
        for factor in (view.low_rank.a, view.low_rank.b):
            yield factor, [(0, factor.entry.numel)]
    if view.stored and not view.runs:
        yield view.stored[0], e.read
    for run in view.runs:
        shift = run.at_elem - run.start_elem
        inside = clip(e.read, run.start_elem, run.start_elem + run.n_elems)
        yield view.stored[run.part], [(a + shift, b + shift) for a, b in inside]
