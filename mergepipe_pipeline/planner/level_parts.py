"""The merged output tensors of a recipe whose experts have packs, on a grid of whole chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.planner.candidates import Row, lay_out
from mergepipe_pipeline.planner.level_samples import LevelSamples
from mergepipe_pipeline.planner.levels import LevelTable
from mergepipe_pipeline.planner.packed_rows import Packs, row_levels
from mergepipe_pipeline.planner.parts import Method, Part, Parts, TensorFacts
from mergepipe_pipeline.planner.simulation import Simulate


class LevelParts:
    """The parts of a recipe with what `packs` offer of them; statistics are on `grid`."""

    def __init__(
        self,
        parts: Parts,
        methods: Mapping[str, Method],
        facts: TensorFacts,
        packs: Packs,
        grid: BlockGrid,
    ) -> None:
        self._parts, self._methods, self._facts = parts, methods, facts
        self._packs, self._grid = packs, grid

    def table(self) -> LevelTable:
        """All that could be read, from packs or not."""
        grid = self._packs.grid
        blocks = grid.block_elems // self._grid.block_elems
        rows = [
            self._with_levels(part, i, _coarsened(row, blocks))
            for number, part in enumerate(self._parts.all)
            for i, row in enumerate(self._parts.rows(number, part))
        ]
        return LevelTable(lay_out(rows, grid))

    def samples(self, table: LevelTable) -> dict[int, LevelSamples]:
        """The samples of each part whose statistics are all known, by number."""
        by_tensor = {}
        for group in table.candidates.groups():
            part = self._parts.all[group.tensor]
            stats = [self._parts.stats_of(part.recipe, i) for i in range(len(group.rows))]
            present = [s for s in stats if s is not None]
            if len(present) == len(stats):
                grids = table.candidates.grid, self._grid
                samples = LevelSamples(group.rows, present, *grids, self._simulate(part))
                by_tensor[group.tensor] = samples
        return by_tensor

    def _simulate(self, part: Part) -> Simulate | None:
        """None for sums, and for methods that do not work element by element."""
        schema = self._methods[part.operator].schema
        is_elementwise = schema.scope == "element" or schema.fact == "ranked"
        if self._parts.is_sum(part) or not is_elementwise:
            return None
        return self._parts.simulate(part)

    def _with_levels(self, part: Part, i: int, row: Row) -> Row:
        """The row of input `i` with what its pack has, if it has one."""
        t = part.recipe
        if t.base is None:
            return row
        of_pair = self._packs.rows.get((t.inputs[i].model, t.base.model), {})
        packed = of_pair.get((t.inputs[i].tensor, t.base.tensor))
        if packed is None:
            return row
        method = self._methods[part.operator]
        trim = self._facts.trims.get((t.name, i))
        levels = row_levels(packed, method.schema, method.response(part.params), trim)
        return replace(row, levels=levels)


def _coarsened(row: Row, blocks: int) -> Row:
    """A row whose blocks are `blocks` of its own, the last perhaps fewer; without sketches."""
    if row.block_l2sq is None or blocks == 1:
        return row
    assert row.block_nonzero is not None
    starts = np.arange(0, len(row.block_l2sq), blocks)
    sq_norm = row.block_sq_norm
    return replace(
        row,
        block_l2sq=np.add.reduceat(row.block_l2sq, starts),
        block_nonzero=np.add.reduceat(row.block_nonzero, starts),
        block_sq_norm=None if sq_norm is None else np.add.reduceat(sq_norm, starts),
        block_sketch=None,
    )
