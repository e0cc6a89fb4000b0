"""A `FusedMerge` made ready for the compiled loops: its rows as one table, built once per tensor.

Not imported with the operators: schemas load without the compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

import numpy as np

from mergepipe_pipeline.arrays import F32Array, I64Array
from mergepipe_pipeline.domain.plan import TrimRule
from mergepipe_pipeline.operators.kernels.bits import Stored
from mergepipe_pipeline.operators.kernels.merge_tiles import (
    ROW,
    STORED,
    TILE_ELEMS,
    Mixing,
    merge_update,
    merge_values,
)
from mergepipe_pipeline.operators.steps.fused import FusedMerge, FusedRow

_NO_RULE = TrimRule(0, 0)
#: Where ties are cut, by rule of an expert: 0 for the trim, 1 for the outliers.
_STOPS = ("trim_stop_elem", "outlier_stop_elem")


class FusedKernel:
    """One tensor's merge, ready to run on its windows; safe for threads."""

    def __init__(self, fused: FusedMerge, is_delta: tuple[bool, ...]) -> None:
        """`is_delta`: per expert, whether its rows are δ, not T."""
        self._fused = fused
        self._rows = np.zeros(len(fused.rows), ROW)  # [K]; an expert that adds nothing is not used
        for k, (row, holds_delta) in enumerate(zip(fused.rows, is_delta, strict=True)):
            if row is not None:
                _fill(self._rows[k], row)
                self._rows[k]["is_delta"] = holds_delta
        self._adding = np.array([row is not None for row in fused.rows], np.bool_)
        self._mixing = Mixing(
            votes=fused.mix == "vote",
            normalize=fused.normalize,
            divisor=np.float32(fused.divisor),
            minus_lambda=np.float32(-fused.lambda_),
        )

    def with_stops(self, stops: Mapping[tuple[int, int], int]) -> FusedKernel:
        """The same merge, but for where ties are cut: by expert and rule (1 for outliers)."""
        if not stops:
            return self
        kernel = copy(self)
        kernel._rows = self._rows.copy()
        for (k, rule), stop_elem in stops.items():
            kernel._rows[k][_STOPS[rule]] = stop_elem
        return kernel

    def run(
        self,
        base: Stored,
        experts: Stored,
        present: I64Array,
        start_elem: int,
        out: F32Array,
        steps: F32Array | None = None,
    ) -> None:
        """Fill `out`, float32 [n], with the merge of a window whose first element is `start_elem`.

        `base` [n] and `experts` [p, n] are float32, or uint16 as bits of bfloat16; `present` are
        the numbers of the p experts, rising. Those absent equal the base. Of those present, `steps`
        [p, tiles_of(start_elem, n)] say what their rows hold, as for `merge_update`; None: stored
        elements everywhere. A mix of values has all experts everywhere, and looks at no base.
        """
        if self._fused.mix == "values":
            assert len(present) == len(self._rows)
            weights = np.ascontiguousarray(self._rows["weight"])
            merge_values(experts, weights, self._mixing.divisor, out)
            return
        places = np.flatnonzero(self._adding[present])  # [K here] rows of `experts`
        rows = self._rows[present[places]]
        rows["place"] = places
        if steps is None:
            shape = len(experts), tiles_of(start_elem, len(out))
            steps = np.full(shape, STORED, np.float32)
        merge_update(base, experts, steps, rows, start_elem, self._mixing, out)


def tiles_of(start_elem: int, n: int) -> int:
    """How many tiles of a tensor a window of n elements from `start_elem` on has a part of."""
    return -(-(start_elem % TILE_ELEMS + n) // TILE_ELEMS)


def _fill(entry: np.void, row: FusedRow) -> None:
    """Write what `row` does to an entry of type ROW."""
    trim, outliers = row.trim or _NO_RULE, row.outliers or _NO_RULE
    entry["trims"], entry["drops_outliers"] = row.trim is not None, row.outliers is not None
    entry["draws"] = row.stream is not None
    entry["trim_threshold"] = _float_of(trim.threshold_bits)
    entry["next_threshold"] = _float_of(trim.threshold_bits + 1)
    entry["outlier_threshold"] = _float_of(outliers.threshold_bits)
    entry["trim_stop_elem"] = trim.tie_stop_elem
    entry["outlier_stop_elem"] = outliers.tie_stop_elem
    entry["stream"], entry["keep_below"] = row.stream or 0, row.keep_below
    entry["scale"], entry["divisor"], entry["weight"] = row.scale, row.divisor, row.weight


def _float_of(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)
