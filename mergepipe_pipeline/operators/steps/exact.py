"""Exact sums of models, which no order changes, and the mean that each gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np

from mergepipe_pipeline.arrays import BoolArray, F32Array, F64Array


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums of n elements each: `high` + `low`, of which `high` is the nearest float64.

    `beyond` is 0 where they are exact; elsewhere they mean nothing.
    """

    high: F64Array
    low: F64Array
    beyond: F64Array

    @staticmethod
    def zero(n: int) -> Sums:
        """The sums of no model."""
        return Sums(np.zeros(n), np.zeros(n), np.zeros(n))

    @property
    def exact(self) -> BoolArray:
        """Where they are exact."""
        exact: BoolArray = self.beyond == 0
        return exact

    def add(self, rows: F32Array, signs: Sequence[int], first: int = 0) -> None:
        """Add or take away `rows` [K, first:first + n]."""
        from mergepipe_pipeline.operators.kernels.exact_sums import add_rows

        add_rows(rows, first, np.array(signs, np.float64), self.high, self.low, self.beyond)

    def mean(self, count: int) -> F32Array:
        """The sums over a count, rounded to float64 and to float32; a zero is +0."""
        mean: F32Array = ((self.high + 0.0) / count).astype(np.float32)
        return mean


def mean_of(rows: F32Array, first: int = 0, stop: int | None = None) -> tuple[F32Array, Sums]:
    """The mean [n] of `rows` [K, first:stop], and their sums.

    Where two float64 do not hold a sum, it is added up with as many digits as it takes; NaN and
    infinity give what they give in any order.
    """
    sums = Sums.zero((rows.shape[1] if stop is None else stop) - first)
    sums.add(rows, [1] * len(rows), first)
    (odd,) = np.nonzero(~sums.exact)
    for e in odd:
        column = rows[:, first + e].astype(np.float64)
        with np.errstate(invalid="ignore"):
            sums.high[e] = fsum(column) if np.isfinite(column).all() else column.sum()
    return sums.mean(len(rows)), sums
