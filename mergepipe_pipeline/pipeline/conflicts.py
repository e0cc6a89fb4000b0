"""The verb `conflicts`: how a recipe's experts agree and differ, from catalog sketches alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe_pipeline.errors import RecipeError
from mergepipe_pipeline.pipeline.analyze import common_pairs, ensure_stats
from mergepipe_pipeline.pipeline.check import check
from mergepipe_pipeline.pipeline.progress import Progress
from mergepipe_pipeline.recipe.load import RawRecipe
from mergepipe_pipeline.warehouse import Warehouse

if TYPE_CHECKING:
    from mergepipe_pipeline.analysis.conflicts import ConflictReport


def conflicts(
    home: Warehouse,
    raw: RawRecipe,
    *,
    relative_to: Path | None = None,
    progress: Progress | None = None,
) -> ConflictReport:
    """The conflict report of a recipe's experts; analyses what the catalog does not know yet.

    Raises what `check` raises, and RecipeError for a recipe without a base to differ from.
    """
    from mergepipe_pipeline.analysis.conflicts import conflicts as compare

    checked = check(home, raw, relative_to=relative_to)
    if checked.base is None:
        raise RecipeError(
            "Conflicts are between deltas, and this recipe has no base",
            where=raw.where,
            expected="a base_model",
            found="none",
            next_step="add base_model to the recipe",
        )
    base, experts = checked.base, [m for m in checked.experts if m is not checked.base]
    stats = [
        ensure_stats(home, e, base, common_pairs(e, base), checked.grid, progress) for e in experts
    ]
    return compare([e.name for e in experts], stats)
