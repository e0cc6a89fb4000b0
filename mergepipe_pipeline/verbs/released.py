"""What a release brought: what differs from the version before, in inputs, bytes and metrics.

From manifests, provenance, catalog and kept measurements alone; no weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.domain.evaluation import Metrics, figure
from mergepipe_pipeline.domain.snapshot import Ref
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.execution.lookup import provenance_of
from mergepipe_pipeline.quality.evaluators import evaluator_id
from mergepipe_pipeline.quality.measure import kept
from mergepipe_pipeline.quality.regression import changes_between
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.text import percent, size
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Brought:
    """What a version of a ref brought.

    `before` is the last version of another snapshot, None for the first. `rows` compare both:
    figure, before, after. `metrics` are those of the new version, by name.
    """

    summary: str
    before: Ref | None
    rows: tuple[tuple[str, str, str], ...]
    metrics: Metrics


def brought(warehouse: Warehouse, file: RecipeFile, ref: Ref) -> Brought:
    """What a version of a recipe's ref brought against the version before.

    A version before whose snapshot cannot be read any more is told as such. Raises CorruptionError
    where the new one cannot be read.
    """
    versions = warehouse.refs.history(ref.name)
    others = [r for r in versions if r.number < ref.number and r.snapshot_id != ref.snapshot_id]
    before = others[-1] if others else None
    now, was = load_snapshot(warehouse.snapshots, ref.snapshot_id), dict[str, Any]()
    summary = f"the first version of {ref.name}"
    if before is not None:
        summary = f"version {before.number} cannot be read any more, so nothing says what changed"
        with suppress(MergePipeError):
            one = load_snapshot(warehouse.snapshots, before.snapshot_id)
            summary = f"since version {before.number}: {changes_between(warehouse, one, now).what}"
            was = dict(provenance_of(one))
    measured = _metrics(warehouse, file, before) if before else {}
    metrics = _metrics(warehouse, file, ref)
    rows = tuple(_rows(was, provenance_of(now), measured, metrics))
    return Brought(summary, before, rows, metrics)


def _metrics(warehouse: Warehouse, file: RecipeFile, ref: Ref) -> Metrics:
    """What the recipe's evaluator measured of a version; empty where it did not, or is gone."""
    evaluator, found = file.recipe.evaluator, None
    if evaluator is not None:
        with suppress(MergePipeError):
            found = kept(warehouse, ref.snapshot_id, evaluator_id(evaluator, warehouse.recipes))
    return found.metrics if found else {}


def _rows(
    was: Mapping[str, Any], now: Mapping[str, Any], measured: Metrics, metrics: Metrics
) -> Iterator[tuple[str, str, str]]:
    """Figures of two versions beside each other; those that neither has are left out."""
    both = [_figures(record.get("estimates") or {}) for record in (was, now)]
    both[0] |= {name: figure(value) for name, value in measured.items()}
    both[1] |= {name: figure(value) for name, value in metrics.items()}
    for name in dict.fromkeys((*both[1], *both[0])):
        before, after = (some.get(name, "-") for some in both)
        yield name, before, after


def _figures(e: Mapping[str, Any]) -> dict[str, str]:
    """Budget, bytes and predicted loss of a plan, as recorded with a snapshot."""
    error, update = e.get("predicted_error"), e.get("update_norm")
    budget, read = e.get("budget_bytes"), e.get("expert_bytes_planned")
    return {
        **({} if budget is None else {"budget": size(budget)}),
        **({} if read is None else {"read of the experts": size(read)}),
        **({"predicted loss": percent(error / update)} if error is not None and update else {}),
    }
