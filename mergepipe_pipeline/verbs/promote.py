"""The verb `promote`: publish a snapshot if the gate of a recipe lets it pass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mergepipe_pipeline.deploy.recipe_files import standing_recipes
from mergepipe_pipeline.domain.snapshot import Ref
from mergepipe_pipeline.errors import GateError
from mergepipe_pipeline.execution.lookup import snapshot_of
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.resolution.recipe_text import load_recipe
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.verbs.gate import Judged, judge_snapshot, mark, refuse
from mergepipe_pipeline.verbs.guard import refuse_kept_out
from mergepipe_pipeline.verbs.publish import publish
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Promoted:
    """A version of a ref, and what let it pass: a gate, or (None) somebody's reason."""

    ref: Ref
    judged: Judged | None


def promote(
    warehouse: Warehouse,
    what: str,
    ref: str,
    *,
    recipe: Path | None = None,
    force: str | None = None,
) -> Promoted:
    """Publish a snapshot under `ref` if it passes the gate of a recipe.

    `recipe` is a file; None takes the one standing recipe that has a gate and releases under `ref`.
    With `force`, a reason, nothing is measured, and the ref's version says so. Raises GateError,
    EvaluationError, CommitConflictError if the ref changes meanwhile, and as `publish`.
    """
    snapshot = load_snapshot(warehouse.snapshots, snapshot_of(warehouse, what))
    if force is not None:
        reason = f"forced past the gate: {force}"
        done = publish(warehouse, snapshot.snapshot_id, ref, reason=reason, is_forced=True)
        return Promoted(done, None)
    parsed = _gated(warehouse, ref, recipe)
    refuse_kept_out(warehouse, snapshot, ref, is_guarded=True)
    folder = Path(parsed.where).resolve().parent
    judged = judge_snapshot(warehouse, parsed, folder, snapshot, ref)
    mark(warehouse, parsed.name, judged)
    refuse(judged, parsed.where, ref)
    done = publish(
        warehouse,
        snapshot.snapshot_id,
        ref,
        reason=f"promoted: the gate of {parsed.name} passed",
        expected=judged.live_version,
    )
    return Promoted(done, judged)


def _gated(warehouse: Warehouse, ref: str, recipe: Path | None) -> ParsedRecipe:
    """The recipe whose gate counts. Raises GateError where it is not one, or has none."""
    if recipe is not None:
        recipes = [load_recipe(recipe, warehouse)]
    else:
        recipes = [p for p in standing_recipes(warehouse) if p.ref == ref and p.gate is not None]
    if len(recipes) == 1 and recipes[0].gate is not None:
        return recipes[0]
    raise GateError(
        "There is no gate to pass",
        where=str(recipe or warehouse.recipes),
        expected="`gate:` in it" if recipe else f"one recipe with `gate:` and the ref {ref}",
        found="none" if recipe else ", ".join(p.where for p in recipes) or "none",
        next_step="name a recipe with --recipe FILE, or publish without a gate: "
        "`mergepipe publish`",
    )
