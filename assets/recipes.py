"""The asset family of one recipe: conflicts → plan → merge → snapshot → release, and a report.

Between snapshot and release stands an evaluation where the recipe asks for one; `bisect` follows a
refusal, and `on_schedule` says that a schedule passed in vain.

A factory: each recipe file of the warehouse gives its own chain, whose edge to `expert_index` names
exactly the checkpoints it uses, so that lineage and staleness in the UI are the truth.
"""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import pairwise
from typing import Any

import dagster as dg
from dagster._utils.schedules import cron_string_iterator

from mergepipe_pipeline.assets.experts import experts_used
from mergepipe_pipeline.assets.labels import asset_of, failing, labels, problem_asset
from mergepipe_pipeline.assets.layers import build_merge
from mergepipe_pipeline.assets.metadata import (
    budget_metadata,
    conflict_metadata,
    description,
    error_metadata,
    gate_metadata,
    gib,
    merge_metadata,
    metrics_metadata,
    operators_table,
    plan_metadata,
    recipe_metadata,
    report_metadata,
    stages_metadata,
    table,
)
from mergepipe_pipeline.assets.place import ALONE, Place
from mergepipe_pipeline.deploy.recipe_files import RecipeFile, recipe_files
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.selector import by_expert
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.resources import Engine, MergePipe
from mergepipe_pipeline.text import in_one_line
from mergepipe_pipeline.verbs.bisect import Traced, trace_refusal
from mergepipe_pipeline.verbs.curve import curve_of_plan
from mergepipe_pipeline.verbs.deploy import (
    audit_recipe,
    conflicts_of_recipe,
    current_plan,
    evaluate_recipe,
    excess,
    judge_recipe,
    plan_recipe,
    release_recipe,
    seconds_to_merge,
    snapshot_recipe,
)
from mergepipe_pipeline.verbs.explain import plain_name
from mergepipe_pipeline.verbs.gate import metrics_of, what_changed

#: The blocking checks of a snapshot, and what each says.
_AUDITS = {
    "every_byte_verified": (
        "Every file of the snapshot is as its manifest states; else it is not released."
    ),
    "all_finite": "No merged weight is NaN or infinite; else the snapshot is not released.",
}
#: What a scheduled run may take before its release is overdue.
GRACE = timedelta(hours=6)
_SPAN, _MOST_TIMES = timedelta(days=62), 1500


def build_recipe_assets(
    file: RecipeFile, shards: int = 1, place: Place = ALONE
) -> list[dg.AssetsDefinition | dg.AssetChecksDefinition]:
    """All assets and checks of one recipe, whose merge is split into so many steps."""
    return [
        _conflicts(file, place),
        _plan(file, place),
        _within_budget(file, place),
        *build_merge(file, shards, place),
        _snapshot(file, place),
        _audit(file, place),
        *build_evaluation(file, place),
        _release(file, place),
        *build_on_schedule(file, place),
        _report(file, place),
    ]


def _now(file: RecipeFile, mergepipe: MergePipe, place: Place) -> RecipeFile:
    """The recipe as it is: definitions of a guest stay while its selectors take others."""
    if not place.is_guest:
        return file
    return next((f for f in recipe_files(mergepipe.warehouse) if f.name == file.name), file)


def build_problem(file: RecipeFile, place: Place = ALONE) -> dg.AssetsDefinition:
    """An asset in the place of a recipe's plan that says why the recipe cannot be used."""
    return problem_asset(file, "plan", experts_used(file, place) if file.members else [], place)


def _conflicts(file: RecipeFile, place: Place) -> dg.AssetsDefinition:
    @asset_of(file, "python", "parquet", place=place, after=experts_used(file, place))
    def conflicts(mergepipe: MergePipe) -> dg.MaterializeResult[None]:
        """Says where the experts agree and where they cancel each other; no weight is read.

        From the catalog's samples, for every stage that merges into a checkpoint; results of
        earlier stages are not compared.
        Interference is 0 for deltas without a common direction, above 0 where they cancel (1: all
        of it), below 0 where they agree.
        """
        started = time.monotonic()
        reports = conflicts_of_recipe(mergepipe.warehouse, _now(file, mergepipe, place))
        return dg.MaterializeResult(
            data_version=dg.DataVersion(digest_json([[s, f.digest] for s, f in reports.items()])),
            metadata={
                **conflict_metadata(reports),
                "seconds to compare": round(time.monotonic() - started, 3),
            },
        )

    return conflicts


def _plan(file: RecipeFile, place: Place) -> dg.AssetsDefinition:
    @asset_of(
        file,
        "python",
        "json",
        place=place,
        after=["conflicts", *experts_used(file, place)],
        is_heavy=len(file.stages) > 1,
    )
    def plan(mergepipe: MergePipe, engine: Engine) -> dg.MaterializeResult[None]:
        """Decides what is read of which expert under the budget, and bounds what that loses.

        Stages before the last are merged here: what they give is what the plan reads. Below are the
        recipe, what it costs and loses, and what any other budget would.
        """
        started = time.monotonic()
        now = _now(file, mergepipe, place)
        made = plan_recipe(mergepipe.warehouse, now, budget=engine.budget)
        seconds = round(time.monotonic() - started, 3)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(made.plan_id),
            metadata={
                **recipe_metadata(now),
                **stages_metadata(now),
                **plan_metadata(made, curve_of_plan(mergepipe.warehouse, made)),
                "expected seconds to merge": seconds_to_merge(mergepipe.warehouse, made),
                "budget from": engine.budget_from(made.request.budget),
                "seconds to plan": seconds,
            },
        )

    return plan


def _within_budget(file: RecipeFile, place: Place) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=place.key(file.name, "plan"), blocking=True, name="within_budget")
    @place.bound
    @failing()
    def within_budget(mergepipe: MergePipe) -> dg.AssetCheckResult:
        """The plan reads no more of the experts than the budget allows; else nothing is merged."""
        plan = current_plan(mergepipe.warehouse, file.name)
        problem, nbytes = excess(plan), plan.estimates.expert_bytes_planned
        kept = f"{nbytes} bytes of experts are read: the budget allows them."
        return dg.AssetCheckResult(
            passed=problem is None,
            description=description(problem or kept),
            metadata=budget_metadata(plan),
        )

    return within_budget


def _snapshot(file: RecipeFile, place: Place) -> dg.AssetsDefinition:
    @asset_of(
        file, "huggingface", "safetensors", place=place, after=["plan", "merge"], is_heavy=True
    )
    def snapshot(mergepipe: MergePipe, engine: Engine) -> dg.MaterializeResult[None]:
        """Makes the merged model: a folder that transformers loads, and that never changes.

        It appears whole, by one rename. The checks read each of its bytes before it is released.
        """
        made, cost = snapshot_recipe(mergepipe.warehouse, file.name, engine.options)
        plan = current_plan(mergepipe.warehouse, file.name)
        selectors = by_expert(plan.request.selected)
        inputs = [
            (i.role, plain_name(i.name), i.content_sha256[:16], selectors.get(i.name, ""))
            for i in made.manifest.inputs
        ]
        return dg.MaterializeResult(
            data_version=dg.DataVersion(made.snapshot_id),
            metadata={
                "snapshot id": made.snapshot_id,
                "path": dg.MetadataValue.path(made.path),
                "manifest": dg.MetadataValue.path(made.manifest_path),
                "GiB": gib(sum(s.nbytes for s in made.manifest.shards)),
                **merge_metadata(cost, cost.layers_s),
                **error_metadata(plan),
                "plan id": plan.plan_id,
                "operators": operators_table(plan),
                "inputs": table(("role", "name", "content sha256", "selector"), inputs),
            },
        )

    return snapshot


def _audit(file: RecipeFile, place: Place) -> dg.AssetChecksDefinition:
    key = place.key(file.name, "snapshot")
    specs = [
        dg.AssetCheckSpec(name, asset=key, blocking=True, description=text)
        for name, text in _AUDITS.items()
    ]

    # A person may have each of them run alone, at any time.
    @dg.multi_asset_check(
        name=place.name(f"{file.identifier}__audit"), specs=specs, can_subset=True
    )
    @place.bound
    def audit(
        context: dg.AssetCheckExecutionContext, mergepipe: MergePipe
    ) -> Iterator[dg.AssetCheckResult]:
        """Reads every byte of the snapshot once."""
        selected = {key.name for key in context.selected_asset_check_keys}
        with failing():
            yield from (r for r in _audited(mergepipe, file) if r.check_name in selected)

    return audit


def _audited(mergepipe: MergePipe, file: RecipeFile) -> Iterator[dg.AssetCheckResult]:
    whole, finite = _AUDITS
    try:
        audited, weights = audit_recipe(mergepipe.warehouse, file.name)
    except CorruptionError as error:
        said = description(str(error))
        yield dg.AssetCheckResult(check_name=whole, passed=False, description=said)
        yield dg.AssetCheckResult(check_name=finite, passed=False, description=said)
        return
    yield dg.AssetCheckResult(
        check_name=whole,
        passed=True,
        description="Each file has the bytes that the manifest states.",
        metadata={"files": audited.files, "GiB": gib(audited.nbytes)},
    )
    yield dg.AssetCheckResult(
        check_name=finite,
        passed=not audited.non_finite,
        description=description(weights),
        metadata={"tensors": in_one_line(", ".join(audited.non_finite)) or "none"},
    )


def build_evaluation(
    file: RecipeFile, place: Place
) -> list[dg.AssetsDefinition | dg.AssetChecksDefinition]:
    """The asset `evaluation` of a recipe and its check `gate`, where the recipe asks for them."""
    if file.recipe.evaluator is None:
        return []
    return [
        _evaluation(file, place),
        *([_gate(file, place)] if file.recipe.gate is not None else []),
    ]


def _evaluation(file: RecipeFile, place: Place) -> dg.AssetsDefinition:
    @asset_of(file, "python", place=place, after=["snapshot"])
    def evaluation(mergepipe: MergePipe) -> dg.MaterializeResult[None]:
        """Measures the snapshot as the recipe's `evaluate:` says; each metric has a plot.

        A snapshot is measured once; what was measured is kept with the evaluator's log.
        """
        measured, log = evaluate_recipe(mergepipe.warehouse, _now(file, mergepipe, place))
        return dg.MaterializeResult(
            data_version=dg.DataVersion(f"{measured.snapshot_id}-{measured.evaluator_id}"),
            metadata={
                "snapshot id": measured.snapshot_id,
                "evaluator": measured.evaluator,
                "log": dg.MetadataValue.path(str(log)),
                "measured": measured.created,
                "seconds to evaluate": measured.seconds,
                **metrics_metadata(measured.metrics),
            },
        )

    return evaluation


def _gate(file: RecipeFile, place: Place) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=place.key(file.name, "evaluation"), blocking=True, name="gate")
    @place.bound
    @failing()
    def gate(mergepipe: MergePipe) -> dg.AssetCheckResult:
        """The metrics are what the recipe's `gate:` asks for; else the ref stays as it is."""
        verdict = judge_recipe(mergepipe.warehouse, _now(file, mergepipe, place)).verdict
        assert verdict is not None
        sentences = [verdict.summary, verdict.since, "" if verdict.passed else _next(file)]
        return dg.AssetCheckResult(
            passed=verdict.passed,
            description=description("; ".join(filter(None, sentences))),
            metadata={
                **gate_metadata(verdict),
                "snapshot id": verdict.snapshot_id,
                "live snapshot id": verdict.live_snapshot_id or "none",
            },
        )

    return gate


def _next(file: RecipeFile) -> str:
    """What a person does, or need not do, about a refusal."""
    gate = file.recipe.gate
    if gate is not None and gate.on_failure == "bisect":
        return "next: the bisect sensor finds the suspect and keeps it out until it changes"
    return f"next: mend what changed, or find the suspect: `mergepipe bisect {file.name}`"


def _release(file: RecipeFile, place: Place) -> dg.AssetsDefinition:
    @asset_of(
        file,
        "json",
        place=place,
        after=["snapshot" if file.recipe.evaluator is None else "evaluation"],
    )
    def release(
        context: dg.AssetExecutionContext, mergepipe: MergePipe
    ) -> dg.MaterializeResult[None]:
        """Publishes the snapshot under the recipe's ref, which readers load, after auditing it.

        A recipe's gate decides here, too, whoever starts this alone.

        `mergepipe rollback` brings back the version before.
        """
        now = _now(file, mergepipe, place)
        ref, done = release_recipe(mergepipe.warehouse, now)
        if file.recipe.schedule is not None:
            context.log_event(dg.AssetMaterialization(on_schedule_key(file.name, place)))
        plan = current_plan(mergepipe.warehouse, file.name)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(ref.snapshot_id),
            metadata={
                "what changed": in_one_line(what_changed(mergepipe.warehouse, ref)),
                **metrics_metadata(metrics_of(mergepipe.warehouse, now, ref)),
                **budget_metadata(plan),
                "ref": ref.name,
                "ref version": ref.number,
                "snapshot": dg.MetadataValue.asset(place.key(file.name, "snapshot")),
                "snapshot id": ref.snapshot_id,
                "path": dg.MetadataValue.path(str(mergepipe.warehouse.snapshots / ref.snapshot_id)),
                "releases of this recipe": done.sequence,
            },
        )

    return release


def _report(file: RecipeFile, place: Place) -> dg.AssetsDefinition:
    @asset_of(file, "markdown", place=place, after=["release"])
    def report(mergepipe: MergePipe) -> dg.MaterializeResult[None]:
        """Says how much of which expert went into each layer of what is released."""
        plan = current_plan(mergepipe.warehouse, file.name)
        return dg.MaterializeResult(
            metadata={
                **report_metadata(plan),
                "plan": dg.MetadataValue.asset(place.key(file.name, "plan")),
                "plan id": plan.plan_id,
            }
        )

    return report


def is_traced(file: RecipeFile) -> bool:
    """Whether the recipe says `on_failure: bisect`."""
    gate = file.recipe.gate
    return gate is not None and gate.on_failure == "bisect"


def build_bisect(file: RecipeFile, place: Place = ALONE) -> list[dg.AssetsDefinition]:
    """The asset `bisect` of a recipe that has its refusals traced."""
    if not is_traced(file):
        return []

    @asset_of(file, "python", place=place, after=["evaluation"], is_heavy=True)
    def bisect(
        context: dg.AssetExecutionContext, mergepipe: MergePipe, engine: Engine
    ) -> dg.MaterializeResult[None]:
        """Finds which expert made the refused snapshot worse, and quarantines its content.

        Recipes that name the expert wait then, and what is live stays; another version of it is
        merged by itself. Not part of the recipe's own job: bisect_sensor starts it.
        """
        traced = trace_refusal(
            mergepipe.warehouse,
            _now(file, mergepipe, place),
            options=engine.options,
            tell=context.log.info,
        )
        return dg.MaterializeResult(metadata=_traced_metadata(traced))

    return [bisect]


def build_bisect_job(file: RecipeFile, place: Place = ALONE) -> Any | None:
    """The job that traces a recipe's refusals; None for a recipe that asks for nothing."""
    if not is_traced(file):
        return None
    return dg.define_asset_job(
        place.name(f"bisect_{file.identifier}"),
        selection=dg.AssetSelection.assets(place.key(file.name, "bisect")),
        description=f"Finds the expert that made {file.name} fail its gate, and quarantines it.",
        tags={"mergepipe/recipe": file.name, **place.tags},
        executor_def=place.running.executor,
    )


def _traced_metadata(traced: Traced | None) -> dict[str, Any]:
    if traced is None:
        return {"found": "nothing is refused at present"}
    done, regression = traced.bisection, traced.prepared.regression
    rows = [
        (
            ", ".join(map(plain_name, c.undone)),
            "all" if c.layers is None else ", ".join(c.layers),
            "yes" if c.passed else "no",
            in_one_line(c.summary),
        )
        for c in done.candidates
    ]
    return {
        "found": in_one_line(done.summary),
        "quarantined": traced.quarantine.name if traced.quarantine else "none",
        "refused": in_one_line(done.verdict),
        "changed": in_one_line(regression.changes.summary),
        "cost at most": traced.prepared.cost.summary,
        "candidates": table(("undone", "in layers", "passes", "the gate says"), rows),
        "refused snapshot id": done.refused,
        "live snapshot id": done.live,
    }


def build_on_schedule(file: RecipeFile, place: Place) -> list[dg.AssetsDefinition]:
    """The asset that is overdue if a recipe's schedule passed in vain; none without a schedule.

    Without a schedule age says nothing: a release is right for as long as its inputs are the same,
    and `recipe_sensor` says each time whether they are. With one, each of its times either releases
    or confirms what is released. A confirmation is no event of the release, or what somebody makes
    from that would be made anew each night.
    """
    schedule = file.recipe.schedule
    if schedule is None:
        return []
    pause = _longest_pause(schedule, file.recipe.timezone or "UTC")
    spec = dg.AssetSpec(
        on_schedule_key(file.name, place),
        deps=[place.key(file.name, "release")],
        description="Shows when this recipe was last released, or its schedule found the release "
        "current; it is overdue if neither happened in time.",
        freshness_policy=dg.FreshnessPolicy.time_window(
            fail_window=pause + GRACE, warn_window=pause + GRACE / 3
        ),
        **labels(file, "clock", place=place),
    )
    return [dg.AssetsDefinition(specs=[spec])]


def on_schedule_key(recipe: str, place: Place = ALONE) -> dg.AssetKey:
    """The key of that asset."""
    return place.key(recipe, "on_schedule")


@cache
def _longest_pause(schedule: str, zone: str) -> timedelta:
    """Between two times of a cron schedule, of those of two months, or of the next three."""
    start = datetime.now(UTC)
    times: list[datetime] = []
    for at in cron_string_iterator(start.timestamp(), schedule, zone):
        times.append(at)
        if len(times) >= 3 and (at - start > _SPAN or len(times) == _MOST_TIMES):
            break
    return max(b - a for a, b in pairwise(times))
