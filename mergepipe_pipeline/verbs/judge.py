"""What a standing pipeline does with the snapshot of a recipe before it is released: measure and
judge it.
"""

from __future__ import annotations

from pathlib import Path

from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.domain.evaluation import Evaluation
from mergepipe_pipeline.execution.plan_leases import lease_recipe
from mergepipe_pipeline.quality.measure import evaluate
from mergepipe_pipeline.verbs.deploy import candidate
from mergepipe_pipeline.verbs.gate import Judged, judge_candidate, require_evaluator
from mergepipe_pipeline.warehouse import Warehouse


def evaluate_recipe(warehouse: Warehouse, file: RecipeFile) -> tuple[Evaluation, Path]:
    """Measure the recipe's current snapshot, once for each snapshot; the log's path comes with it.

    Raises EvaluationError, NotFoundError, BusyError.
    """
    evaluator = require_evaluator(file.recipe)
    with lease_recipe(warehouse, file.name):
        snapshot, _ = candidate(warehouse, file)
        evaluation = evaluate(warehouse, snapshot, evaluator, warehouse.recipes)
    path = warehouse.evaluation_path(evaluation.snapshot_id, evaluation.evaluator_id)
    return evaluation, path.with_suffix(".log")


def judge_recipe(warehouse: Warehouse, file: RecipeFile) -> Judged:
    """Hold the recipe's current snapshot against its gate, and remember what that refuses.

    Raises EvaluationError, NotFoundError, BusyError.
    """
    with lease_recipe(warehouse, file.name):
        return judge_candidate(warehouse, file, *candidate(warehouse, file))
