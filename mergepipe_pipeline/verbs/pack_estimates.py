"""What packs of a recipe's experts, or of one expert, would take and save, before they are made."""

from __future__ import annotations

from contextlib import suppress

from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.facts.pack_estimate import PackEstimate, estimate_pack
from mergepipe_pipeline.resolution.open_models import open_pair, packable
from mergepipe_pipeline.resolution.resolve import ResolvedRecipe
from mergepipe_pipeline.warehouse import Warehouse

#: Chunks that are encoded for all experts of a recipe together, and of each at least.
_SAMPLES, _LEAST_SAMPLES = 96, 8


def estimates_of_recipe(warehouse: Warehouse, resolved: ResolvedRecipe) -> tuple[PackEstimate, ...]:
    """Those of experts that are analysed and have no pack. Reads samples, writes nothing."""
    recipe, originals = resolved.recipe, resolved.originals
    if recipe.base is None:
        return ()
    used = {i.model for t in recipe.tensors for i in t.inputs} - {recipe.base}
    pairs = [packable(originals[n], originals[recipe.base]) for n in sorted(used)]
    experts = {e.name: (e, base) for e, base in pairs if e.checkpoint.kind == "full"}
    samples = max(_LEAST_SAMPLES, _SAMPLES // max(1, len(experts)))
    estimates = (estimate_pack(warehouse, *pair, samples) for pair in experts.values())
    return tuple(estimate for estimate in estimates if estimate is not None)


def estimates_of_expert(
    warehouse: Warehouse, name: str, plan: MergePlan
) -> tuple[PackEstimate, ...]:
    """That of an expert of a plan, if it is analysed, has no pack and can be read."""
    if "base" not in plan.roles:
        return ()
    base = plan.sources[plan.roles.index("base")].name
    with suppress(MergePipeError):
        estimate = estimate_pack(warehouse, *open_pair(warehouse, name, base))
        return () if estimate is None else (estimate,)
    return ()
