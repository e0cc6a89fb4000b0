"""The tiers R0 to R2: products of two factors of few bits, near to a tensor's δ as a whole.

Numbers of the factors are integers, of three bits −3 to 3, of four −7 to 7, and each direction has
a whole weight. Sums of their products are below 2²⁴, so that float32 holds them exactly: in
whatever order a machine adds them, δ̂ has the same bits. A tensor of more than two dimensions is a
stack of matrices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.arrays import F32Array, F64Array, I16Array, U8Array, U32Array
from mergepipe_pipeline.domain.pack import FACTORED, Tier
from mergepipe_pipeline.jit import cached_njit
from mergepipe_pipeline.operators.kernels.bits import fma
from mergepipe_pipeline.packs.checksums import checksum
from mergepipe_pipeline.packs.directions import Directions
from mergepipe_pipeline.packs.frames import as_array, refuse

I8Array = npt.NDArray[np.int8]

#: Parts of the bytes of bfloat16 that the rungs take together, about.
_SHARES = (0.001, 0.005, 0.02)
#: Smaller matrices have no directions.
_LEAST_LENGTH = 16
#: Bits that numbers of factors may have, one choice per tensor; and the most directions with each,
#: which take about the same bytes.
_WIDTHS = FEWER_BITS, MORE_BITS = 3, 4
_MOST_DIRECTIONS = {FEWER_BITS: 40, MORE_BITS: 32}
#: By width, the part of what a direction explains that is left when its factors are rounded, about.
AFTER_ROUNDING = {FEWER_BITS: 0.92, MORE_BITS: 0.97}
#: Bytes in front of a frame's directions: its step, and the width of its numbers.
_FRONT_NBYTES = 5
#: With a larger step sums might be infinite.
_MOST_STEP = 2.0**100
#: Steps of a factor that are tried, as shares of its largest element.
_STEPS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0)
#: More bits are taken where they explain so many times as much: few directions are all of δ.
_MUCH_BETTER = 1.03
#: Columns that are summed at once: those of a few directions stay in the first cache.
_COLUMNS = 512
#: Added to a small float32, it rounds it to the nearest integer, ties to even.
_ROUND = np.float32(12582912)


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """δ̂ = step · Σ weight · left · right, over the directions of each of n matrices.

    `weights` uint32 [n, r], `left` int8 [n, rows, r], `right` int8 [n, r, columns], of numbers of
    `width` bits.
    """

    step: np.float32
    weights: U32Array
    left: I8Array
    right: I8Array
    width: int

    def add_to(self, numbers: I16Array, start_elem: int, step: np.float32) -> None:
        """Add δ̂ of elements from `start_elem` on, in steps of this size, to `numbers` [n]."""
        size = self.left.shape[1] * self.right.shape[2]
        first = start_elem // size
        some = slice(first, -(-(start_elem + len(numbers)) // size))  # matrices that are met
        # [n, r, columns], as whole float32 numbers
        weights = self.weights[some, :, None].astype(np.float32)
        weighted = self.right[some].astype(np.float32) * weights
        times = np.float32(float(self.step) / float(step))
        _add_product(self.left[some], weighted, times, start_elem - first * size, numbers)

    def first(self, rank: int, factor: float = 1.0) -> Product:
        """The product of so many directions of each matrix, times a factor."""
        step, left = np.float32(float(self.step) * factor), self.left[:, :, :rank]
        right = self.right[:, :rank]
        weights = self.weights[:, :rank]
        return Product(step, weights, np.ascontiguousarray(left), right, self.width)

    def l2sq(self) -> float:
        """‖δ̂‖², about."""
        left, right = self.left.astype(np.float64), self.right.astype(np.float64)
        # [n, r, r] each: the inner products of all pairs of directions.
        lefts, rights = left.transpose(0, 2, 1) @ left, right @ right.transpose(0, 2, 1)
        weights = self.weights[:, :, None] * self.weights[:, None].astype(np.float64)
        return float(self.step) ** 2 * float((weights * lefts * rights).sum())

    def largest(self) -> float:
        """A bound of all |δ̂|."""
        most = _largest_number(self.width)
        return float(self.step) * most**2 * int(self.weights.sum(axis=1).max())


def ranks_of(shape: Sequence[int], width: int) -> tuple[int, ...]:
    """The directions of each matrix of a tensor up to each rung; () where it has none.

    Fewer bits allow more directions.
    """
    if len(shape) < 2 or min(shape[-2:]) < _LEAST_LENGTH:
        return ()
    rows, columns = shape[-2:]
    each = 2 * rows * columns / _direction_nbytes(rows, columns, width)
    most = min(_MOST_DIRECTIONS[width], rows // 2, columns // 2)
    return tuple(min(most, max(1, round(share * each))) for share in _SHARES)


def width_of(shape: Sequence[int], explained: F64Array) -> int:
    """How many bits each number of a tensor's factors gets.

    `explained` [r]: the share of ‖δ‖² that so many directions explain. Fewer bits let small rungs
    explain more; more bits are taken where they let the last rung explain much more.
    """
    few, many = (
        AFTER_ROUNDING[width] * float(explained[ranks_of(shape, width)[-1] - 1])
        for width in _WIDTHS
    )
    return MORE_BITS if many > _MUCH_BETTER * few else FEWER_BITS


def frames_of(rungs: Sequence[Product]) -> dict[Tier, bytes]:
    """The frame of each rung: its step, and the directions that the rung before does not have."""
    frames, first = {}, 0
    for tier, product in zip(FACTORED, rungs, strict=True):
        some, stop = slice(first, None), product.weights.shape[1]
        parts = [np.ascontiguousarray(product.weights[:, some], "<u4").view(np.uint8)]
        by_direction = product.left.transpose(0, 2, 1)
        factors = by_direction, product.right
        parts += [_joined(factor[:, some], product.width) for factor in factors]
        whole = np.concatenate([p.reshape(len(p), -1) for p in parts], axis=1)
        front = np.array(product.step, "<f4").tobytes() + bytes([product.width])
        frames[tier] = front + whole.tobytes() if stop > first else b""
        first = stop
    return frames


def factors_of(frames: Mapping[Tier, bytes]) -> str:
    """The checksum of the frames of all rungs; "" where there are none."""
    joined = b"".join(frames[tier] for tier in FACTORED)
    return f"{checksum(as_array(joined)):016x}" if joined else ""


def rung_nbytes(shape: Sequence[int], width: int = FEWER_BITS) -> tuple[int, ...]:
    """Bytes of the frame of each rung that a tensor may have; 0 for none."""
    if not (ranks := ranks_of(shape, width)):
        return (0,) * len(FACTORED)
    rows, columns = shape[-2:]
    each = math.prod(shape[:-2]) * _direction_nbytes(rows, columns, width)
    more = np.diff(ranks, prepend=0).tolist()
    return tuple(_FRONT_NBYTES + count * each if count else 0 for count in more)


def product_of(found: Sequence[Directions], rank: int, width: int) -> Product:
    """The product whose factors are the first directions of each matrix of a tensor, rounded."""
    most = _largest_number(width)
    # [n, r, rows], [n, r]
    left, left_steps = _to_integers(np.stack([d.left.T[:rank] for d in found]), most)
    right, right_steps = _to_integers(np.stack([d.right[:rank] for d in found]), most)
    scales = left_steps * right_steps  # [n, r]
    # Rounding may add one half to each weight.
    step = np.float32(scales.sum(axis=1).max() / (_largest_weights(width) - scales.shape[1]))
    weights = np.rint(scales / step).astype(np.uint32)
    return Product(step, weights, _by_row(left), right, width)


def product_from(frames: Sequence[memoryview], shape: Sequence[int]) -> Product:
    """The product of a tensor's last of some first rungs by the frames of all of these.

    Raises CorruptionError.
    """
    n, (rows, columns) = math.prod(shape[:-2]), shape[-2:]
    present = [frame for frame in frames if len(frame)]
    widths = {frame[_FRONT_NBYTES - 1] for frame in present if len(frame) >= _FRONT_NBYTES}
    if not present or widths not in ({width} for width in _WIDTHS):
        refuse("frames of factors whose numbers have 3 bits, or 4", f"{sorted(widths)} bits")
    (width,) = widths
    each = n * _direction_nbytes(rows, columns, width)
    steps, weights, lefts, rights = [], [], [], []
    for frame in present:
        count, rest = divmod(len(frame) - _FRONT_NBYTES, each)
        if rest or count < 1:
            refuse(f"directions of {each} bytes", f"{len(frame) - _FRONT_NBYTES}")
        steps.append(np.frombuffer(frame[:4], "<f4")[0])
        table = np.frombuffer(frame[_FRONT_NBYTES:], np.uint8).reshape(n, -1)
        stops = np.cumsum([4 * count, count * _factor_nbytes(rows, width)])
        weight, left, right = np.split(table, stops, axis=1)
        weights.append(np.ascontiguousarray(weight).view("<u4").astype(np.uint32))
        lefts.append(_apart(left, count, rows, width))
        rights.append(_apart(right, count, columns, width))
    whole = np.concatenate(weights, axis=1)
    sums = whole.sum(axis=1, dtype=np.uint64)
    if not 0 < steps[-1] < _MOST_STEP or sums.max() > _largest_weights(width):
        refuse("a step, and weights that float32 adds up exactly", "others")
    all_left, all_right = _by_row(np.concatenate(lefts, axis=1)), np.concatenate(rights, axis=1)
    if min(all_left.min(), all_right.min()) < -(most := _largest_number(width)):
        refuse(f"numbers of -{most} to {most}", "others")
    return Product(np.float32(steps[-1]), whole, all_left, all_right, width)


def _by_row(left: I8Array) -> I8Array:
    """A left factor [n, r, rows] as [n, rows, r]."""
    return np.ascontiguousarray(left.transpose(0, 2, 1))


def _to_integers(factors: F32Array, most: int) -> tuple[I8Array, F64Array]:
    """`factors` [n, r, length] as integers, and their steps [n, r] of the least squared error."""
    largest = np.abs(factors).max(axis=2).astype(np.float64)
    steps = np.where(largest > 0, largest, 1.0) / most
    best, least = np.ones_like(steps), np.full(steps.shape, np.inf)
    for share in _STEPS:
        in_steps = share * steps[..., None]
        error = np.square(factors - _rounded(factors, in_steps, most) * in_steps).sum(axis=2)
        best, least = np.where(error < least, share, best), np.minimum(error, least)
    steps *= best
    whole = _rounded(factors, steps[..., None], most).astype(np.int8)
    return whole, np.where(largest > 0, steps, 0.0)


def _rounded(factors: F32Array, steps: F64Array, most: int) -> F64Array:
    whole: F64Array = np.clip(np.rint(factors / steps), -most, most)
    return whole


def _largest_number(width: int) -> int:
    """The largest number of so many bits."""
    return (1 << (width - 1)) - 1


def _largest_weights(width: int) -> int:
    """What weights may add up to."""
    return int((1 << 24) // _largest_number(width) ** 2)


def _direction_nbytes(rows: int, columns: int, width: int) -> int:
    """Bytes of one direction: its weight, and the numbers of both factors."""
    return 4 + _factor_nbytes(rows, width) + _factor_nbytes(columns, width)


def _factor_nbytes(length: int, width: int) -> int:
    return -(-width * length // 8)


def _joined(factor: I8Array, width: int) -> U8Array:
    """`factor` [n, r, length] as whole bytes per direction, [n, r, bytes]."""
    shifted = (factor + np.int8(1 << (width - 1))).view(np.uint8)
    bits = shifted[..., None] >> np.arange(width, dtype=np.uint8) & 1  # [n, r, length, width]
    n, rank, length = factor.shape
    return np.packbits(bits.reshape(n, rank, width * length), axis=2, bitorder="little")


def _apart(table: U8Array, count: int, length: int, width: int) -> I8Array:
    """The numbers [n, count, length] of bytes [n, all bytes]."""
    each = table.reshape(len(table), count, -1)
    bits = np.unpackbits(each, axis=2, count=width * length, bitorder="little")
    whole = np.zeros((len(table), count, length), np.uint8)
    for bit in range(width):
        whole |= bits[..., bit::width] << np.uint8(bit)
    return whole.view(np.int8) - np.int8(1 << (width - 1))


@cached_njit(nogil=True)
def _add_rounded(sums: F32Array, times: np.float32, out: I16Array) -> None:
    """Add rint(times · sums) to `out`, and leave `sums` changed."""
    for j in range(len(sums)):
        # The lower half of its bits is then that of the integer.
        sums[j] = sums[j] * times + _ROUND
    bits = sums.view(np.int32)
    for j in range(len(out)):
        out[j] += np.int16(bits[j])


# Sums of integers below 2²⁴ are exact: that their order is free changes no bit. Arrays and places
# in them, not slices, whose counters take as long as the sums; unsigned, so that none is negative.
@cached_njit(nogil=True)
def _add_product(
    left: I8Array, weighted: F32Array, times: np.float32, start_elem: int, out: I16Array
) -> None:
    """Add rint(times · Σ left · weighted) of elements from `start_elem` on to `out` [n].

    `left` [n, rows, r], `weighted` [n, r, columns].
    """
    n_rows, rank, n_cols = left.shape[1], weighted.shape[1], weighted.shape[2]
    stop_elem = start_elem + len(out)
    numbers, factors = left.reshape(-1), weighted.reshape(-1)
    sums = np.empty(_COLUMNS, np.float32)
    for first in range(0, n_cols, _COLUMNS):
        last = min(n_cols, first + _COLUMNS)
        for row in range(start_elem // n_cols, -(-stop_elem // n_cols)):
            # Columns [a, b) of this row are asked for.
            a = max(first, start_elem - row * n_cols)
            b = min(last, stop_elem - row * n_cols)
            if a >= b:
                continue
            sums[: b - a] = 0
            at, place = row * rank, row // n_rows * rank * n_cols + a
            k = 0
            while k < rank:
                if k + 4 <= rank:
                    _add_four(numbers, at + k, factors, place + k * n_cols, n_cols, sums, b - a)
                    k += 4
                else:
                    _add_one(numbers, at + k, factors, place + k * n_cols, sums, b - a)
                    k += 1
            to = row * n_cols + a - start_elem
            _add_rounded(sums[: b - a], times, out[to : to + b - a])


@numba.njit(inline="always")
def _add_four(
    numbers: Any, at: Any, factors: Any, place: Any, n_cols: Any, sums: Any, n: Any
) -> None:
    """Add four directions to `sums` [n], which is read and written once for all of them."""
    w, x = np.float32(numbers[at]), np.float32(numbers[at + 1])
    y, z = np.float32(numbers[at + 2]), np.float32(numbers[at + 3])
    wide = np.uint64(n_cols)
    first = np.uint64(place)
    second, third, fourth = first + wide, first + wide + wide, first + wide + wide + wide
    for j in range(n):
        k = np.uint64(j)
        total: Any = fma(w, factors[first + k], sums[k])  # type: ignore[call-arg]
        total = fma(x, factors[second + k], total)
        total = fma(y, factors[third + k], total)
        sums[k] = fma(z, factors[fourth + k], total)


@numba.njit(inline="always")
def _add_one(numbers: Any, at: Any, factors: Any, place: Any, sums: Any, n: Any) -> None:
    number, first = np.float32(numbers[at]), np.uint64(place)
    for j in range(n):
        k = np.uint64(j)
        sums[k] = fma(number, factors[first + k], sums[k])  # type: ignore[call-arg]
