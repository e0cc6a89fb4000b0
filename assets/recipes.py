"""The asset family of one recipe: conflicts → plan → merge → snapshot → release, and a report.

A factory: each recipe file of the warehouse gives its own chain, whose edge to `expert_index` names
exactly the checkpoints it uses, so that lineage and staleness in the UI are the truth.
"""

import time
from collections.abc import Iterator

import dagster as dg

from assets.experts import expert_index
from assets.failures import told
from assets.labels import labels, owners
from assets.layers import build_merge
from assets.metadata import (
    MIB,
    conflict_metadata,
    description,
    error_metadata,
    markdown_table,
    operators_table,
    plain_name,
    plan_metadata,
    stages_metadata,
)
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.pipeline.audit import audit_snapshot, is_over_budget
from mergepipe_pipeline.pipeline.cards import RecipeCard
from mergepipe_pipeline.pipeline.curve import curve_of_plan
from mergepipe_pipeline.pipeline.deploy import (
    conflicts_of_recipe,
    current_plan,
    current_snapshot,
    plan_recipe,
    release_recipe,
    snapshot_recipe,
)
from mergepipe_pipeline.pipeline.forecast import forecast_plan
from mergepipe_pipeline.pipeline.inspect import shares
from mergepipe_pipeline.resources import Engine, MergePipe
from mergepipe_pipeline.text import in_one_line, markdown, visible

#: The tag of a run that planned with another budget than the recipe's.
BUDGET_TAG = "mergepipe/budget"
#: The blocking checks of a snapshot, and what each says.
_AUDITS = {
    "every_byte_verified": "Every file of the snapshot has the digest that its manifest states.",
    "all_finite": "No merged weight is NaN or infinite.",
}


def build_recipe_assets(card: RecipeCard) -> list[dg.AssetsDefinition | dg.AssetChecksDefinition]:
    """All assets and checks of one recipe."""
    return [
        _conflicts(card),
        _plan(card),
        _within_budget(card),
        *build_merge(card),
        _snapshot(card),
        _audit(card),
        _release(card),
        _report(card),
    ]


def build_problem(card: RecipeCard) -> dg.AssetsDefinition:
    """An asset in the place of a recipe's plan that says why the recipe cannot be used."""
    spec = dg.AssetSpec(
        [card.name, "plan"],
        deps=[_members(card)] if card.members else [],
        description=description(card.problem or ""),
        metadata={"problem": dg.MetadataValue.text(visible(card.problem or ""))},
        group_name=card.identifier,
        owners=owners(),
        kinds={"problem"},
    )
    return dg.AssetsDefinition(specs=[spec])


def _members(card: RecipeCard) -> dg.AssetDep:
    mapping = dg.SpecificPartitionsPartitionMapping(list(card.members))
    return dg.AssetDep(expert_index, partition_mapping=mapping)


def _conflicts(card: RecipeCard) -> dg.AssetsDefinition:
    @dg.asset(
        key=[card.name, "conflicts"],
        deps=[_members(card)],
        **labels(card, "python", "parquet"),
    )
    @told
    def conflicts(mergepipe: MergePipe) -> dg.MaterializeResult[None]:
        """How the experts' deltas agree and differ, from catalog sketches: no weight is read.

        Of every stage that merges into a checkpoint; results of earlier stages are not compared.
        Interference is 0 for deltas without a common direction, above 0 where they cancel (1: all
        of it), below 0 where they agree.
        """
        started = time.monotonic()
        found = conflicts_of_recipe(mergepipe.warehouse, card)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(digest_json([[s, f.digest] for s, f in found.items()])),
            metadata={
                **conflict_metadata(found),
                "seconds": round(time.monotonic() - started, 3),
            },
        )

    return conflicts


def _plan(card: RecipeCard) -> dg.AssetsDefinition:
    @dg.asset(
        key=[card.name, "plan"],
        deps=[[card.name, "conflicts"], _members(card)],
        pool="disk_write" if len(card.stages) > 1 else None,
        **labels(card, "python", "json"),
    )
    @told
    def plan(
        context: dg.AssetExecutionContext, mergepipe: MergePipe, engine: Engine
    ) -> dg.MaterializeResult[None]:
        """What will be read of which expert under the budget, and the bound on what that costs.

        Stages before the last are merged here: what they give is what the plan reads.
        """
        started = time.monotonic()
        if engine.budget is not None:
            context.instance.add_run_tags(context.run_id, {BUDGET_TAG: engine.budget})
        made = plan_recipe(mergepipe.warehouse, card, budget=engine.budget)
        seconds = round(time.monotonic() - started, 3)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(made.plan_id),
            metadata={
                **stages_metadata(card.stages),
                **plan_metadata(made, curve_of_plan(mergepipe.warehouse, made)),
                "predicted_time": forecast_plan(mergepipe.warehouse, made).to_json(),
                "budget_from": "the recipe" if made.request.budget is None else "the run",
                "seconds": seconds,
            },
        )

    return plan


def _within_budget(card: RecipeCard) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=dg.AssetKey([card.name, "plan"]), blocking=True, name="within_budget")
    @told
    def within_budget(mergepipe: MergePipe) -> dg.AssetCheckResult:
        """The plan buys no more expert bytes than the budget."""
        plan = current_plan(mergepipe.warehouse, card.name)
        e = plan.estimates
        return dg.AssetCheckResult(
            passed=not is_over_budget(plan),
            metadata={
                "planned_bytes": e.expert_bytes_planned,
                "budget_bytes": str(e.budget_bytes or "unlimited"),
            },
        )

    return within_budget


def _snapshot(card: RecipeCard) -> dg.AssetsDefinition:
    @dg.asset(
        key=[card.name, "snapshot"],
        deps=[[card.name, "plan"], [card.name, "merge"]],
        pool="disk_write",
        **labels(card, "huggingface", "safetensors"),
    )
    @told
    def snapshot(mergepipe: MergePipe) -> dg.MaterializeResult[None]:
        """The immutable Hugging Face folder of the merged layers, committed by one rename."""
        made, cost = snapshot_recipe(mergepipe.warehouse, card.name)
        plan = current_plan(mergepipe.warehouse, card.name)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(made.snapshot_id),
            metadata={
                "snapshot_id": made.snapshot_id,
                "path": dg.MetadataValue.path(made.path),
                "mib": round(sum(s.nbytes for s in made.manifest.shards) / MIB, 3),
                "layers_reused": cost.layers_reused,
                "layers_executed": cost.layers_executed,
                "expert_mib_read": round(cost.expert_bytes_read / MIB, 3),
                "base_mib_read": round(cost.base_bytes_read / MIB, 3),
                "mib_written": round(cost.bytes_written / MIB, 3),
                "layers_seconds": cost.layers_s,
                **error_metadata(plan),
                "plan_id": plan.plan_id,
                "operators": operators_table(plan),
                "inputs": markdown_table(
                    ("role", "name", "content sha256"),
                    [
                        (i.role, plain_name(i.name), i.content_sha256[:16])
                        for i in made.manifest.inputs
                    ],
                ),
            },
        )

    return snapshot


def _audit(card: RecipeCard) -> dg.AssetChecksDefinition:
    key = dg.AssetKey([card.name, "snapshot"])
    specs = [
        dg.AssetCheckSpec(name, asset=key, blocking=True, description=text)
        for name, text in _AUDITS.items()
    ]

    @dg.multi_asset_check(name=f"{card.identifier}__audit", specs=specs)
    @told
    def audit(mergepipe: MergePipe) -> Iterator[dg.AssetCheckResult]:
        """Reads every byte of the snapshot once."""
        home = mergepipe.warehouse
        whole, finite = _AUDITS
        try:
            found = audit_snapshot(home, card.name, current_snapshot(home, card.name), anew=True)
        except CorruptionError as error:
            told = markdown(str(error))
            yield dg.AssetCheckResult(check_name=whole, passed=False, description=told)
            yield dg.AssetCheckResult(check_name=finite, passed=False, description=told)
            return
        yield dg.AssetCheckResult(
            check_name=whole, passed=True, metadata={"files": found.files, "bytes": found.nbytes}
        )
        yield dg.AssetCheckResult(
            check_name=finite,
            passed=not found.non_finite,
            description=f"NaN or infinity: {markdown(found.told)}" if found.non_finite else None,
            metadata={"tensors": in_one_line(", ".join(found.non_finite)) or "none"},
        )

    return audit


def _release(card: RecipeCard) -> dg.AssetsDefinition:
    @dg.asset(
        key=[card.name, "release"],
        deps=[[card.name, "snapshot"]],
        **labels(card, "json"),
    )
    @told
    def release(mergepipe: MergePipe) -> dg.MaterializeResult[None]:
        """The ref that names the audited snapshot: what readers load."""
        ref, done = release_recipe(mergepipe.warehouse, card)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(ref.snapshot_id),
            metadata={
                "ref": ref.name,
                "ref_version": ref.number,
                "snapshot_id": ref.snapshot_id,
                "path": dg.MetadataValue.path(str(mergepipe.warehouse.snapshots / ref.snapshot_id)),
                "releases_of_this_recipe": done.sequence,
            },
        )

    return release


def _report(card: RecipeCard) -> dg.AssetsDefinition:
    @dg.asset(
        key=[card.name, "report"],
        deps=[[card.name, "release"]],
        **labels(card, "markdown"),
    )
    @told
    def report(mergepipe: MergePipe) -> dg.MaterializeResult[None]:
        """Which bytes of which expert went into each layer of what is released now."""
        plan = current_plan(mergepipe.warehouse, card.name)
        rows = [
            (s.place, plain_name(s.expert), s.nbytes_total, s.nbytes_read, s.nbytes_known_zero)
            for s in shares(plan, "layer")
        ]
        headers = ("layer", "expert", "bytes", "bytes read", "bytes known zero")
        return dg.MaterializeResult(
            metadata={"by_layer": markdown_table(headers, rows), **plan_metadata(plan)}
        )

    return report
