"""A `Fused` merge made ready for the compiled loops: its rows as arrays, built once per tensor.

Not imported with the operators: schemas load without the compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

import numpy as np

from mergepipe_pipeline.operators.kernels.bits import Floats, Stored
from mergepipe_pipeline.operators.kernels.merge_tiles import Ints, merge_update, merge_values
from mergepipe_pipeline.operators.steps.fused import Fused


class FusedKernel:
    """One tensor's merge, ready to run on its windows; safe for threads."""

    def __init__(self, fused: Fused, is_delta: tuple[bool, ...]) -> None:
        """`is_delta`: per expert, whether its rows are δ, not T."""
        self._fused = fused
        rows = fused.rows
        limits = [
            (
                r.trim.threshold_bits if r and r.trim else 0,
                r.trim.tie_stop_elem if r and r.trim else 0,
                r.outliers.threshold_bits if r and r.outliers else 0,
                r.outliers.tie_stop_elem if r and r.outliers else 0,
            )
            for r in rows
        ]
        table = np.array(limits, np.int64).reshape(-1, 4)
        bits = table[:, ::2].astype(np.uint32)
        self._thresholds = bits.view(np.float32)
        # What a trim keeps at least: the threshold where ties are kept, what follows it elsewhere.
        self._least = np.stack([bits[:, 0], bits[:, 0] + np.uint32(1)], axis=1).view(np.float32)
        self._tie_stops = np.ascontiguousarray(table[:, 1::2])
        self._streams = np.array([(r and r.stream) or 0 for r in rows], np.uint64)
        self._below = np.array([(r and r.keep_below) or 0 for r in rows], np.uint32)
        self._factors = np.array(
            [(r.scale, r.divisor, r.weight) if r else (1, 1, 0) for r in rows], np.float32
        ).reshape(-1, 3)
        self._steps = np.array(
            [
                (d, bool(r and r.trim), bool(r and r.outliers), bool(r and r.stream is not None))
                for r, d in zip(rows, is_delta, strict=True)
            ],
            np.bool_,
        ).reshape(-1, 4)

    def with_stops(self, stops: Mapping[tuple[int, int], int]) -> FusedKernel:
        """The same merge, but for where ties are cut: by expert and rule (1 for outliers)."""
        if not stops:
            return self
        other = copy(self)
        other._tie_stops = self._tie_stops.copy()
        for which, stop_elem in stops.items():
            other._tie_stops[which] = stop_elem
        return other

    def run(
        self,
        base: Stored,
        experts: Stored,
        present: Ints,
        start_elem: int,
        out: Floats,
        spans: Ints | None = None,
    ) -> None:
        """Fill `out`, float32 [n], with the merge of a window whose first element is `start_elem`.

        `base` [n] and `experts` [p, n] are float32, or uint16 as bits of bfloat16; `present` are
        the numbers of the p experts, rising. Those absent equal the base, and so do those present
        outside their elements `spans`, [p, 2], multiples of TILE_ELEMS or n; None is all. A mix of
        values has all experts everywhere, and looks at no base.
        """
        f = self._fused
        if f.mix == "values":
            assert len(present) == len(f.rows)
            merge_values(experts, self._factors[:, 2].copy(), np.float32(f.divisor), out)
            return
        if spans is None:
            spans = np.array([[0, len(out)]] * len(present), np.int64).reshape(-1, 2)
        merge_update(
            base,
            experts,
            np.array([k for k in present if f.rows[k] is not None], np.int64),
            np.array([i for i, k in enumerate(present) if f.rows[k] is not None], np.int64),
            spans,
            start_elem,
            self._steps,
            self._thresholds,
            self._least,
            self._tie_stops,
            self._streams,
            self._below,
            self._factors,
            f.mix == "vote",
            f.normalize,
            np.float32(f.divisor),
            np.float32(-f.lambda_),
            out,
        )
