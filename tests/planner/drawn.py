"""Rows and candidates drawn at random: several tensors and experts, some of them adapters."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from mergepipe_pipeline.planner.candidates import Candidates, Row, lay_out
from mergepipe_pipeline.spec.blocks import BlockGrid

GRID = BlockGrid(4096)


@st.composite
def candidates(draw: st.DrawFn) -> Candidates:
    """Rows over a few tensors and experts with random norms, some blocks all zero.

    Half of the rows are bundles: of some bytes, or of none with nothing in them.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = []
    for tensor in range(draw(st.integers(1, 4))):
        numel = draw(st.integers(1, 30_000))
        for position in range(draw(st.integers(1, 4))):
            bundle = draw(st.none() | st.none() | st.just(0) | st.integers(1, 9000))
            n = GRID.count(numel)
            alive = (rng.random(n) > 0.2) & (bundle != 0)
            l2sq = rng.random(n) * alive
            rows.append(
                Row(
                    tensor,
                    position,
                    f"t{tensor}#{position}",
                    numel,
                    int(rng.choice([1, 2, 4])),
                    float(rng.normal()),
                    l2sq,
                    np.sqrt(l2sq).astype(np.float32),
                    alive.astype(np.int64),
                    bundle,
                )
            )
    return lay_out(rows, GRID)


def row(*l2sq: float, position: int = 0, bundle_nbytes: int | None = None, tensor: int = 0) -> Row:
    """One row of BF16 with these block norms, whole blocks only."""
    values = np.array(l2sq)
    return Row(
        tensor,
        position,
        f"t#{position}",
        len(values) * GRID.block_elems,
        2,
        1.0,
        values,
        np.sqrt(values).astype(np.float32),
        (values > 0).astype(np.int64),
        bundle_nbytes,
    )
