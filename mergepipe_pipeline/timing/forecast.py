"""How long a checked recipe or a plan will take here, or why nobody can say.

Asks what `time_model` must know: the page cache, the catalog (through the recipe's cost) and what
`calibrate` has measured. Reads no weight.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from mergepipe_pipeline.domain.blocks import total_elems
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.pack import TIERS_OF
from mergepipe_pipeline.domain.plan import LayerTask, MergePlan
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.facts.packs import PackedCost, packed_cost
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.planner.level_selection import PACKS
from mergepipe_pipeline.planner.parts import is_merged, stored_like
from mergepipe_pipeline.resolution.resolve import ResolvedRecipe
from mergepipe_pipeline.storage.profile import load_profile
from mergepipe_pipeline.storage.uncached import cached_of_file, fits_page_cache
from mergepipe_pipeline.timing.time_model import Seconds, Work, measured_as, seconds, total
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted seconds; None with the reason why not."""

    seconds: Seconds | None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """The figures, or `{"reason": …}`."""
        return self.seconds.to_json() if self.seconds else {"reason": self.reason}


def forecast(warehouse: Warehouse, resolved: ResolvedRecipe) -> Forecast:
    """How long `merge` will take for a recipe, its earlier stages included."""
    stages = (*resolved.before, resolved)
    return _forecast(warehouse, [work_of(s, packed_of(warehouse, s)) for s in stages])


def packed_of(warehouse: Warehouse, resolved: ResolvedRecipe) -> PackedCost | None:
    """What packs spare the merge of a stage; None without packs, or where none are to be read."""
    recipe, models = resolved.recipe, resolved.models
    if resolved.request.no_packs or recipe.strategy not in (None, PACKS):
        return None
    merged = [t for t in recipe.tensors if is_merged(t, models)]
    return packed_cost(warehouse, models, merged, resolved.originals)


def forecast_plan(warehouse: Warehouse, plan: MergePlan) -> Forecast:
    """How long a plan that is there will take to merge, in a process that runs already."""
    forecast = _forecast(warehouse, [work_of_plan(plan)])
    if forecast.seconds is None:
        return forecast
    return Forecast(replace(forecast.seconds, start_s=0.0))


def _forecast(warehouse: Warehouse, works: Sequence[Work]) -> Forecast:
    profile = load_profile(warehouse.profile_path)
    if profile is None or profile.engine is None:
        return Forecast(None, "not calibrated: run `mergepipe calibrate`")
    missing = {w.method for w in works if measured_as(w.method) not in profile.engine.methods}
    if missing:
        return Forecast(None, f"calibrate does not measure {', '.join(sorted(missing))}")
    return Forecast(total([seconds(w, profile) for w in works]))


def work_of(resolved: ResolvedRecipe, packed: PackedCost | None = None) -> Work:
    """What merging one stage does; what is in the page cache now is taken to stay there.

    With packs, what is less than an exact merge reads is taken to be read of all that is packed.
    """
    cost, recipe, models = resolved.cost, resolved.recipe, resolved.models
    elems = expert_elems = inputs = 0
    for t in recipe.tensors:
        like = stored_like(t, models)
        elems += like.numel
        if like.dtype in FLOATING:
            expert_elems += sum(models[i.model].views[i.tensor].numel for i in t.inputs)
            inputs += len(t.inputs)
    read = cost.expert_bytes_total
    if cost.budget_bytes is not None:
        read = min(read, cost.budget_bytes)
    merged_elems = round(read / max(1, cost.expert_bytes_total) * expert_elems)
    is_exact = packed is not None and read >= packed.exact_nbytes
    if packed is not None:
        read = min(read, packed.exact_nbytes)
        merged_elems = expert_elems if is_exact else max(merged_elems, packed.packed_elems)
    base_share, expert_share = _cold_shares(resolved)
    # What has just been analysed is in the page cache, if it fits.
    is_warm = cost.analysis_bytes > 0 and fits_page_cache(
        cost.base_bytes + read + cost.output_bytes
    )
    cold_nbytes = base_share * cost.base_bytes + expert_share * read
    return Work(
        method=recipe.method,
        cold_nbytes=0 if is_warm else round(cold_nbytes),
        out_elems=elems,
        expert_elems=merged_elems,
        exact_elems=packed.packed_elems if packed and is_exact else 0,
        near_elems=packed.packed_elems if packed and not is_exact else 0,
        plan_inputs=0 if cost.budget_bytes is None else inputs,
        learn_nbytes=cost.analysis_bytes,
        learn_cold_nbytes=round(expert_share * cost.analysis_bytes),
        output_nbytes=cost.output_bytes,
        has_first_pass=(
            cost.budget_bytes is None and OPERATORS[recipe.method].schema.fact == "drop"
        ),
    )


def work_of_plan(plan: MergePlan) -> Work:
    """What merging a plan does; what is in the page cache now is taken to stay there."""
    tasks = [task for layer in plan.layers for task in layer.tasks]
    bases = [t.base.view for t in tasks if t.base]
    experts = [e.view for t in tasks for e in t.experts]
    shares = _cold_share(_files(plan, bases)), _cold_share(_files(plan, experts))
    return _work_of_layers(plan, plan.layers, *shares)


def cold_work(plan: MergePlan, layers: Sequence[LayerTask]) -> Work:
    """What merging some layers of a plan does where nothing of them is in the page cache."""
    return _work_of_layers(plan, layers, 1.0, 1.0)


def _work_of_layers(
    plan: MergePlan, layers: Sequence[LayerTask], base_share: float, expert_share: float
) -> Work:
    """The work, where such shares of the base's and the experts' bytes are cold."""
    tasks = [task for layer in layers for task in layer.tasks]
    experts = [e for t in tasks for e in t.experts]
    base_nbytes = base_share * sum(layer.base_nbytes for layer in layers)
    expert_nbytes = expert_share * sum(layer.expert_bytes_planned for layer in layers)
    packed = [r for e in experts if e.packed for r in e.packed.ranges]
    near_elems = sum(r.stop_elem - r.start_elem for r in packed if r.level in TIERS_OF["L3"])
    packed_elems = sum(r.stop_elem - r.start_elem for r in packed)
    return Work(
        method=plan.method,
        cold_nbytes=round(base_nbytes + expert_nbytes),
        out_elems=sum(prod(t.shape) for t in tasks),
        expert_elems=sum(total_elems(e.read) for e in experts) + packed_elems,
        exact_elems=packed_elems - near_elems,
        near_elems=near_elems,
        plan_inputs=0,
        learn_nbytes=0,
        learn_cold_nbytes=0,
        output_nbytes=sum(t.out_nbytes for t in tasks),
        has_first_pass=any(e.l1 is not None for e in experts),
    )


def _files(plan: MergePlan, views: Sequence[TensorView]) -> set[Path]:
    """The files that stored tensors of views are in."""
    return {
        Path(plan.sources[part.source].root) / part.entry.file for v in views for part in v.stored
    }


def _cold_shares(resolved: ResolvedRecipe) -> tuple[float, float]:
    """Shares of the base's bytes, and of the experts', that are not in the page cache."""
    base = [resolved.base] if resolved.base else []
    experts = [m for m in resolved.experts if m not in base]

    def files(models: Sequence[Model]) -> set[Path]:
        checkpoints = (c for model in models for c in model.checkpoints)
        return {Path(c.root) / file.path for c in checkpoints for file in c.files}

    return _cold_share(files(base)), _cold_share(files(experts))


def _cold_share(paths: Collection[Path]) -> float:
    sizes = [cached_of_file(path) for path in paths]
    nbytes = sum(n for _, n in sizes)
    return 1 - min(1.0, sum(cached for cached, _ in sizes) / nbytes) if nbytes else 1.0
