"""The Python interface: plan, then execute, over the same verbs as the CLI.

    planner = Planner(catalog=Catalog("warehouse"))
    plan = planner.plan(base_model="base", experts=["math", "code"], operator="ties", budget_mb=512)
    snapshot_id, manifest = Engine(catalog=planner.catalog).execute(plan)

Models are registered names or paths; what is not known yet is registered and analysed on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.domain.snapshot import Manifest
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import RecipeError
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.execution.stages import plan_in_stages
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.recipe.budget import parse_amount
from mergepipe_pipeline.resolution.recipe_text import SCHEMAS, parse
from mergepipe_pipeline.resolution.selected import Registered
from mergepipe_pipeline.warehouse import Warehouse


class Catalog:
    """The warehouse at `root` (default: MERGEPIPE_HOME or ./warehouse), created if absent."""

    def __init__(self, root: str | Path | None = None) -> None:
        self.warehouse = Warehouse.at(root).ensure()


@dataclass(frozen=True)
class Planner:
    """Plans merges over one catalog."""

    catalog: Catalog
    progress: Progress | None = None

    def plan(
        self,
        *,
        base_model: str,
        experts: Sequence[str | Mapping[str, Any]],
        operator: str,
        budget_mb: float | None = None,
        weights: Sequence[float] | None = None,
        parameters: Mapping[str, Any] | None = None,
        strategy: str | None = None,
        seed: int = 0,
        out_dtype: str | None = None,
    ) -> MergePlan:
        """The plan of a merge; `plan.plan_digest` names what it determines.

        `operator` is a merge method in any case; `budget_mb` limits expert reads in MB (10⁶ bytes),
        None for no limit; `weights` has one entry per entry of `experts`, of which mappings are
        selectors as in recipes (`{"match": "chat-*"}`); `parameters` are those of the whole merge,
        as in recipes, a `weight` for all among them (without either, each weighs 1); `strategy`
        None is the one that suits the method. Raises RecipeError, CheckpointError,
        IncompatibleCheckpointsError, BudgetError.
        """
        method = next((m for m in SCHEMAS if m == operator.lower()), operator)
        recipe = {
            "merge_method": method,
            "base_model": base_model,
            "models": _models(experts, weights, parameters or {}),
            "seed": seed,
            "parameters": dict(parameters or {}),
            "strategy": strategy,
            "budget": None if budget_mb is None else _nbytes(budget_mb),
        }
        if out_dtype:
            recipe["out_dtype"] = out_dtype
        text = yaml.safe_dump({k: v for k, v in recipe.items() if v is not None}, sort_keys=False)
        warehouse = self.catalog.warehouse
        raw = parse(text, name="python", where="Planner.plan", choose=Registered(warehouse))
        return plan_in_stages(warehouse, raw, progress=self.progress)


def _models(
    experts: Sequence[str | Mapping[str, Any]],
    weights: Sequence[float] | None,
    parameters: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """The entries of `models` in a recipe. Raises RecipeError."""
    entries = [{"model": e} if isinstance(e, str) else e for e in experts]
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise _wrong(f"experts, entry {number}", "a name, a path or a selector", entry)
    if weights is None and "weight" in parameters:
        return [dict(entry) for entry in entries]
    if "weight" in parameters:
        raise _wrong("weights, parameters", "one of both to say the weights", "both")
    shares = [1.0] * len(entries) if weights is None else list(weights)
    if len(shares) != len(entries):
        raise _wrong("weights", f"{len(entries)}, one per expert", len(shares))
    return [
        {**entry, "parameters": {"weight": weight}}
        for entry, weight in zip(entries, shares, strict=True)
    ]


def _nbytes(budget_mb: float) -> int | None:
    """Megabytes in bytes. Raises BudgetError for what is no amount."""
    return parse_amount(f"{budget_mb}MB", "Planner.plan, budget_mb").nbytes


def _wrong(argument: str, expected: str, found: object) -> RecipeError:
    return RecipeError(
        "An argument cannot be used",
        where=f"Planner.plan, {argument}",
        expected=expected,
        found=found if isinstance(found, str) else repr(found),
        next_step="correct it",
    )


@dataclass(frozen=True)
class Engine:
    """Executes plans into the warehouse of one catalog."""

    catalog: Catalog
    options: EngineOptions = field(default_factory=EngineOptions)
    progress: Progress | None = None

    def execute(self, plan: MergePlan) -> tuple[str, Manifest]:
        """Merge and commit; the snapshot's id and its manifest (`manifest.manifest_hash`).

        Raises CheckpointChangedError when an input is not the planned one any more,
        StorageFullError.
        """
        warehouse, options = self.catalog.warehouse, self.options
        outcome = run_plan(warehouse, plan, options=options, progress=self.progress)
        return outcome.snapshot.snapshot_id, outcome.snapshot.manifest
