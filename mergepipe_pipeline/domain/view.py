"""How a tensor of a model follows from stored bytes: whole, in runs, as a delta, as low rank.

A model is one checkpoint, or a checkpoint with an adapter on it, or an adapter or a delta alone;
whatever it is, analysis and engine see tensors of one name, shape and dtype. Pure description:
`tensors` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from mergepipe_pipeline.domain.blocks import Range, clip, total_elems
from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.domain.codes import Codes, StoredRange
from mergepipe_pipeline.dtypes import itemsize


@dataclass(frozen=True, slots=True)
class Part:
    """A stored tensor of source number `source` (of a model, or of a plan), or what it codes."""

    source: int
    entry: TensorEntry
    codes: Codes | None = None

    @property
    def dtype(self) -> str:
        """The safetensors code of its values."""
        return self.codes.dtype if self.codes else self.entry.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its values."""
        return self.codes.shape if self.codes else self.entry.shape

    @property
    def numel(self) -> int:
        """Number of values."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one full read."""
        return self.read_nbytes(((0, self.numel),)) if self.numel else 0

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """The stored tensors that its values follow from."""
        return (self.entry, *(self.codes.entries if self.codes else ()))

    def read_nbytes(self, ranges: Sequence[Range]) -> int:
        """Bytes that reading the values of disjoint ranges takes."""
        if self.codes:
            return self.codes.read_nbytes(self.entry, ranges)
        return total_elems(ranges) * itemsize(self.entry.dtype)

    def stored_ranges(self, ranges: Iterable[Range]) -> Iterator[StoredRange]:
        """The stored elements that the values of ranges follow from."""
        for start, stop in ranges:
            if self.codes:
                yield from self.codes.stored_ranges(self.entry, start, stop)
            else:
                yield self.entry, start, stop


@dataclass(frozen=True, slots=True)
class Run:
    """Elements [start, start + n) of a view are [at, at + n) of the values of part `part`."""

    start_elem: int
    part: int
    at_elem: int
    n_elems: int


@dataclass(frozen=True, slots=True)
class LowRank:
    """An update `scale` · b·a with a [r, n_in], b [n_out, r]; its transpose if `transposed`.

    Of a stack of n = `n_matrices`, matrix i has rows [i·r, (i + 1)·r) of a, columns j·n + i of b.
    `magnitude` [n_out] is the length that every output's row has after the update (DoRA). `weights`
    is what is updated, W as stored, where the update follows from it: for its lengths, or with
    `is_residual` for its r principal components, which are taken away (PiSSA), or with
    `is_orthogonal` `scale` times the first r columns of Q by the first r rows of R (OLoRA).
    `second` is added to the same tensor.
    """

    a: Part
    b: Part
    scale: float
    transposed: bool
    n_matrices: int = 1
    magnitude: Part | None = None
    weights: Part | None = None
    is_residual: bool = False
    is_orthogonal: bool = False
    second: LowRank | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """Every stored tensor that it is computed from."""
        own = (self.a, self.b, self.magnitude, self.weights)
        return (*(p for p in own if p), *(self.second.parts if self.second else ()))

    @property
    def needs_values(self) -> bool:
        """Whether it changes values T, not differences from a base."""
        return self.magnitude is not None

    def with_parts(self, of: Callable[[Part], Part]) -> LowRank:
        """The same update with `of` applied to every part."""
        return replace(
            self,
            a=of(self.a),
            b=of(self.b),
            magnitude=self.magnitude and of(self.magnitude),
            weights=self.weights and of(self.weights),
            second=self.second and self.second.with_parts(of),
        )


@dataclass(frozen=True, slots=True)
class RowValues:
    """An update that replaces rows: row `rows[i]` becomes row i of `values` [n, n_cols]."""

    values: Part
    rows: tuple[int, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """Every stored tensor that it is computed from."""
        return (self.values,)

    @property
    def needs_values(self) -> bool:
        """Whether it changes values T, not differences from a base."""
        return True

    def with_parts(self, of: Callable[[Part], Part]) -> RowValues:
        """The same update with `of` applied to its part."""
        return replace(self, values=of(self.values))


#: What an adapter adds to a tensor of its base, or puts in its place.
Update = LowRank | RowValues


@dataclass(frozen=True, slots=True)
class TensorView:
    """One tensor of a model, of `shape` in elements of `dtype` (a safetensors code).

    Its value is what is `stored`, or the base's value where nothing is stored or where what is
    stored `is_delta`; plus the adapter's update, if there is one. `runs` empty: the view is the
    whole of `stored[0]`; else they cover it without a gap. A view may have fewer rows than the
    tensor it is merged into: beyond its end it equals the base.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stored: tuple[Part, ...] = ()
    runs: tuple[Run, ...] = ()
    is_delta: bool = False
    low_rank: Update | None = None

    @property
    def numel(self) -> int:
        """Number of elements (1 for a scalar)."""
        return prod(self.shape)

    @property
    def stored_nbytes(self) -> int:
        """Bytes of the stored elements that the view uses."""
        return self.read_nbytes(((0, self.numel),)) if self.stored and self.numel else 0

    @property
    def low_rank_nbytes(self) -> int:
        """Bytes of what the adapter's update is computed from."""
        return sum(p.nbytes for p in self.low_rank.parts) if self.low_rank else 0

    @property
    def nbytes(self) -> int:
        """Bytes of one full read."""
        return self.stored_nbytes + self.low_rank_nbytes

    @property
    def whole(self) -> TensorEntry | None:
        """The stored tensor that it is, byte for byte, if it is one."""
        return None if self.is_made or self.low_rank or self.is_delta else self.stored[0].entry

    @property
    def is_made(self) -> bool:
        """Whether no stored tensor has its stored elements as they are: runs, or decoded ones."""
        return bool(self.runs) or not self.stored or any(p.codes for p in self.stored)

    def parts_read(self, read: Sequence[Range]) -> Iterator[tuple[Part, Sequence[Range]]]:
        """The parts of the stored elements in `read`, with the ranges of each."""
        if self.stored and not self.runs:
            yield self.stored[0], read
        for run in self.runs:
            shift = run.at_elem - run.start_elem
            inside = clip(read, run.start_elem, run.start_elem + run.n_elems)
            yield self.stored[run.part], [(a + shift, b + shift) for a, b in inside]

    def read_nbytes(self, read: Sequence[Range]) -> int:
        """Bytes that reading the stored elements in `read` takes."""
        if not any(p.codes for p in self.stored):
            return total_elems(read) * itemsize(self.dtype)
        return sum(part.read_nbytes(ranges) for part, ranges in self.parts_read(read))

    @property
    def layout(self) -> str:
        """What tells how many stored bytes ranges of it are, from where they lie apart."""
        parts = [
            (p.codes and p.codes.rule, [(e.dtype, e.shape) for e in p.entries]) for p in self.stored
        ]
        return repr((self.shape, self.runs, parts))

    @property
    def stands_alone(self) -> bool:
        """Whether its values need no base."""
        return bool(self.stored) and not self.is_delta

    @property
    def is_plain(self) -> bool:
        """Whether it is all values of one part, and nothing besides."""
        return self.stands_alone and not self.runs and not self.low_rank

    @property
    def delta_needs_base(self) -> bool:
        """Whether its difference from the base is computed from the base's values."""
        return self.stands_alone or (self.low_rank is not None and self.low_rank.needs_values)


def view_of(entry: TensorEntry, source: int = 0) -> TensorView:
    """The view of one whole stored tensor."""
    return view_of_part(Part(source, entry), entry.name)


def view_of_part(part: Part, name: str) -> TensorView:
    """The view of all values of a part."""
    return TensorView(name, part.dtype, part.shape, (part,))


def moved(view: TensorView, offset: int) -> TensorView:
    """The same view with `offset` added to every source number."""
    return _renumbered(view, lambda source: source + offset)


def renumbered(view: TensorView, numbers: Mapping[int, int]) -> TensorView:
    """The same view with every source number replaced by what `numbers` gives for it."""
    return _renumbered(view, lambda source: numbers[source])


def parts_of(view: TensorView) -> tuple[Part, ...]:
    """All stored tensors that a view reads, factors of a low-rank update among them."""
    parts = (*view.stored, *(view.low_rank.parts if view.low_rank else ()))
    return tuple(Part(p.source, entry) for p in parts for entry in p.entries)


def sources_of(view: TensorView) -> frozenset[int]:
    """The numbers of all sources that a view reads."""
    return frozenset(p.source for p in parts_of(view))


def _renumbered(view: TensorView, number: Callable[[int], int]) -> TensorView:
    def part(p: Part) -> Part:
        return Part(number(p.source), p.entry, p.codes)

    # Plans have one for each tensor of each expert; `replace` takes ten times as long.
    stored = tuple([part(p) for p in view.stored])
    low_rank = view.low_rank and view.low_rank.with_parts(part)
    own = view.name, view.dtype, view.shape
    return TensorView(*own, stored, view.runs, view.is_delta, low_rank)


def cropped(view: TensorView, n_rows: int, axis: int = 0) -> TensorView:
    """The first `n_rows` rows of a view that has more; views with an update cannot be cropped.

    Dimensions before `axis`, that of the rows, have one element.
    """
    shape = (*view.shape[:axis], n_rows, *view.shape[axis + 1 :])
    runs = view.runs or (Run(0, 0, 0, view.numel),)
    stop = prod(shape)
    cropped_runs = tuple(
        replace(r, n_elems=min(r.n_elems, stop - r.start_elem)) for r in runs if r.start_elem < stop
    )
    return replace(view, shape=shape, runs=cropped_runs)
