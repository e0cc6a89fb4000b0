"""The gate between a snapshot and its ref: measure, judge, refuse or promote.

A refused snapshot keeps its files until a collection, and a standing recipe remembers what it
refused, so that nobody asks again for the same.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe_pipeline.deploy.recipe_files import RecipeFile, standing_recipes
from mergepipe_pipeline.domain.evaluation import Evaluation, Evaluator, Metrics, Verdict
from mergepipe_pipeline.domain.snapshot import Ref, Snapshot
from mergepipe_pipeline.errors import (
    EvaluationError,
    GateError,
    MergePipeError,
    NotFoundError,
)
from mergepipe_pipeline.execution.lookup import snapshot_of
from mergepipe_pipeline.quality.evaluators import command_of, evaluator_id
from mergepipe_pipeline.quality.judge import judge
from mergepipe_pipeline.quality.measure import evaluate, kept
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.resolution.origins import folder_of
from mergepipe_pipeline.resolution.recipe_text import load_recipe
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.snapshots.stores import Marks
from mergepipe_pipeline.storage.atomic import remove_tree
from mergepipe_pipeline.storage.forms import keep_record, kept_record
from mergepipe_pipeline.verbs.publish import publish, refuse_kept_out
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Judged:
    """A snapshot that was measured, and what its recipe's gate says of it (None: there is none).

    `live` is what the ref named when the two were compared.
    """

    evaluation: Evaluation
    verdict: Verdict | None
    live: Ref | None

    @property
    def live_version(self) -> int:
        """The version of the ref that a release follows; 0 for none."""
        return 0 if self.live is None else self.live.number


@dataclass(frozen=True, slots=True)
class Refusal:
    """The candidate that a standing recipe's gate refused last: from which state, by what."""

    recipe: str
    ref: str
    wanted: str
    evaluator_id: str
    verdict: Verdict

    @property
    def summary(self) -> str:
        """Why nothing is released, in one sentence."""
        refused = _refusal_text(self.verdict, self.ref)
        return f"{refused}, until the recipe, its evaluator or an input changes"


def require_evaluator(parsed: ParsedRecipe) -> Evaluator:
    """The evaluator of a recipe. Raises EvaluationError for a recipe without one."""
    if parsed.evaluator is None:
        raise EvaluationError(
            "The recipe has no `evaluate:`",
            where=parsed.where,
            expected="how its result is measured",
            found="nothing",
            next_step="add `evaluate:` to it",
        )
    return parsed.evaluator


def refuse_unready(evaluator: Evaluator | None, relative_to: Path | None) -> Path:
    """The absolute folder of an evaluator's files: `relative_to`, or the current one.

    Raises EvaluationError where its files or programs are not there.
    """
    folder = (relative_to or Path()).resolve()
    if evaluator is not None:
        command_of(evaluator, folder)
    return folder


def measure(
    warehouse: Warehouse, snapshot: str, recipe: Path, *, fresh: bool = False
) -> Evaluation:
    """Measure a snapshot, or what a ref names, as a recipe file says; anew if `fresh`.

    Raises EvaluationError, NotFoundError, RecipeError.
    """
    evaluator = require_evaluator(load_recipe(recipe, warehouse))
    found = load_snapshot(warehouse.snapshots, snapshot_of(warehouse, snapshot))
    return evaluate(warehouse, found, evaluator, folder_of(recipe), fresh=fresh)


def judge_snapshot(
    warehouse: Warehouse, parsed: ParsedRecipe, folder: Path, snapshot: Snapshot, ref: str
) -> Judged:
    """Measure a snapshot as a recipe in `folder` says, and hold it against the recipe's gate.

    What `ref` names is measured by the same evaluator, where the gate compares with it. What was
    measured before is not measured again. Raises EvaluationError.
    """
    evaluator = require_evaluator(parsed)
    measured = evaluate(warehouse, snapshot, evaluator, folder)
    live = live_ref(warehouse, ref)
    if parsed.gate is None:
        return Judged(measured, None, live)
    before = None
    if live is not None and parsed.gate.is_relative:
        named = load_snapshot(warehouse.snapshots, live.snapshot_id)
        before = evaluate(warehouse, named, evaluator, folder)
    elif live is not None:
        before = kept(warehouse, live.snapshot_id, measured.evaluator_id)
    verdict = judge(parsed.gate, measured, before)
    if live is not None:
        since = "" if verdict.passed else _since(warehouse, live, snapshot)
        verdict = replace(verdict, live_snapshot_id=live.snapshot_id, since=since)
    return Judged(measured, verdict, live)


def _since(warehouse: Warehouse, live: Ref, snapshot: Snapshot) -> str:
    """What differs from the live snapshot; "" where that cannot be read any more."""
    # It loads pyarrow, which a gate that lets pass does without.
    from mergepipe_pipeline.quality.regression import changes_between

    with suppress(MergePipeError):
        named = load_snapshot(warehouse.snapshots, live.snapshot_id)
        return changes_between(warehouse, named, snapshot).summary
    return ""


def what_changed(warehouse: Warehouse, ref: Ref) -> str:
    """Say what a version of a ref changed since the last version of another snapshot.

    Raises CorruptionError where the version itself cannot be read.
    """
    from mergepipe_pipeline.quality.regression import changes_between

    versions = warehouse.refs.history(ref.name)
    others = [r for r in versions if r.number < ref.number and r.snapshot_id != ref.snapshot_id]
    if not others:
        return f"the first version of {ref.name}"
    now, before = load_snapshot(warehouse.snapshots, ref.snapshot_id), others[-1]
    with suppress(MergePipeError):
        one = load_snapshot(warehouse.snapshots, before.snapshot_id)
        return f"since version {before.number}: {changes_between(warehouse, one, now).what}"
    return f"version {before.number} cannot be read any more, so nothing says what changed"


def metrics_of(warehouse: Warehouse, file: RecipeFile, ref: Ref) -> Metrics:
    """The metrics of a version by the recipe's evaluator; empty where it did not, or is gone."""
    evaluator, found = file.recipe.evaluator, None
    if evaluator is not None:
        with suppress(MergePipeError):
            found = kept(warehouse, ref.snapshot_id, evaluator_id(evaluator, file.folder))
    return found.metrics if found else {}


def live_ref(warehouse: Warehouse, ref: str) -> Ref | None:
    """The current version of a ref; None for a ref without a version. Raises CorruptionError."""
    try:
        return warehouse.refs.current(ref)
    except NotFoundError:
        return None


def pass_gate(
    warehouse: Warehouse, parsed: ParsedRecipe, folder: Path, snapshot: Snapshot, ref: str
) -> Judged | None:
    """Judge a snapshot as `judge_snapshot`, and mark it; None for a recipe without an evaluator.

    Raises GateError for one that is refused, EvaluationError.
    """
    if parsed.evaluator is None:
        return None
    judged = judge_snapshot(warehouse, parsed, folder, snapshot, ref)
    mark(warehouse, parsed.name, judged)
    refuse(judged, parsed.where, ref)
    return judged


def mark(warehouse: Warehouse, recipe: str, judged: Judged) -> None:
    """Mark a snapshot as what its gate makes of it: a result, or refused by the recipe.

    A refused one goes with a collection if no ref ever named it.
    """
    verdict, marks = judged.verdict, Marks(warehouse.stages)
    if verdict is not None and verdict.passed:
        marks.accept(verdict.snapshot_id)
    elif verdict is not None:
        marks.refuse(verdict.snapshot_id, recipe, verdict.summary)


def refuse(judged: Judged, recipe: str, ref: str) -> None:
    """Raise GateError, in one sentence, for a snapshot that the gate refuses.

    `recipe` is what `bisect` takes: the name of a standing recipe, or a recipe's file.
    """
    verdict = judged.verdict
    if verdict is None or verdict.passed:
        return
    shown = verdict.snapshot_id[:16]
    raise GateError(
        _refusal_text(verdict, ref),
        where=f"gate of {recipe}",
        next_step=f"`mergepipe bisect {recipe}` finds the suspect: mend it; "
        f"`mergepipe promote {shown} --ref {ref} --force REASON` publishes it all the same",
    )


def _refusal_text(verdict: Verdict, ref: str) -> str:
    stays = "has no version yet" if verdict.live_snapshot_id is None else "stays as it is"
    since = f"; {verdict.since}" if verdict.since else ""
    return (
        f"snapshot {verdict.snapshot_id[:16]} is refused: {verdict.summary}{since}; {ref} {stays}"
    )


def judge_candidate(
    warehouse: Warehouse, file: RecipeFile, snapshot: Snapshot, wanted: str | None
) -> Judged:
    """Judge a snapshot of a standing recipe, mark it, and remember what was refused.

    `wanted` is the state that it was made from; None remembers nothing. Raises EvaluationError.
    """
    ref = file.recipe.ref
    judged = judge_snapshot(warehouse, file.recipe, file.folder, snapshot, ref)
    mark(warehouse, file.name, judged)
    if judged.verdict is None or judged.verdict.passed:
        remove_tree(warehouse.refusal_path(file.name))
    elif wanted is not None:
        by = judged.evaluation.evaluator_id
        refused = Refusal(file.name, ref, wanted, by, judged.verdict)
        keep_record(warehouse.refusal_path(file.name), refused)
    return judged


def refused_before(warehouse: Warehouse, file: RecipeFile, wanted: str) -> Refusal | None:
    """The refusal of what a standing recipe wants, if its evaluator says the same; else None.

    Raises EvaluationError.
    """
    refusal_before, evaluator = refusal(warehouse, file.name), file.recipe.evaluator
    if refusal_before is None or refusal_before.wanted != wanted or evaluator is None:
        return None
    verdict = refusal_before.verdict
    measured = kept(warehouse, verdict.snapshot_id, evaluator_id(evaluator, file.folder))
    is_same = measured is not None and all(
        measured.metrics.get(f.threshold.metric) == f.value for f in verdict.findings
    )
    return refusal_before if is_same else None


def refusal(warehouse: Warehouse, recipe: str) -> Refusal | None:
    """The last refusal of the recipe's gate; None for none, or one that cannot be read any more."""
    return kept_record(warehouse.refusal_path(recipe), Refusal)


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
    folder = folder_of(Path(parsed.where))
    require_evaluator(parsed)
    judged = pass_gate(warehouse, parsed, folder, snapshot, ref)
    done = publish(
        warehouse,
        snapshot.snapshot_id,
        ref,
        reason=f"promoted: the gate of {parsed.name} passed",
        expected=judged.live_version if judged else None,
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
