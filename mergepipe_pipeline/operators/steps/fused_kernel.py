"""A `FusedMerge` by the compiled loops, made ready once per tensor.

Not imported with the operators: schemas load without the compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

import numpy as np

from mergepipe_pipeline.arrays import F32Array, I64Array
from mergepipe_pipeline.operators.kernels.bits import Stored
from mergepipe_pipeline.operators.kernels.merge_tiles import (
    STORED,
    TILE_ELEMS,
    merge_update,
    merge_values,
)
from mergepipe_pipeline.operators.steps.fused import FusedMerge

#: Where ties are cut, by rule of an expert: 0 for the trim, 1 for the outliers.
_STOPS = ("trim_stop_elem", "outlier_stop_elem")


class FusedKernel:
    """One tensor's merge, ready to run on its windows; safe for threads."""

    def __init__(self, fused: FusedMerge, is_delta: tuple[bool, ...]) -> None:
        """`is_delta`: per expert, whether its rows are δ, not T."""
        self._fused, self._rows = fused, fused.rows.copy()
        self._rows["is_delta"] = is_delta

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
        if not self._fused.is_update:
            assert len(present) == len(self._rows)
            weights = np.ascontiguousarray(self._rows["weight"])
            merge_values(experts, weights, self._fused.mixing.divisor, out)
            return
        places = np.flatnonzero(self._fused.adding[present])  # [K here] rows of `experts`
        rows = self._rows[present[places]]
        rows["place"] = places
        if steps is None:
            shape = len(experts), tiles_of(start_elem, len(out))
            steps = np.full(shape, STORED, np.float32)
        merge_update(base, experts, steps, rows, start_elem, self._fused.mixing, out)


def tiles_of(start_elem: int, n: int) -> int:
    """How many tiles of a tensor a window of n elements from `start_elem` on has a part of."""
    return -(-(start_elem % TILE_ELEMS + n) // TILE_ELEMS)
