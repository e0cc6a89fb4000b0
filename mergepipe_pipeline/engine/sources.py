"""A plan's checkpoints and packs, open for reading: experts gated, the base in full.

The gate is here: an expert's reader refuses any element outside the ranges that the plan's layers
read, and what it counts is what was asked for, without the rest of the disk's pages.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from functools import cached_property, partial
from typing import Literal

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.checkpoints.reader import BlockReader, Tally
from mergepipe_pipeline.checkpoints.stored import Verifier, read_stored
from mergepipe_pipeline.domain.blocks import Range, coalesce
from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.domain.codes import StoredRange
from mergepipe_pipeline.domain.plan import BaseInput, ExpertInput, LayerTask, MergePlan, TensorTask
from mergepipe_pipeline.domain.segments import COARSE_ELEMS, KnownSegments
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.errors import CheckpointChangedError
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.packs.elements import PackedElements, PackReader
from mergepipe_pipeline.storage.held import FirstReading, HeldBytes, HeldFiles, SecondReading
from mergepipe_pipeline.storage.read_batch import ReadBatch
from mergepipe_pipeline.storage.source import (
    CheckpointSource,
    FileRange,
    LocalSource,
    RangedFiles,
    Reading,
    open_source,
)
from mergepipe_pipeline.storage.uncached import fits_page_cache


def access_sets(layers: Sequence[LayerTask]) -> dict[int, dict[str, tuple[Range, ...]]]:
    """By source, stored tensor to the element ranges that the layers read as an expert's."""
    ranges: dict[int, dict[str, list[Range]]] = {}
    for e in _experts(layers):
        for source, (entry, start, stop) in _stored_ranges(e.view, e.read):
            ranges.setdefault(source, {}).setdefault(entry.name, []).append((start, stop))
    return {n: {name: coalesce(r) for name, r in of.items()} for n, of in ranges.items()}


def file_ranges(layers: Sequence[LayerTask], source: int, *, gated: bool) -> Iterator[FileRange]:
    """Bytes of a source's files that layers read as an expert's (`gated`) or the base's, in order.

    Of the base only tensors that are always read: an operator on values may do without it.
    """
    for task in (task for layer in layers for task in layer.tasks):
        views = [(e.view, e.read) for e in task.experts] if gated else _base_views(task)
        by_entry: dict[TensorEntry, list[Range]] = {}
        for number, (entry, *ends) in (s for v in views for s in _stored_ranges(*v)):
            if number == source:
                by_entry.setdefault(entry, []).append((ends[0], ends[1]))
        for entry, ranges in by_entry.items():
            size, at = itemsize(entry.dtype), entry.start_byte
            for a, b in coalesce(ranges):
                yield FileRange(entry.file, at + a * size, at + b * size)


def _base_views(task: TensorTask) -> list[tuple[TensorView, Sequence[Range]]]:
    base, method = task.base, OPERATORS.get(task.operator)
    is_update = method is None or method.schema.space == "delta"
    if base is None or not (is_update or (method and method.schema.base != "none")):
        return []
    return [(base.view, ((0, base.view.numel),))]


def _experts(layers: Sequence[LayerTask]) -> Iterator[ExpertInput]:
    return (e for layer in layers for task in layer.tasks for e in task.experts)


def _stored_ranges(view: TensorView, read: Sequence[Range]) -> Iterator[tuple[int, StoredRange]]:
    """The stored elements that `read` of a view follows from, each with its source.

    Factors of a low-rank update are read in whole.
    """
    for part in view.low_rank.parts if read and view.low_rank else ():
        yield from ((part.source, r) for r in part.stored_ranges([(0, part.numel)]))
    for part, ranges in view.parts_read(read):
        yield from ((part.source, r) for r in part.stored_ranges(ranges))


#: Whether bytes are read by the merge, before it, or for something that is not merged.
_When = Literal["merge", "before", "besides"]


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes read of experts, through the gate, and of the base; the seconds that all took."""

    expert_nbytes: int = 0
    base_nbytes: int = 0
    read_s: float = 0.0

    def __add__(self, other: Read) -> Read:
        return Read(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: Read) -> Read:
        return Read(*map(operator.sub, astuple(self), astuple(other)))


class SourcePool:
    """Readers for the sources of one plan; a context manager that closes their files.

    What is read for the merge is compared with the segments that are `known`; None: with nothing.
    Raises CheckpointChangedError when a checkpoint is not the one that was planned.
    """

    def __init__(
        self, plan: MergePlan, known: KnownSegments | None = None, held_nbytes: int = 0
    ) -> None:
        """`held_nbytes`: so many of the bytes read before the merge are kept for it."""
        self._stack = ExitStack()
        self._held = HeldBytes(held_nbytes)
        self._held_files: dict[int, HeldFiles] = {}
        self.known = known
        self._readers: dict[tuple[int, bool, _When], BlockReader] = {}
        self._packs: dict[tuple[int, bool], PackReader] = {}
        self._tallies = {True: Tally(), False: Tally()}
        self._plan = plan
        # A budget is of bytes that storage delivers: nothing is fetched on the side.
        # Frames are read ahead of the merge by threads of their own, and not kept.
        moved = plan.read_nbytes + sum(t.out_nbytes for t in _tasks(plan))
        is_kept = not plan.packs and fits_page_cache(moved)
        self._reading: Reading = "exact" if is_kept else "once"
        # What is read twice and not held waits in the page cache, if that fits there.
        kept = fits_page_cache(_too_long_nbytes(plan, held_nbytes))
        self._first_reading: Reading = "exact" if kept else self._reading
        # Every merge reads the base: it stays in the page cache, where it may be already.
        fits = fits_page_cache(plan.base_nbytes)
        self._base_reading: Reading = "exact" if fits else self._reading
        self._lock = threading.Lock()
        self._layers: Sequence[LayerTask] = ()
        self._far: list[tuple[CheckpointSource, int, bool]] = []

    def __enter__(self) -> SourcePool:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def batch(self) -> Iterator[ReadBatch]:
        """Reads that are done together when this ends; their time counts as reading."""
        with ReadBatch() as batch:
            yield batch
        self._tallies[True].read_s += batch.read_s

    def will_run(self, layers: Sequence[LayerTask]) -> None:
        """Say which layers will be merged, for sources that fetch ahead of the merge."""
        with self._lock:
            self._layers = layers
            for files, number, gated in self._far:
                files.expect(file_ranges(layers, number, gated=gated))

    @property
    def held_nbytes(self) -> int:
        """Memory for what is read before the merge."""
        return self._held.nbytes

    @property
    def reads_ahead(self) -> bool:
        """Whether reads to come are announced to the disk: the page cache has room for them."""
        return self._reading == "exact"

    def expert(self, source: int) -> BlockReader:
        """The gated reader of an expert: exactly the plan's ranges."""
        return self._reader(source, gated=True)

    def base(self, source: int) -> BlockReader:
        """The ungated reader of the base (or of the model that stands in for one)."""
        return self._reader(source, gated=False)

    def expert_before(self, source: int) -> BlockReader:
        """The reader of an expert for bytes that the merge itself will read and count."""
        return self._reader(source, gated=True, when="before")

    def base_before(self, source: int) -> BlockReader:
        """The reader of the base for bytes that the merge itself will read and count."""
        return self._reader(source, gated=False, when="before")

    def base_besides(self, source: int) -> BlockReader:
        """The reader of the base for bytes that are not merged, and not counted."""
        return self._reader(source, gated=False, when="besides")

    def packed(
        self, e: ExpertInput, base: BaseInput | None, *, before: bool = False
    ) -> PackedElements | None:
        """The elements that an expert's input takes from a pack; `before` as above.

        Raises CorruptionError for a pack that is not as it was written.
        """
        if e.packed is None:
            return None
        assert base is not None
        key = e.packed.pack, before
        with self._lock:
            if key not in self._packs:
                self._packs[key] = self._open_pack(*key)
            reader = self._packs[key]
        # A chunk is whole segments.
        compare = self.verifier(base.view, base.digest)
        verify = compare.check if compare else None
        read_base = partial(read_stored, self.base_besides, base.view, verify=verify)
        return PackedElements(reader, e.packed, e.digest, read_base)

    def verifier(self, view: TensorView, digest: str) -> Verifier | None:
        """A verifier that compares one reading of a view with its segments, if they are known.

        Raises CheckpointChangedError if these are not of the content that the plan names.
        """
        if self.known is None or not view.stored:
            return None
        segments = self.known.of_view(view)
        if view.whole and segments.segment_elems == COARSE_ELEMS and segments.content != digest:
            raise CheckpointChangedError(
                "The catalog's record of a tensor is not the one that the plan was made from",
                where=f"{segments.where}, tensor {view.name}",
                expected=f"content {digest[:16]}",
                found=f"content {segments.content[:16]}",
                next_step="run the same command again: it plans anew",
            )
        return Verifier(view, segments)

    def verify_unchanged(self) -> None:
        """Raise CheckpointChangedError if any file read so far is not the planned one any more."""
        with self._lock:  # workers that read ahead open more of them meanwhile
            readers = list(self._readers.values())
        for reader in readers:
            reader.verify_unchanged()

    def read_here(self) -> Read:
        """Return what the calling thread has read for the merge so far."""
        expert, base = self._tallies[True], self._tallies[False]
        return Read(expert.nbytes, base.nbytes, expert.read_s + base.read_s)

    def _reader(self, source: int, *, gated: bool, when: _When = "merge") -> BlockReader:
        key = source, gated, when
        with self._lock:  # one reader per source: workers ask at once, and each counts its bytes
            if key not in self._readers:
                self._readers[key] = self._open(source, gated, when)
            return self._readers[key]

    def _open(self, number: int, gated: bool, when: _When) -> BlockReader:
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
        is_merge = when == "merge"
        allowed = self._allowed.get(number, {}) if gated else None
        reading = self._reading_for(when, gated=gated)
        files = self._stack.enter_context(open_source(planned.root, reading))
        if files.is_far and is_merge:
            self._far.append((files, number, gated))
            files.expect(file_ranges(self._layers, number, gated=gated))
        tally = self._tallies[gated] if is_merge else None
        return BlockReader(self._holding(files, number, when), checkpoint, allowed, tally)

    @cached_property
    def _allowed(self) -> dict[int, dict[str, tuple[Range, ...]]]:
        return access_sets(self._plan.layers)

    def _reading_for(self, when: _When, *, gated: bool) -> Reading:
        """The way of reading for the merge, before it, or beside it."""
        if when == "merge":
            return self._reading if gated else self._base_reading
        is_held = when == "before" and self._held.nbytes
        return self._first_reading if is_held else "exact"

    def _holding(self, files: CheckpointSource, number: int, when: _When) -> RangedFiles:
        """The files of a source; of a local one what is read before the merge is held for it."""
        # A remote source keeps what it fetched.
        if not isinstance(files, LocalSource) or not self._held.nbytes or when == "besides":
            return files
        held = self._held_files.setdefault(number, HeldFiles(self._held))
        if when == "merge":
            return SecondReading(files, held)
        past = LocalSource(self._plan.sources[number].root, "once")
        return FirstReading(files, held, self._stack.enter_context(past), self._held)

    def _open_pack(self, number: int, before: bool) -> PackReader:
        tally = Tally() if before else self._tallies[True]
        reading: Reading = "exact" if before else self._reading
        return self._stack.enter_context(PackReader(self._plan.packs[number], tally, reading))


def _too_long_nbytes(plan: MergePlan, held_nbytes: int) -> int:
    """Bytes that are read twice of tensors whose experts are larger than can be held."""
    sizes = (sum(e.view.nbytes for e in t.experts if e.l1 is not None) for t in _tasks(plan))
    return sum(nbytes for nbytes in sizes if nbytes > held_nbytes)


def _tasks(plan: MergePlan) -> Iterator[TensorTask]:
    return (task for layer in plan.layers for task in layer.tasks)
