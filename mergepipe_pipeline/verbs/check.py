"""The verb `check`: every problem of a recipe and its full cost, from headers alone.

What packs of analysed experts would take is estimated besides, from some chunks of their weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from mergepipe_pipeline.domain.output import is_merged
from mergepipe_pipeline.execution.egress import egress_of_recipe
from mergepipe_pipeline.execution.packing import PackEstimate, estimate_pack
from mergepipe_pipeline.execution.packs import PackedCost, packed_cost
from mergepipe_pipeline.execution.throughput import expected_s, nbytes_of_recipe
from mergepipe_pipeline.planner.strategies import PACKS
from mergepipe_pipeline.recipe.cron import when_merged
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.resolution.open_models import packable
from mergepipe_pipeline.resolution.resolve import Planning, ResolvedRecipe, resolve
from mergepipe_pipeline.verbs.gate import refuse_unready
from mergepipe_pipeline.warehouse import Warehouse

if TYPE_CHECKING:
    from mergepipe_pipeline.remote.egress import Egress

#: Chunks that are encoded for all experts of a recipe together, and of each at least.
_SAMPLES, _LEAST_SAMPLES = 96, 8


@dataclass(frozen=True)
class Check:
    """A recipe that can run: its stages, the last one last.

    `seconds` is about how long all take, None before the first merge here. `when` says in words
    when the standing pipeline merges it.
    `packed` says of each stage what its experts' packs spare, None without packs. `estimates` say
    about what packs of analysed experts would take and save, where they have none. `egress` says
    what the last stage fetches from addresses.
    """

    stages: tuple[ResolvedRecipe, ...]
    packed: tuple[PackedCost | None, ...]
    when: str
    seconds: float | None
    estimates: tuple[PackEstimate, ...] = ()
    egress: tuple[Egress, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of all stages, each once."""
        all_warnings = (w for stage in self.stages for w in stage.recipe.warnings)
        return tuple(dict.fromkeys(all_warnings))


def check(warehouse: Warehouse, parsed: ParsedRecipe, **planning: Unpack[Planning]) -> Check:
    """Look at a recipe and all its inputs; writes nothing.

    Raises the one problem as itself, several as a RecipeError that lists them all, and
    EvaluationError for an evaluator whose files are not there.
    """
    refuse_unready(parsed.evaluator, planning.get("relative_to"))
    last = resolve(warehouse, parsed, **planning)
    stages = (*last.before, last)
    packed = tuple(_packed(warehouse, stage) for stage in stages)
    estimates = {p.name: p for stage in stages for p in estimates_of_recipe(warehouse, stage)}
    egress = egress_of_recipe(warehouse, last)
    when = when_merged(parsed.trigger, parsed.schedule, parsed.timezone)
    seconds = expected_s(warehouse, sum(map(nbytes_of_recipe, stages)))
    return Check(stages, packed, when, seconds, tuple(estimates.values()), egress)


def estimates_of_recipe(warehouse: Warehouse, resolved: ResolvedRecipe) -> tuple[PackEstimate, ...]:
    """Estimate packs of experts that are analysed and have none. Reads samples, writes nothing."""
    recipe, originals = resolved.recipe, resolved.originals
    if recipe.base is None:
        return ()
    used = recipe.contributing - {recipe.base}
    pairs = [packable(originals[n], originals[recipe.base]) for n in sorted(used)]
    experts = {e.name: (e, base) for e, base in pairs if e.checkpoint.kind == "full"}
    samples = max(_LEAST_SAMPLES, _SAMPLES // max(1, len(experts)))
    estimates = (estimate_pack(warehouse, *pair, samples) for pair in experts.values())
    return tuple(estimate for estimate in estimates if estimate is not None)


def _packed(warehouse: Warehouse, resolved: ResolvedRecipe) -> PackedCost | None:
    recipe, models = resolved.recipe, resolved.models
    if resolved.request.no_packs or recipe.strategy not in (None, PACKS):
        return None
    merged = [t for t in recipe.tensors if is_merged(t, models)]
    return packed_cost(warehouse, models, merged, resolved.originals)
