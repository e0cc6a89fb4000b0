"""How long a checked recipe or a plan will take here, or why nobody can say.

Asks what `duration` must know: the page cache, the catalog (through the recipe's cost) and what
`calibrate` has measured. Reads no weight.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.pipeline.duration import Seconds, Work, seconds, total
from mergepipe_pipeline.pipeline.early import reads_base_early
from mergepipe_pipeline.planner.parts import stored_like
from mergepipe_pipeline.resolution.resolve import ResolvedRecipe
from mergepipe_pipeline.spec.blocks import total_elems
from mergepipe_pipeline.spec.model import Model
from mergepipe_pipeline.spec.plan import MergePlan
from mergepipe_pipeline.spec.view import TensorView
from mergepipe_pipeline.storage.profile import load_profile
from mergepipe_pipeline.storage.uncached import cached_of_file, fits_page_cache
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted seconds; None with the reason why not."""

    seconds: Seconds | None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """The figures, or `{"reason": …}`."""
        return self.seconds.to_json() if self.seconds else {"reason": self.reason}


def forecast(home: Warehouse, checked: ResolvedRecipe) -> Forecast:
    """How long `merge` will take for a recipe, its earlier stages included."""
    stages = (*checked.before, checked)
    return _forecast(home, [work_of(stage) for stage in stages])


def forecast_plan(home: Warehouse, plan: MergePlan) -> Forecast:
    """How long a plan that is there will take to merge, in a process that runs already."""
    found = _forecast(home, [work_of_plan(plan)])
    if found.seconds is None:
        return found
    return Forecast(replace(found.seconds, start_s=0.0, planning_s=0.0))


def _forecast(home: Warehouse, works: Sequence[Work]) -> Forecast:
    profile = load_profile(home.profile_path)
    if profile is None or profile.engine is None:
        return Forecast(None, "not calibrated: run `mergepipe calibrate`")
    untimed = {w.method for w in works} - profile.engine.methods.keys()
    if untimed:
        return Forecast(None, f"calibrate does not time {', '.join(sorted(untimed))}")
    return Forecast(total([seconds(w, profile) for w in works]))


def work_of(checked: ResolvedRecipe) -> Work:
    """What merging one stage does; what is in the page cache now is taken to stay there."""
    cost, recipe, models = checked.cost, checked.recipe, checked.models
    elems = expert_elems = inputs = 0
    for t in recipe.tensors:
        like = stored_like(t, models)
        elems += like.numel
        if like.dtype in FLOATING:
            expert_elems += sum(models[i.model].views[i.tensor].numel for i in t.inputs)
            inputs += len(t.inputs)
    bought = cost.expert_bytes_total
    if cost.budget_bytes is not None:
        bought = min(bought, cost.budget_bytes)
    share = bought / max(1, cost.expert_bytes_total)
    below, others = _cold_shares(checked)
    passes_cache = not fits_page_cache(cost.base_bytes + bought + cost.output_bytes)
    # What has just been analysed is in the page cache, if it fits.
    is_warmed = cost.analysis_bytes > 0 and not passes_cache
    cold_nbytes = below * cost.base_bytes + others * bought
    return Work(
        method=recipe.method,
        cold_bytes=0 if is_warmed else round(cold_nbytes),
        early_bytes=round(below * cost.base_bytes) if reads_base_early(checked) else 0,
        passes_cache=passes_cache,
        elems=elems,
        expert_elems=round(share * expert_elems),
        inputs=inputs,
        has_budget=cost.budget_bytes is not None,
        has_first_pass=(
            cost.budget_bytes is None and OPERATORS[recipe.method].schema.fact == "drop"
        ),
        analysis_elems=cost.analysis_elems,
        analysis_bytes=cost.analysis_bytes,
        analysis_cold_bytes=round(others * cost.analysis_bytes),
        output_bytes=cost.output_bytes,
        layers=cost.layers,
    )


def work_of_plan(plan: MergePlan) -> Work:
    """What merging a plan does; what is in the page cache now is taken to stay there."""
    tasks = [task for layer in plan.layers for task in layer.tasks]
    bases = [t.base.view for t in tasks if t.base]
    base_nbytes = sum(v.nbytes for v in bases)
    bought = sum(layer.expert_bytes_planned for layer in plan.layers)
    output = sum(t.out_nbytes for t in tasks)
    experts = [e for t in tasks for e in t.experts]
    below = _cold_share(_files(plan, bases))
    others = _cold_share(_files(plan, [e.view for e in experts]))
    return Work(
        method=plan.method,
        cold_bytes=round(below * base_nbytes + others * bought),
        early_bytes=0,
        passes_cache=not fits_page_cache(base_nbytes + bought + output),
        elems=sum(prod(t.shape) for t in tasks),
        expert_elems=sum(total_elems(e.read) for e in experts),
        inputs=len(experts),
        has_budget=plan.estimates.budget_bytes is not None,
        has_first_pass=any(e.l1 is not None for e in experts),
        analysis_elems=0,
        analysis_bytes=0,
        analysis_cold_bytes=0,
        output_bytes=output,
        layers=len(plan.layers),
    )


def _files(plan: MergePlan, views: Sequence[TensorView]) -> set[Path]:
    """The files that stored tensors of views are in."""
    return {
        Path(plan.sources[part.source].root) / part.entry.file for v in views for part in v.stored
    }


def _cold_shares(checked: ResolvedRecipe) -> tuple[float, float]:
    """Shares of the base's bytes, and of the experts', that are not in the page cache."""
    base = [checked.base] if checked.base else []
    others = [m for m in checked.experts if m not in base]

    def files(models: Sequence[Model]) -> set[Path]:
        found = (c for model in models for c in model.checkpoints)
        return {Path(c.root) / file.path for c in found for file in c.files}

    return _cold_share(files(base)), _cold_share(files(others))


def _cold_share(paths: Collection[Path]) -> float:
    found = [cached_of_file(path) for path in paths]
    nbytes = sum(n for _, n in found)
    return 1 - min(1.0, sum(cached for cached, _ in found) / nbytes) if nbytes else 1.0
