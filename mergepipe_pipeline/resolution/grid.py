"""The block grid of a recipe."""

from __future__ import annotations

from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.errors import RecipeError


def grid_for(base: Model, block_elems: int | None) -> BlockGrid:
    """The block grid of a base: as asked for, or from the model's size. Raises RecipeError."""
    if block_elems is not None:
        try:
            return BlockGrid(block_elems)
        except ValueError as error:
            raise RecipeError(
                "A block size cannot be used",
                where="block size",
                expected=str(error).removeprefix("block_elems must be "),
                found=str(block_elems),
                next_step="leave it out for a size that fits the model",
            ) from None
    return BlockGrid.for_numel(sum(v.numel for v in base.views.values()))
