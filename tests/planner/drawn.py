"""Rows and candidates made from numbers: drawn at random, or from deltas that are known whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.stats import SKETCH_WIDTH, narrowed
from mergepipe_pipeline.planner.candidates import Candidates, Choice, Curve, Row, lay_out
from mergepipe_pipeline.planner.constraints import Constraints

GRID = BlockGrid(4096)
Floats = npt.NDArray[np.float64]


@st.composite
def candidates(draw: st.DrawFn) -> Candidates:
    """Rows over a few tensors and experts with random norms, some blocks all zero.

    Half of the rows are bundles: of some bytes, or of none with nothing in them. Some tensors have
    sketches.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = []
    for tensor in range(draw(st.integers(1, 4))):
        numel = draw(st.integers(1, 30_000))
        has_sketch = draw(st.booleans())
        for position in range(draw(st.integers(1, 4))):
            bundle = draw(st.none() | st.none() | st.just(0) | st.integers(1, 9000))
            n = GRID.count(numel)
            alive = (rng.random(n) > 0.2) & (bundle != 0)
            lanes = rng.normal(size=(n, SKETCH_WIDTH)) * alive[:, None]
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
                    block_sketch=narrowed(lanes.astype(np.float32)) if has_sketch else None,
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
    """Rows of one tensor whose deltas, [E, blocks, 64] float64, are their own sketches.

    Inner products of such sketches are those of the deltas, but for the rounding to bfloat16.
    """
    experts, blocks, width = deltas.shape
    assert width == SKETCH_WIDTH
    return [
        Row(
            tensor=tensor,
            position=position,
            name=f"t{tensor}#{position}",
            numel=blocks * GRID.block_elems,
            itemsize=2,
            coefficient=float(weights[position]),
            block_l2sq=np.square(deltas[position]).sum(axis=1),
            block_nonzero=np.any(deltas[position], axis=1).astype(np.int64),
            block_sketch=narrowed(deltas[position].astype(np.float32)),
        )
        for position in range(experts)
    ]


@dataclass(frozen=True)
class Drawn:
    """Simulations of which only curves are known."""

    curves: Mapping[int, Curve]

    def squares(self, tensor: int, omitted: Sequence[Choice]) -> Floats | None:
        return None


@dataclass(frozen=True)
class Replayed:
    """Simulations of tensors of one expert: [blocks, parts], what leaving out each block costs."""

    costs: Mapping[int, Floats]
    curves: Mapping[int, Curve] = field(default_factory=dict)

    def squares(self, tensor: int, omitted: Sequence[Choice]) -> Floats | None:
        return np.array([self.costs[tensor][left[:, 0]].sum(axis=0) for left in omitted])


def left_out(c: Candidates, deltas: Floats, choice: Choice) -> float:
    """‖Σ omitted c·δ‖² of the deltas [E, blocks, 64] of one tensor."""
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
