"""The tiers R0 to R2: products of two factors of four bits, near to a tensor's δ as a whole.

Numbers of the factors are integers of −7 to 7, and each direction has a whole weight. Sums of
their products are below 2²⁴, so that float32 holds them exactly: in whatever order a machine adds
them, δ̂ has the same bits. A tensor of more than two dimensions is a stack of matrices.
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

#: Parts of the bytes of bfloat16 that the rungs take together, about; and directions at most.
_SHARES = (0.001, 0.005, 0.02)
_MOST_DIRECTIONS = 32
#: Smaller matrices have no directions.
_LEAST_LENGTH = 16
#: The largest number of a factor, and what weights may add up to.
_MOST = 7
_MOST_WEIGHT = (1 << 24) // _MOST**2
#: With a larger step sums might be infinite.
_MOST_STEP = 2.0**100
#: Steps of a factor that are tried, as shares of its largest element.
_STEPS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
#: Added to a number of a factor, it is half a byte.
_SHIFT = 8
#: Columns that are summed at once: those of a few directions stay in the first cache.
_COLUMNS = 512
#: Added to a small float32, it rounds it to the nearest integer, ties to even.
_ROUND = np.float32(12582912)


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """δ̂ = step · Σ weight · left · right, over the directions of each of n matrices.

    `weights` uint32 [n, r], `left` int8 [n, rows, r], `right` int8 [n, r, columns].
    """

    step: np.float32
    weights: U32Array
    left: I8Array
    right: I8Array

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
        return Product(step, self.weights[:, :rank], np.ascontiguousarray(left), right)

    def l2sq(self) -> float:
        """‖δ̂‖², about."""
        left, right = self.left.astype(np.float64), self.right.astype(np.float64)
        # [n, r, r] each: the inner products of all pairs of directions.
        lefts, rights = left.transpose(0, 2, 1) @ left, right @ right.transpose(0, 2, 1)
        weights = self.weights[:, :, None] * self.weights[:, None].astype(np.float64)
        return float(self.step) ** 2 * float((weights * lefts * rights).sum())

    def largest(self) -> float:
        """A bound of all |δ̂|."""
        return float(self.step) * _MOST**2 * int(self.weights.sum(axis=1).max())


def ranks_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The directions of each matrix of a tensor up to each rung; () where it has none."""
    if len(shape) < 2 or min(shape[-2:]) < _LEAST_LENGTH:
        return ()
    rows, columns = shape[-2:]
    each = 2 * rows * columns / _direction_nbytes(rows, columns)
    most = min(_MOST_DIRECTIONS, rows // 2, columns // 2)
    return tuple(min(most, max(1, round(share * each))) for share in _SHARES)


def frames_of(rungs: Sequence[Product]) -> dict[Tier, bytes]:
    """The frame of each rung: its step, and the directions that the rung before does not have."""
    frames, first = {}, 0
    for tier, product in zip(FACTORED, rungs, strict=True):
        some, stop = slice(first, None), product.weights.shape[1]
        parts = [np.ascontiguousarray(product.weights[:, some], "<u4").view(np.uint8)]
        by_direction = product.left.transpose(0, 2, 1)
        parts += [_joined(factor[:, some]) for factor in (by_direction, product.right)]
        whole = np.concatenate([p.reshape(len(p), -1) for p in parts], axis=1)
        step = np.array(product.step, "<f4").tobytes()
        frames[tier] = step + whole.tobytes() if stop > first else b""
        first = stop
    return frames


def factors_of(frames: Mapping[Tier, bytes]) -> str:
    """The checksum of the frames of all rungs; "" where there are none."""
    joined = b"".join(frames[tier] for tier in FACTORED)
    return f"{checksum(as_array(joined)):016x}" if joined else ""


def rung_nbytes(shape: Sequence[int]) -> tuple[int, ...]:
    """Bytes of the frame of each rung that a tensor may have; 0 for none."""
    ranks = ranks_of(shape) or (0,) * len(FACTORED)
    more = np.diff(ranks, prepend=0).tolist()
    each = math.prod(shape[:-2]) * _direction_nbytes(*shape[-2:]) if any(ranks) else 0
    return tuple(4 + count * each if count else 0 for count in more)


def product_of(found: Sequence[Directions]) -> Product:
    """The product whose factors are the directions of each matrix of a tensor, rounded."""
    left, left_steps = _to_integers(np.stack([d.left.T for d in found]))  # [n, r, rows], [n, r]
    right, right_steps = _to_integers(np.stack([d.right for d in found]))
    scales = left_steps * right_steps  # [n, r]
    # Rounding may add one half to each weight.
    step = np.float32(scales.sum(axis=1).max() / (_MOST_WEIGHT - scales.shape[1]))
    weights = np.rint(scales / step).astype(np.uint32)
    return Product(step, weights, _by_row(left), right)


def product_from(frames: Sequence[memoryview], shape: Sequence[int]) -> Product:
    """The product of a tensor's last of some first rungs by the frames of all of these.

    Raises CorruptionError.
    """
    n, (rows, columns) = math.prod(shape[:-2]), shape[-2:]
    each = n * _direction_nbytes(rows, columns)
    steps, weights, lefts, rights = [], [], [], []
    for frame in frames:
        if len(frame) == 0:
            continue
        count, rest = divmod(len(frame) - 4, each)
        if rest or count < 1:
            refuse(f"directions of {each} bytes", f"{len(frame) - 4}")
        steps.append(np.frombuffer(frame[:4], "<f4")[0])
        table = np.frombuffer(frame[4:], np.uint8).reshape(n, -1)
        stops = np.cumsum([4 * count, count * -(-rows // 2)])
        weight, left, right = np.split(table, stops, axis=1)
        weights.append(np.ascontiguousarray(weight).view("<u4").astype(np.uint32))
        lefts.append(_apart(left, count, rows))
        rights.append(_apart(right, count, columns))
    if not steps:
        refuse("a frame of factors", "none")
    whole = np.concatenate(weights, axis=1)
    sums = whole.sum(axis=1, dtype=np.uint64)
    if not 0 < steps[-1] < _MOST_STEP or sums.max() > _MOST_WEIGHT:
        refuse("a step, and weights that float32 adds up exactly", "others")
    all_left, all_right = _by_row(np.concatenate(lefts, axis=1)), np.concatenate(rights, axis=1)
    if min(all_left.min(), all_right.min()) < -_MOST:
        refuse(f"numbers of -{_MOST} to {_MOST}", "others")
    return Product(np.float32(steps[-1]), whole, all_left, all_right)


def _by_row(left: I8Array) -> I8Array:
    """A left factor [n, r, rows] as [n, rows, r]."""
    return np.ascontiguousarray(left.transpose(0, 2, 1))


def _to_integers(factors: F32Array) -> tuple[I8Array, F64Array]:
    """`factors` [n, r, length] as integers, and their steps [n, r] of the least squared error."""
    largest = np.abs(factors).max(axis=2).astype(np.float64)
    steps = np.where(largest > 0, largest, 1.0) / _MOST
    best, least = np.ones_like(steps), np.full(steps.shape, np.inf)
    for share in _STEPS:
        in_steps = share * steps[..., None]
        error = np.square(factors - _rounded(factors, in_steps) * in_steps).sum(axis=2)
        best, least = np.where(error < least, share, best), np.minimum(error, least)
    steps *= best
    whole = _rounded(factors, steps[..., None]).astype(np.int8)
    return whole, np.where(largest > 0, steps, 0.0)


def _rounded(factors: F32Array, steps: F64Array) -> F64Array:
    whole: F64Array = np.clip(np.rint(factors / steps), -_MOST, _MOST)
    return whole


def _direction_nbytes(rows: int, columns: int) -> int:
    """Bytes of one direction: its weight, and two numbers a byte."""
    return 4 + -(-rows // 2) + -(-columns // 2)


def _joined(factor: I8Array) -> U8Array:
    """`factor` [n, r, length] with two numbers a byte, [n, r, half the length]."""
    even: I8Array = np.pad(factor, ((0, 0), (0, 0), (0, factor.shape[2] % 2)))
    halves: U8Array = (even + np.int8(_SHIFT)).astype(np.uint8)
    joined: U8Array = halves[..., ::2] | halves[..., 1::2] << np.uint8(4)
    return joined


def _apart(table: U8Array, count: int, length: int) -> I8Array:
    """The numbers [n, count, length] of bytes."""
    pairs = table.reshape(len(table), count, -1)
    halves = np.stack([pairs & 15, pairs >> 4], axis=3).reshape(*pairs.shape[:2], -1)
    return halves[..., :length].astype(np.int8) - np.int8(_SHIFT)


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
