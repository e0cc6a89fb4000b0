"""The verb `evaluate`: what an evaluator says of a snapshot; it is kept, and no ref changes."""

from __future__ import annotations

from pathlib import Path

from mergepipe_pipeline.domain.evaluation import Evaluation, Evaluator
from mergepipe_pipeline.execution.lookup import snapshot_of
from mergepipe_pipeline.quality.measure import evaluate as run
from mergepipe_pipeline.quality.measure import evaluations_of
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.warehouse import Warehouse

__all__ = ["evaluate", "evaluations_of"]


def evaluate(
    warehouse: Warehouse, what: str, evaluator: Evaluator, folder: Path, *, fresh: bool = False
) -> Evaluation:
    """Measure a snapshot, given by id, unique prefix, ref or `REF@VERSION`; once, unless `fresh`.

    Paths of the evaluator are relative to `folder`. Raises EvaluationError naming the log,
    NotFoundError.
    """
    snapshot = load_snapshot(warehouse.snapshots, snapshot_of(warehouse, what))
    return run(warehouse, snapshot, evaluator, folder, fresh=fresh)
