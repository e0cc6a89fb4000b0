"""Rows, candidates and problems made from numbers: drawn, or from deltas that are known whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.recipe import Budget
from mergepipe_pipeline.domain.stats import SAMPLE_WIDTH, narrowed
from mergepipe_pipeline.planner.bounds import Sensitivity
from mergepipe_pipeline.planner.candidates import Candidates, Choice, Row, lay_out
from mergepipe_pipeline.planner.constraints import Constraints
from mergepipe_pipeline.planner.levels import Levels, LevelTable
from mergepipe_pipeline.planner.packed_rows import NOTHING, ORIGINAL
from mergepipe_pipeline.planner.samples import Samples, Simulate
from mergepipe_pipeline.planner.selection import PlanningProblem, select

GRID = BlockGrid(4096)
Floats = npt.NDArray[np.float64]


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
            rows.append(
                Row(
                    tensor=tensor,
                    position=position,
                    name=f"t{tensor}#{position}",
                    numel=numel,
                    itemsize=int(rng.choice([1, 2, 4])),
                    coefficient=float(rng.normal()),
                    block_l2sq=rng.random(n) * alive,
                    block_nonzero=alive.astype(np.int64),
                    bundle_nbytes=bundle,
                )
            )
    return lay_out(rows, GRID)


def row(*l2sq: float, position: int = 0, bundle_nbytes: int | None = None, tensor: int = 0) -> Row:
    """One row of BF16 with these block norms, whole blocks only."""
    values = np.array(l2sq)
    return Row(
        tensor=tensor,
        position=position,
        name=f"t#{position}",
        numel=len(values) * GRID.block_elems,
        itemsize=2,
        coefficient=1.0,
        block_l2sq=values,
        block_nonzero=(values > 0).astype(np.int64),
        bundle_nbytes=bundle_nbytes,
    )


def known(deltas: Floats, weights: Sequence[float], tensor: int = 0) -> list[Row]:
    """Rows of one tensor with these deltas, [E, blocks, n] float64."""
    return [
        replace(
            row(*np.square(own).sum(axis=1).tolist(), position=position, tensor=tensor),
            coefficient=float(weights[position]),
            block_nonzero=np.any(own, axis=1).astype(np.int64),
        )
        for position, own in enumerate(deltas)
    ]


def sampled(
    rows: Sequence[Row], deltas: Floats | None = None, simulate: Simulate | None = None
) -> Samples:
    """Evenly spread samples of `deltas` [E, blocks, n], as known of them; else of unlike ones."""
    if deltas is None:
        rng = np.random.default_rng(0)
        most = max(GRID.count(r.numel) for r in rows)
        deltas = rng.normal(size=(len(rows), most, SAMPLE_WIDTH))
        for own, r in zip(deltas, rows, strict=True):
            size = np.zeros(most)
            if r.block_l2sq is not None:
                size[: len(r.block_l2sq)] = np.sqrt(np.nan_to_num(r.block_l2sq, posinf=9.0))
            own *= size[:, None]
    step = deltas.shape[2] // SAMPLE_WIDTH
    stored = [narrowed(own[:, ::step].astype(np.float32)) for own in deltas]
    return Samples(rows, stored, GRID, GRID, simulate)


@dataclass(frozen=True, kw_only=True)
class GivenProblem(PlanningProblem):
    """A problem whose constraints are given, not made from a budget."""

    given: Constraints

    def constraints(self, budget: Budget) -> Constraints:
        """Return those that are given."""
        return self.given


def problem_of(
    c: Candidates,
    deltas: Mapping[int, Floats] | None = None,
    *,
    given: Constraints | None = None,
    sensitivities: Mapping[int, Sensitivity] | None = None,
) -> PlanningProblem:
    """The problem of candidates, with samples of the deltas by tensor."""
    samples = {
        group.tensor: sampled(group.rows, (deltas or {}).get(group.tensor)) for group in c.groups()
    }
    additive = {
        group.tensor: Sensitivity("additive", np.full(len(group.rows), np.nan), False)
        for group in c.groups()
    }
    return GivenProblem(
        table=LevelTable(c),
        sensitivities=sensitivities or additive,
        samples=samples,
        tensors=[f"t{n}" for n in range(1 + max(r.tensor for r in c.rows))],
        experts=[(f"e{n}",) for n in range(1 + max(r.position for r in c.rows))],
        block_elems=c.grid.block_elems,
        given=given or constraints(c),
    )


def originals(choice: Choice) -> Levels:
    """The levels of a choice of whole blocks."""
    return np.where(choice, np.int8(ORIGINAL), np.int8(NOTHING))


def choose(
    c: Candidates, given: Constraints, strategy: str, deltas: Mapping[int, Floats] | None = None
) -> Choice:
    """What a strategy reads under constraints."""
    selection = select(problem_of(c, deltas, given=given), Budget(), strategy)
    chosen: Choice = selection.levels == ORIGINAL
    return chosen


def left_out(c: Candidates, deltas: Floats, choice: Choice) -> float:
    """‖Σ omitted c·δ‖² of the deltas [E, blocks, n] of one tensor."""
    experts, blocks, _ = deltas.shape
    weights = np.array([r.coefficient for r in c.rows])
    omitted = ~choice.reshape(experts, blocks)
    return float(np.square(np.einsum("e,eb,ebk->bk", weights, omitted, deltas)).sum())


def constraints(c: Candidates, budget_bytes: int | None = None) -> Constraints:
    """So many bytes (None: all), without pins, exclusions or caps."""
    experts = 1 + max((r.position for r in c.rows), default=0)
    none = np.zeros(len(c.row), np.bool_)
    return Constraints(
        int(c.nbytes.sum()) if budget_bytes is None else budget_bytes,
        np.full(experts, np.iinfo(np.int64).max),
        none,
        none,
    )
