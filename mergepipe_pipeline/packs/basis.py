"""What the chunks of a tensor are encoded on: its unit, and a product near to δ where one pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from mergepipe_pipeline.arrays import F32Array, I16Array
from mergepipe_pipeline.domain.pack import FACTORED, PackedTensor, Tier
from mergepipe_pipeline.packs.codec import STEPS_AT_MOST, predict, unit_of
from mergepipe_pipeline.packs.directions import Directions, leading
from mergepipe_pipeline.packs.exact import Bits, Prediction
from mergepipe_pipeline.packs.frame_files import FrameFiles
from mergepipe_pipeline.packs.frames import refuse
from mergepipe_pipeline.packs.index import NO_TAILS
from mergepipe_pipeline.packs.product import (
    AFTER_ROUNDING,
    FEWER_BITS,
    Product,
    frames_of,
    product_from,
    product_of,
    ranks_of,
    width_of,
)
from mergepipe_pipeline.packs.tails import tails_of
from mergepipe_pipeline.packs.ternary import STEPS, step_of

#: A product that explains less of ‖δ‖² is not kept, as it costs time whenever a level is read; nor
#: one that explains less than so many times what as many directions of noise do at most.
_LEAST_EXPLAINED, _ABOVE_NOISE = 0.15, 1.2
#: How much longer δ̂ is at most than δ's own part in the directions, so that it is as long as δ: to
#: the model what is left out is not at right angles to them, as it learned both in the same steps.
_MOST_LONGER = 1.3

#: Elements that tails are taken of at most: so many runs, evenly spread, of so many each.
_RUNS, _RUN_ELEMS = 64, 256

#: δ of a smaller matrix is held in memory while its directions are found.
_HELD_NBYTES = 32 << 20

#: Elements [start, stop) of δ, float32, to be overwritten.
ReadDelta = Callable[[int, int], F32Array]


@dataclass(frozen=True)
class Basis:
    """A tensor's unit; with factors, their products up to each rung, and tails."""

    unit: float
    rungs: Sequence[Product] = ()
    tails: F32Array = field(default_factory=lambda: NO_TAILS)

    @cached_property
    def frames(self) -> Mapping[Tier, bytes]:
        """The frame of each rung, b"" where it has nothing."""
        return frames_of(self.rungs) if self.rungs else dict.fromkeys(FACTORED, b"")

    def numbers(self, start_elem: int, n: int) -> list[I16Array]:
        """What the factors give of n elements up to each rung, in steps of δ̂."""
        numbers = []
        for product in self.rungs:
            numbers.append(np.zeros(n, np.int16))
            product.add_to(numbers[-1], start_elem, step_of(self.unit))
        return numbers


def basis_of(shape: Sequence[int], l2sq: float, nonzero: int, delta: ReadDelta) -> Basis:
    """The basis of a tensor of this shape, with Σδ² and that many δ ≠ 0."""
    ranks, numel = ranks_of(shape, FEWER_BITS), math.prod(shape)  # the most of any width
    if not ranks or not (0 < l2sq < math.inf):
        return Basis(unit_of(l2sq, nonzero))
    rms = np.float32(math.sqrt(l2sq / numel))
    if not 0 < rms < np.inf or not 1 / rms < np.inf:
        return Basis(unit_of(l2sq, nonzero))
    found = [
        _leading(delta, rms, number, (shape[-2], shape[-1]), ranks[-1])
        for number in range(math.prod(shape[:-2]))
    ]
    # [r]: the share of ‖δ‖² that so many directions explain
    explained = np.cumsum(np.sum([d.sq_norms for d in found], axis=0)) / numel
    if not explained[-1] >= max(_LEAST_EXPLAINED, _ABOVE_NOISE * _by_noise(shape, ranks[-1])):
        return Basis(unit_of(l2sq, nonzero))
    width = width_of(shape, explained)
    ranks = ranks_of(shape, width)
    product = product_of(found, ranks[-1], width)
    shares = [min(1.0, float(explained[rank - 1])) for rank in ranks]
    longer = [min(share**-0.5, _MOST_LONGER) for share in shares]
    rungs = [product.first(n, float(rms) * by) for n, by in zip(ranks, longer, strict=True)]
    left = l2sq * (1 + shares[-1] * (longer[-1] ** 2 - 2 * AFTER_ROUNDING[width] * longer[-1]))
    # Sums of steps are to stay numbers of 16 bits.
    largest = max(p.largest() for p in rungs)
    unit = max(unit_of(left, nonzero), unit_of((largest * STEPS / STEPS_AT_MOST / 9) ** 2, 1))
    if not _fits(largest, unit) or min(p.step for p in rungs) < np.finfo(np.float32).tiny:
        return Basis(unit_of(l2sq, nonzero))  # of a size that no weights have
    basis = Basis(unit, rungs)
    return replace(basis, tails=_tails(basis, delta, numel))


def basis_from(files: FrameFiles, tensor: PackedTensor) -> Basis:
    """The basis of a packed tensor. Raises CorruptionError for frames that are not its own."""
    stops = range(1, 1 + len(FACTORED)) if tensor.factors else ()
    found = products_in(files, tensor, stops)
    return Basis(tensor.unit, [p for p in found if p is not None], tensor.tails)


def product_in(files: FrameFiles, tensor: PackedTensor, tiers: Sequence[Tier]) -> Product | None:
    """The product of some first rungs of a packed tensor; None where it has no factors."""
    (product,) = products_in(files, tensor, [len(tiers)]) if tensor.factors else (None,)
    return product


def products_in(
    files: FrameFiles, tensor: PackedTensor, counts: Sequence[int]
) -> list[Product | None]:
    """The products of so many first rungs each of a tensor with factors; None of no rung.

    Their frames are read once. Raises CorruptionError.
    """
    tiers = FACTORED[: max(counts, default=0)]
    if not tiers:
        return [None for _ in counts]
    frames, products = files.read(tensor, tiers, 0, 1), dict[int, Product | None]({0: None})
    for count in {*counts} - {0}:
        some = [frames.frame(tier, 0) for tier in tiers[:count]]
        product = products[count] = product_from(some, tensor.shape)
        if not _fits(product.largest(), tensor.unit):
            most = f"at most {STEPS_AT_MOST} steps of {step_of(tensor.unit)}"
            refuse(most, f"{product.largest()}")
    return [products[count] for count in counts]


def predicted(
    product: Product | None, tensor: PackedTensor, base: Bits, start_elem: int
) -> Prediction | None:
    """What a tensor's product makes of the base's elements [n] from `start_elem` on; or None."""
    if product is None:
        return None
    numbers = np.zeros(len(base), np.int16)
    product.add_to(numbers, start_elem, step_of(tensor.unit))
    return predict(base, numbers, tensor.unit, tensor.dtype)


def _tails(basis: Basis, delta: ReadDelta, numel: int) -> F32Array:
    n = min(numel, _RUN_ELEMS)
    starts = np.unique(np.linspace(0, numel - n, _RUNS).astype(np.int64)).tolist()
    sampled = np.concatenate([delta(start, start + n) for start in starts])
    rungs = [basis.numbers(start, n) for start in starts]
    rms = [math.sqrt(product.l2sq() / numel) for product in basis.rungs]
    together = [np.concatenate(numbers) for numbers in zip(*rungs, strict=True)]
    return tails_of(sampled, together, basis.unit, rms)


def _fits(largest: float, unit: float) -> bool:
    """Whether δ̂ of this size is a number of steps that 16 bits have, with tiers L0 to L3."""
    return largest <= 1.05 * STEPS_AT_MOST * float(step_of(unit))


def _by_noise(shape: Sequence[int], rank: int) -> float:
    """The share of ‖δ‖² that so many directions of a matrix of noise explain at most, about.

    Source: the edge of the law of Marchenko and Pastur.
    """
    rows, columns = shape[-2:]
    return rank * (math.sqrt(rows) + math.sqrt(columns)) ** 2 / (rows * columns)


def _leading(
    delta: ReadDelta, rms: np.float32, number: int, shape: tuple[int, int], rank: int
) -> Directions:
    """The directions of matrix `number` of a stack, in units of the tensor's `rms`."""
    rows, columns = shape
    start = number * rows

    def read(first: int, stop: int) -> F32Array:
        found = delta((start + first) * columns, (start + stop) * columns)
        found *= 1 / rms
        return found.reshape(stop - first, columns)

    if 4 * rows * columns > _HELD_NBYTES:
        return leading(read, shape, rank)
    held = read(0, rows)
    return leading(lambda first, stop: held[first:stop], shape, rank)
