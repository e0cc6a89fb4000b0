"""The verb `bisect`: which expert, and which layers of it, made a recipe's result worse.

Its cost is known before it begins (`prepare`), and it publishes nothing. A standing pipeline has
each refusal traced once (`trace_refusal`), and keeps the suspect out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mergepipe_pipeline.deploy.recipe_files import RecipeFile, recipe_files
from mergepipe_pipeline.deploy.recorded import reason_to_wait_for
from mergepipe_pipeline.deploy.standing import wanted
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.evaluation import Gate
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import GateError, NotFoundError
from mergepipe_pipeline.execution.stages import plan_in_stages
from mergepipe_pipeline.facts.quarantine import Quarantine, decide
from mergepipe_pipeline.quality.bisection import Bisection, Prepared, Tell, bisect, cost_of
from mergepipe_pipeline.quality.measure import evaluate
from mergepipe_pipeline.quality.regression import regression_of
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.resolution.recipe_text import load_recipe
from mergepipe_pipeline.snapshots.find import list_snapshots, load_snapshot
from mergepipe_pipeline.storage.forms import keep_record, kept_record
from mergepipe_pipeline.verbs.deploy import current_snapshot
from mergepipe_pipeline.verbs.gate import Refusal, refused_before, require_evaluator
from mergepipe_pipeline.warehouse import Warehouse

__all__ = ["MOST", "Bisection", "Prepared", "Tell", "bisect", "prepare", "prepare_snapshots"]

#: Candidates that are evaluated at most, unless somebody says otherwise.
MOST = 20


def prepare(
    warehouse: Warehouse, what: str, *, metric: str | None = None, most: int = MOST
) -> Prepared:
    """Prepare tracing a standing recipe, its ref, or a recipe file that was merged.

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
    """Prepare tracing two snapshots of a recipe that lies in `folder`."""
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
            expected=", ".join(file.name for file in files)
            or "a recipe's name, its ref, or the path of its file",
            found=repr(what),
            next_step="give the file of the recipe",
        )
    file = matching[0]
    return file.recipe, file.folder, current_snapshot(warehouse, file.name)


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
    version = warehouse.refs.current(ref)
    if version.snapshot_id == refused.snapshot_id:
        version = warehouse.refs.target(ref, None)
    return load_snapshot(warehouse.snapshots, version.snapshot_id)


@dataclass(frozen=True)
class Traced:
    """The cause of a refusal; `quarantine` is None where no single expert is to blame."""

    prepared: Prepared
    bisection: Bisection
    quarantine: Quarantine | None


@dataclass(frozen=True)
class _Record:
    """Which refusal of a standing recipe was traced last, and to what."""

    token: str
    bisection: dict[str, Any]


def trace_due(warehouse: Warehouse, file: RecipeFile) -> str | None:
    """A token of the refusal that is to be traced now; None for none, and for one that was.

    What a record that cannot be read says is traced again, from what is kept.
    """
    refusal = _refusal_now(warehouse, file)
    if refusal is None or refusal.verdict.live_snapshot_id is None:
        return None
    if reason_to_wait_for(warehouse, file.members) is not None:
        return None  # an input is newer than the refusal, or its expert is kept out already
    token = _token(refusal)
    last = kept_record(warehouse.bisection_path(file.name), _Record)
    return None if last is not None and last.token == token else token


def trace_refusal(
    warehouse: Warehouse,
    file: RecipeFile,
    *,
    options: EngineOptions | None = None,
    tell: Tell = lambda _: None,
) -> Traced | None:
    """Bisect what the recipe's gate refused, and quarantine the suspect's content.

    Its layers are left to `mergepipe bisect`: they take most of the candidates, and the next
    version waits for the end. None where nothing is refused at present. Raises what bisecting
    raises.
    """
    refusal = _refusal_now(warehouse, file)
    if refusal is None or refusal.verdict.live_snapshot_id is None:
        return None
    refused, live = (
        load_snapshot(warehouse.snapshots, snapshot_id)
        for snapshot_id in (refusal.verdict.snapshot_id, refusal.verdict.live_snapshot_id)
    )
    prepared = prepare_snapshots(
        warehouse,
        file.recipe,
        file.folder,
        live=live,
        refused=refused,
        most=MOST,
        layers=False,
    )
    tell(f"at most {prepared.cost.summary}")
    done = bisect(warehouse, prepared, options=options, tell=tell)
    kept_out = _keep_out(warehouse, prepared, done)
    record = _Record(_token(refusal), done.to_json())
    keep_record(warehouse.bisection_path(file.name), record)
    return Traced(prepared, done, kept_out)


def _keep_out(warehouse: Warehouse, prepared: Prepared, done: Bisection) -> Quarantine | None:
    suspect = next((s for s in prepared.regression.suspects if s.name == done.suspect), None)
    if suspect is None:
        return None
    reason = f"the gate of {done.recipe} refuses what it gives: {done.verdict}; {done.summary}"
    by = f"recipe {done.recipe}"
    return decide(warehouse, suspect.name, suspect.content, reason, is_kept_out=True, by=by)


def _refusal_now(warehouse: Warehouse, file: RecipeFile) -> Refusal | None:
    """The refusal of what the recipe wants now, if it asks for a bisection then."""
    if file.parsed is None or file.parsed.gate is None or file.parsed.gate.on_failure != "bisect":
        return None
    state = wanted(warehouse, file)
    return None if state is None else refused_before(warehouse, file, state)


def _token(refusal: Refusal) -> str:
    verdict = refusal.verdict
    return digest_json([verdict.snapshot_id, verdict.live_snapshot_id, refusal.evaluator_id])[:16]
