"""The verb `bisect`: which expert, and which layers of it, made a recipe's result worse.

Its cost is known before it begins (`prepare`), and it publishes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.domain.evaluation import Gate
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.errors import GateError, NotFoundError
from mergepipe_pipeline.execution.stages import plan_in_stages
from mergepipe_pipeline.quality.bisection import Bisection, Prepared, Tell, bisect, cost_of
from mergepipe_pipeline.quality.measure import evaluate
from mergepipe_pipeline.quality.regression import regression_of
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.resolution.recipe_text import load_recipe
from mergepipe_pipeline.snapshots.find import list_snapshots, load_snapshot
from mergepipe_pipeline.verbs.deploy import current_snapshot
from mergepipe_pipeline.verbs.gate import require_evaluator
from mergepipe_pipeline.warehouse import Warehouse

__all__ = ["MOST", "Bisection", "Prepared", "Tell", "bisect", "prepare", "prepare_snapshots"]

#: Candidates that are evaluated at most, unless somebody says otherwise.
MOST = 20


def prepare(
    warehouse: Warehouse, what: str, *, metric: str | None = None, most: int = MOST
) -> Prepared:
    """What tracing takes: of a standing recipe, its ref, or a recipe file that was merged.

    The snapshot that the recipe gives is traced beside what its ref names, or named before if the
    snapshot was published all the same. `metric` is the one that counts, all of the gate without.
    Measures the refused snapshot, if nobody has. Raises NotFoundError, GateError, EvaluationError.
    """
    parsed, folder, refused = _subject(warehouse, what)
    live = _live(warehouse, parsed.ref, refused)
    return prepare_snapshots(
        warehouse, parsed, folder, live=live, refused=refused, metric=metric, most=most
    )


def prepare_snapshots(
    warehouse: Warehouse,
    parsed: ParsedRecipe,
    folder: Path,
    *,
    live: Snapshot,
    refused: Snapshot,
    metric: str | None = None,
    most: int = MOST,
    layers: bool = True,
) -> Prepared:
    """As `prepare`, of two snapshots of a recipe that lies in `folder`."""
    gate, evaluator = _gate(parsed, metric), require_evaluator(parsed)
    regression = regression_of(warehouse, folder, live, refused)
    evaluation_s = evaluate(warehouse, refused, evaluator, folder).seconds
    cost = cost_of(warehouse, regression, most, evaluation_s, layers=layers)
    return Prepared(regression, evaluator, gate, most, layers, cost)


def _gate(parsed: ParsedRecipe, metric: str | None) -> Gate:
    """The recipe's gate, or what of it is about one metric. Raises GateError."""
    metrics = list(dict.fromkeys(t.metric for t in parsed.gate.thresholds)) if parsed.gate else []
    if parsed.gate is None or metric not in (None, *metrics):
        raise GateError(
            "There is nothing that tells better from worse",
            where=parsed.where,
            expected=f"a threshold for {metric}" if metric else "`gate:` in the recipe",
            found=", ".join(metrics) or "none",
            next_step="name a metric of the gate" if metrics else "add `gate:` to the recipe",
        )
    asked = (t for t in parsed.gate.thresholds if metric in (None, t.metric))
    return replace(parsed.gate, thresholds=tuple(asked))


def _subject(warehouse: Warehouse, what: str) -> tuple[ParsedRecipe, Path, Snapshot]:
    """The recipe that is meant, its folder, and the snapshot that it gave last."""
    path = Path(what)
    if path.suffix in {".yml", ".yaml"} and path.parent.resolve() != warehouse.recipes:
        parsed, folder = load_recipe(path, warehouse), path.resolve().parent
        return parsed, folder, _merged(warehouse, parsed, folder)
    wanted = path.stem if path.suffix in {".yml", ".yaml"} else what
    files = [file for file in recipe_files(warehouse) if file.parsed is not None]
    matching = [c for c in files if c.name == wanted] or [
        c for c in files if c.recipe.ref == wanted
    ]
    if not matching:
        raise NotFoundError(
            "No standing recipe has this name or publishes under this ref",
            where=str(warehouse.recipes),
            expected=", ".join(file.name for file in files) or "none is there",
            found=repr(what),
            next_step="give the file of the recipe",
        )
    return matching[0].recipe, warehouse.recipes, current_snapshot(warehouse, matching[0].name)


def _merged(warehouse: Warehouse, parsed: ParsedRecipe, folder: Path) -> Snapshot:
    """The snapshot of a recipe file as its inputs are now."""
    plan = plan_in_stages(warehouse, parsed, relative_to=folder)
    for snapshot in list_snapshots(warehouse.snapshots):
        if snapshot.manifest.plan_id == plan.plan_id:
            return snapshot
    raise NotFoundError(
        "The recipe was not merged as its inputs are now",
        where=parsed.where,
        expected=f"a snapshot of plan {plan.plan_id[:16]}",
        found="none",
        next_step=f"run `mergepipe merge {parsed.where}` first",
    )


def _live(warehouse: Warehouse, ref: str, refused: Snapshot) -> Snapshot:
    """What a ref names; what it named before, if that is the snapshot in question."""
    version = warehouse.refs.current(ref)
    if version.snapshot_id == refused.snapshot_id:
        version = warehouse.refs.target(ref, None)
    return load_snapshot(warehouse.snapshots, version.snapshot_id)
