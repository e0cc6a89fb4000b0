"""What a standing pipeline does after a refusal: find the suspect, and keep it out.

The record beside the releases is the only memory: a refusal that was traced is not traced again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.deploy.recorded import reason_to_wait_for
from mergepipe_pipeline.deploy.wanted import wanted
from mergepipe_pipeline.digest import digest_json, seal, unseal
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.facts.quarantine import Quarantine, decide
from mergepipe_pipeline.quality.bisection import Bisection, Tell
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.storage.atomic import write_atomic
from mergepipe_pipeline.verbs.bisect import MOST, Prepared, bisect, prepare_snapshots
from mergepipe_pipeline.verbs.gate import Refusal, refused_before
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True)
class Traced:
    """What a refusal was traced to; `quarantine` is None where no single expert is to blame."""

    prepared: Prepared
    bisection: Bisection
    quarantine: Quarantine | None


def trace_due(warehouse: Warehouse, file: RecipeFile) -> str | None:
    """A token of the refusal that is to be traced now; None for none, and for one that was.

    Raises MergePipeError for a record that cannot be read.
    """
    refusal = _refusal(warehouse, file)
    if refusal is None or refusal.verdict.live_snapshot_id is None:
        return None
    if reason_to_wait_for(warehouse, file.members) is not None:
        return None  # an input is newer than the refusal, or its expert is kept out already
    token = _token(refusal)
    return None if _traced(warehouse, file.name) == token else token


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
    refusal = _refusal(warehouse, file)
    if refusal is None or refusal.verdict.live_snapshot_id is None:
        return None
    refused, live = (
        load_snapshot(warehouse.snapshots, snapshot_id)
        for snapshot_id in (refusal.verdict.snapshot_id, refusal.verdict.live_snapshot_id)
    )
    prepared = prepare_snapshots(
        warehouse,
        file.recipe,
        warehouse.recipes,
        live=live,
        refused=refused,
        most=MOST,
        layers=False,
    )
    tell(f"at most {prepared.cost.summary}")
    done = bisect(warehouse, prepared, options=options, tell=tell)
    kept_out = _keep_out(warehouse, prepared, done)
    record = {"token": _token(refusal), "bisection": done.to_json()}
    write_atomic(warehouse.bisection_path(file.name), seal(record))
    return Traced(prepared, done, kept_out)


def _keep_out(warehouse: Warehouse, prepared: Prepared, done: Bisection) -> Quarantine | None:
    suspect = next((s for s in prepared.regression.suspects if s.name == done.suspect), None)
    if suspect is None:
        return None
    reason = f"the gate of {done.recipe} refuses what it gives: {done.verdict}; {done.summary}"
    by = f"recipe {done.recipe}"
    return decide(warehouse, suspect.name, suspect.content, reason, is_kept_out=True, by=by)


def _refusal(warehouse: Warehouse, file: RecipeFile) -> Refusal | None:
    """The refusal of what the recipe wants now, if it asks for a bisection then."""
    if file.parsed is None or file.parsed.gate is None or file.parsed.gate.on_failure != "bisect":
        return None
    state = wanted(warehouse, file)
    return None if state is None else refused_before(warehouse, file, state)


def _token(refusal: Refusal) -> str:
    verdict = refusal.verdict
    return digest_json([verdict.snapshot_id, verdict.live_snapshot_id, refusal.evaluator_id])[:16]


def _traced(warehouse: Warehouse, recipe: str) -> str | None:
    """The token of what was traced last; None for nothing, or a record that cannot be read."""
    path = warehouse.bisection_path(recipe)
    try:
        record: dict[str, Any] = unseal(path.read_bytes(), str(path))
    except (FileNotFoundError, CorruptionError):  # then it is traced again, from what is kept
        return None
    return str(record["token"])
