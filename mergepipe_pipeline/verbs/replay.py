"""The verb `replay`: execute a snapshot's merge again, from what it says of itself, compare bits.

Recipe, budget and inputs are those of manifest and provenance, so that a snapshot's folder can be
replayed wherever its inputs are. Everything is made anew in a warehouse of its own: nothing that
the catalog or the action cache of this one believes takes part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.plan import ENGINE_VERSION, MergePlan
from mergepipe_pipeline.domain.recipe import pairs_of
from mergepipe_pipeline.domain.request import Request, RequestedModel
from mergepipe_pipeline.domain.snapshot import Manifest, Snapshot
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import (
    CheckpointChangedError,
    CorruptionError,
    MergePipeError,
    NotFoundError,
)
from mergepipe_pipeline.execution.lookup import provenance_of, snapshot_named
from mergepipe_pipeline.execution.plan_leases import scratch
from mergepipe_pipeline.execution.planning import StageResults, plan_resolved
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.execution.stages import run_stages
from mergepipe_pipeline.facts.contents import Contents
from mergepipe_pipeline.facts.offline import present_root
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.recipe.selectors import Recorded
from mergepipe_pipeline.resolution.open_models import packable
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import ResolvedRecipe, resolve_stage
from mergepipe_pipeline.storage.forms import record_of
from mergepipe_pipeline.verbs.pack import repack
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Replayed:
    """A merge that gave the same bits again; `inputs` are (name, the folder that was read)."""

    snapshot_id: str
    layers: int
    tensors: int
    nbytes: int
    inputs: tuple[tuple[str, str], ...]


def replay(
    warehouse: Warehouse,
    what: str,
    *,
    inputs: Mapping[str, str] | None = None,
    keep: Path | None = None,
    options: EngineOptions | None = None,
    progress: Progress | None = None,
) -> Replayed:
    """Merge again what gave a snapshot (named as `snapshot_named` says) and compare the results.

    An input is looked for where `inputs` says by its name, where this warehouse knows the name, and
    where it was; it must have the content that was merged. `keep`: the folder of the new warehouse,
    which otherwise is removed: one in staging, or, where this one cannot be written, in TMPDIR.

    Raises CheckpointChangedError or NotFoundError for an input that is not to be had,
    StorageFullError without room for the result, CorruptionError naming the first layer, tensor or
    file that differs.
    """
    snapshot = snapshot_named(warehouse, what)
    provenance = provenance_of(snapshot)
    request = _request(snapshot, provenance)
    _refuse_unknown(inputs or {}, request)
    parsed = parse(
        str(provenance["recipe"]),
        name=str(provenance["recipe_name"]),
        where=snapshot.path,
        choose=Recorded(request.selected),
        lenient=request.lenient,
    )
    shards = snapshot.manifest.shards
    with scratch(warehouse, keep, sum(s.nbytes for s in shards)) as anew:
        inputs_by_text = _inputs(warehouse, anew, request, inputs or {}, progress)
        plan = _plan(anew, parsed, request, inputs_by_text, progress)
        made = run_plan(anew, plan, options=options, progress=progress).snapshot
        _compare(anew, snapshot, made, str(provenance.get("engine_version", ENGINE_VERSION)))
    return Replayed(
        snapshot.snapshot_id,
        len(shards),
        sum(len(s.tensors) for s in shards),
        sum(s.nbytes for s in shards),
        tuple({c.name: c.root for c in inputs_by_text.values()}.items()),
    )


def _request(snapshot: Snapshot, provenance: Mapping[str, Any]) -> Request:
    if "request" not in provenance:
        verb = provenance.get("made_by", {}).get("verb", "of another version")
        raise NotFoundError(
            "No recipe made this snapshot",
            where=snapshot.path,
            expected="the snapshot of a merge",
            found=f"one that `mergepipe {verb}` made",
            next_step="run that command again: `made_by` in provenance.json has its parameters",
        )
    return record_of(Request, provenance["request"])


def _refuse_unknown(given: Mapping[str, str], request: Request) -> None:
    names = dict.fromkeys(m.name for m in request.models)
    for name in given:
        if name not in names:
            raise NotFoundError(
                "The merge has no input of this name",
                where="--input",
                expected=", ".join(names),
                found=name,
                next_step="correct the name",
            )


def _plan(
    anew: Warehouse,
    parsed: ParsedRecipe,
    request: Request,
    inputs: Mapping[str, Checkpoint],
    progress: Progress | None,
) -> MergePlan:
    """The plan of the last stage; those before it are merged now."""

    def resolve_next(stage: ParsedRecipe, stages: StageResults) -> ResolvedRecipe:
        known = {**inputs, **stages.checkpoints}
        resolved = resolve_stage(anew, stage, known, request=request)
        _repack(anew, resolved, request.packs, progress)
        return resolved

    stages = run_stages(anew, parsed, resolve_next, progress)
    return plan_resolved(anew, stages.before(resolve_next(parsed, stages)), stages, progress)


def _repack(
    anew: Warehouse, resolved: ResolvedRecipe, wanted: Sequence[str], progress: Progress | None
) -> None:
    """Make the packs anew that the merge chose its levels of."""
    for expert, base in sorted(pairs_of(resolved.recipe.tensors)) if wanted else ():
        models = packable(resolved.originals[expert], resolved.originals[base])
        repack(anew, models, wanted, progress or Silent())


def _inputs(
    warehouse: Warehouse,
    anew: Warehouse,
    request: Request,
    given: Mapping[str, str],
    progress: Progress | None,
) -> dict[str, Checkpoint]:
    """The inputs by the text that the recipe names them by, under the names that they had then.

    Says all that are missing at once.
    """
    inputs: dict[str, Checkpoint] = {}
    missing: dict[str, str] = {}
    for model in request.models:
        looked_at = []
        for place in _places(warehouse, model, given):
            try:
                checkpoint = open_checkpoint(place, model.name)
            except MergePipeError as error:
                looked_at.append(f"{place}: {error.what}")
                continue
            content = digest_json(dict(Contents(anew, checkpoint, progress).learn()))
            if content == model.content_sha256:
                inputs[model.text] = checkpoint
                break
            looked_at.append(f"{place}: content {content[:16]}")
        else:
            found = "; ".join(looked_at) or "no place to look at"
            missing[model.name] = f"expected content {model.content_sha256[:16]}, {found}"
    if missing:
        raise CheckpointChangedError(
            "An input is not there as it was merged"
            if len(missing) == 1
            else f"{len(missing)} inputs are not there as they were merged",
            where=", ".join(f"input {name}" for name in missing),
            found="; ".join(f"{name}: {found}" for name, found in missing.items()),
            next_step="say where: " + " ".join(f"--input {name}=PATH" for name in missing),
        )
    return inputs


def _places(warehouse: Warehouse, wanted: RequestedModel, given: Mapping[str, str]) -> list[str]:
    """Where an input may be: only where it was given, or the name's folders, and where it was."""
    if wanted.name in given:
        return [str(Path(given[wanted.name]).expanduser().resolve())]
    try:
        known = [r.checkpoint for r in reversed(warehouse.catalog.history(wanted.name))]
    except MergePipeError:
        known = []
    places = [present_root(warehouse, c.checkpoint_id, c.root) for c in known]
    return list(dict.fromkeys((*places, wanted.root)))


def _compare(anew: Warehouse, old: Snapshot, new: Snapshot, engine_version: str) -> None:
    """Raise CorruptionError for the first thing that the second merge gave otherwise."""
    before, after = (_facts(x.manifest) for x in (old, new))
    if {s.layer for s in old.manifest.shards} != {s.layer for s in new.manifest.shards}:
        # A folder that was written in shards of another size: the tensors are the same.
        before, after = (_contents(anew, x) for x in (old, new))
    where = next((w for w in before | after if before.get(w) != after.get(w)), None)
    if where is None:
        return
    next_step = (
        "check the snapshot with `mergepipe verify` and the machine's memory; then report it"
    )
    if engine_version != ENGINE_VERSION:
        next_step = f"replay it with the version that made it: engine {engine_version}, this is "
        next_step += ENGINE_VERSION
    raise CorruptionError(
        "A replay gave another result",
        where=f"{old.snapshot_id}, {where}",
        expected=before.get(where, "nothing")[:16],
        found=after.get(where, "nothing")[:16],
        next_step=next_step,
    )


def _facts(manifest: Manifest) -> dict[str, str]:
    """All that a replay must give again: weights first, which other things follow from."""
    facts: dict[str, str] = {}
    for s in manifest.shards:
        facts |= {f"layer {s.layer}, tensor {name}": digest for name, digest in s.tensors}
        facts[f"layer {s.layer}, header"] = s.sha256
    facts |= {f"layer {s.layer}, layer key": s.layer_key for s in manifest.shards}
    facts["plan id"] = manifest.plan_id
    facts |= {f"file {f.file}": f.sha256 for f in manifest.side_files}
    return {**facts, "manifest": manifest.snapshot_id}


def _contents(anew: Warehouse, snapshot: Snapshot) -> dict[str, str]:
    digests = Contents(anew, open_checkpoint(snapshot.path, "result")).learn()
    return {f"tensor {name}": digest for name, digest in sorted(dict(digests).items())}
