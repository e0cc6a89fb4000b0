"""Tables of levels drawn at random: sizes and residuals of packs that nobody has written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from mergepipe_pipeline.domain.pack import CHUNK_ELEMS, TIERS
from mergepipe_pipeline.packs.index import NO_TAILS
from mergepipe_pipeline.planner.candidates import Row, lay_out
from mergepipe_pipeline.planner.levels import LevelTable
from mergepipe_pipeline.planner.packed_rows import (
    N_LEVELS,
    N_RUNGS,
    PackedRow,
    PackGrid,
    RowLevels,
)
from mergepipe_pipeline.planner.selection import PlanningProblem

GRID = PackGrid(CHUNK_ELEMS)
_X = TIERS.index("X")
_NO_RUNGS = np.zeros(N_RUNGS, np.int64)


def levels_of(
    rng: np.random.Generator, l2sq: np.ndarray, pack: int = 0, *, has_factors: bool = False
) -> RowLevels:
    """A pack's levels: the lossy ones leave less and cost more from one to the next, mostly."""
    n = len(l2sq)
    nbytes = np.sort(rng.integers(0, 2 * CHUNK_ELEMS, (N_LEVELS, n)), axis=0)
    nbytes[:N_RUNGS] = 0
    left = np.sort(rng.random((N_LEVELS, n)), axis=0)[::-1] * l2sq
    left[_X] = 0
    left[:_X][:, rng.random(n) < 0.1] = np.inf
    rung_nbytes = np.sort(rng.integers(1, CHUNK_ELEMS, N_RUNGS)) if has_factors else _NO_RUNGS
    if not has_factors:
        left[:N_RUNGS] = np.inf
    exact = np.zeros(N_LEVELS, np.bool_)
    exact[_X] = True
    exact[TIERS.index("X20")] = rng.random() < 0.3
    usable = exact | (rng.random() < 0.8)
    packed = PackedRow(
        pack=pack,
        tensor="w",
        unit=1.0,
        factors="f" * 16 if has_factors else "",
        threshold_bits=0,
        rung_nbytes=rung_nbytes,
        nbytes=nbytes.astype(np.uint32),
        residual_sq=left.astype(np.float32),
        tails=NO_TAILS,
    )
    return RowLevels(packed=packed, usable=usable, exact=exact)


@st.composite
def tables(draw: st.DrawFn, *, most_blocks: int = 6) -> LevelTable:
    """Rows of a few tensors and experts; some without a pack, or with factors, or read whole."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = []
    for tensor in range(draw(st.integers(1, 3))):
        numel = draw(st.integers(1, most_blocks * CHUNK_ELEMS))
        for position in range(draw(st.integers(1, 3))):
            n = GRID.count(numel)
            alive = rng.random(n) > 0.2
            l2sq = rng.random(n) * alive
            row = Row(
                tensor=tensor,
                position=position,
                name=f"t{tensor}#{position}",
                numel=numel,
                itemsize=2,
                coefficient=float(rng.normal()),
                block_l2sq=l2sq,
                block_nonzero=alive.astype(np.int64),
            )
            kind = rng.choice(["packed", "packed", "factored", "factored", "stored", "bundle"])
            if kind == "bundle":
                row = replace(row, bundle_nbytes=int(rng.integers(0, 9000)))
            elif kind != "stored":
                row = replace(row, levels=levels_of(rng, l2sq, has_factors=kind == "factored"))
            rows.append(row)
    return LevelTable(lay_out(rows, GRID))


def problem(table: LevelTable) -> PlanningProblem:
    """A problem of which nothing but what it costs and leaves is known."""
    count = 1 + max(r.position for r in table.candidates.rows)
    tensors = 1 + max(r.tensor for r in table.candidates.rows)
    return PlanningProblem(
        table=table,
        sensitivities={},
        samples={},
        tensors=[f"t{n}" for n in range(tensors)],
        experts=[(f"e{n}",) for n in range(count)],
        has_packs=True,
        block_elems=CHUNK_ELEMS,
    )
