"""What packs of a recipe's experts, or of one expert, would take and save, before they are made."""

from __future__ import annotations

from contextlib import suppress

from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.facts.pack_estimate import PackEstimate, estimate_pack
from mergepipe_pipeline.resolution.open_models import open_pair
from mergepipe_pipeline.resolution.resolve import ResolvedRecipe
from mergepipe_pipeline.spec.plan import MergePlan
from mergepipe_pipeline.warehouse import Warehouse

#: Chunks that are encoded for all experts of a recipe together, and of each at least.
_SAMPLES, _LEAST_SAMPLES = 96, 8


def estimates_of_recipe(warehouse: Warehouse, resolved: ResolvedRecipe) -> tuple[PackEstimate, ...]:
    """Those of experts that are analysed and have no pack. Reads samples, writes nothing."""
    base = resolved.base
    experts = [m for m in resolved.experts if m is not base and m.checkpoint.kind == "full"]
    if base is None or not experts:
        return ()
    samples = max(_LEAST_SAMPLES, _SAMPLES // len(experts))
    found = (estimate_pack(warehouse, expert, base, samples) for expert in experts)
    return tuple(one for one in found if one is not None)


def estimates_of_expert(
    warehouse: Warehouse, name: str, plan: MergePlan
) -> tuple[PackEstimate, ...]:
    """That of an expert of a plan, if it is analysed, has no pack and can be read."""
    if "base" not in plan.roles:
        return ()
    base = plan.sources[plan.roles.index("base")].name
    with suppress(MergePipeError):
        found = estimate_pack(warehouse, *open_pair(warehouse, name, base))
        return () if found is None else (found,)
    return ()
