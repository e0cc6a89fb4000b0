"""Gathers what the planner needs for a resolved recipe: statistics and facts.

They come from the catalog; only experts that it does not know are read and analysed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.workers import Workers
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.operator import Choosing, Fact
from mergepipe_pipeline.domain.output import is_merged, stored_like
from mergepipe_pipeline.domain.recipe import Budget, Recipe, TensorRecipe, pairs_of
from mergepipe_pipeline.domain.stats import ExpertStats
from mergepipe_pipeline.facts.analysed import AnalysedExpert, Sparsified
from mergepipe_pipeline.facts.contents import Contents
from mergepipe_pipeline.facts.group import measured_facts
from mergepipe_pipeline.facts.passes import complete
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.planner.parts import TensorFacts
from mergepipe_pipeline.planner.plan_builder import PlanBuilder
from mergepipe_pipeline.planner.strategies import PACKS
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.resolution.resolve import ResolvedRecipe
from mergepipe_pipeline.resolution.token_rows import MadeRows, Reindexer
from mergepipe_pipeline.warehouse import Warehouse

#: By (expert's model number, base's, fact): where operators ask for it.
Asked = dict[tuple[int, int, Fact], list[Sparsified]]
#: By (expert's model number, base's).
Experts = Mapping[tuple[int, int], AnalysedExpert]


def gather(
    warehouse: Warehouse,
    resolved: ResolvedRecipe,
    progress: Progress | None = None,
    *,
    unnamed: Collection[str] = (),
    for_parts: bool = False,
) -> tuple[PlanBuilder, tuple[str, ...]]:
    """Register a recipe's checkpoints (not those `unnamed`) and analyse what the catalog lacks.

    Gives what makes the plan, and the names of the experts that were analysed for it just now.
    Facts that a full merge finds by itself are gathered only for a budget, or with `for_parts`,
    when other budgets will be looked at.
    """
    recipe, models = resolved.recipe, resolved.models
    if resolved.tokenizer is not None:
        reindexer = Reindexer(recipe, resolved.originals, resolved.tokenizer)
        models = tuple(reindexer.models(MadeRows(warehouse, resolved.originals).checkpoint))
    merged = [t for t in recipe.tensors if is_merged(t, models)]
    grid = resolved.grid
    experts = {
        (e, b): AnalysedExpert(warehouse, models[e], models[b], grid, pairs, progress)
        for (e, b), pairs in pairs_of(merged).items()
    }
    read = _complete(experts, is_counted=bool(resolved.cost.analysis_bytes))
    # Packs are found by contents, and a plan does not depend on whether these were known before.
    inputs = [c for m in (*models, *resolved.originals) for c in m.checkpoints]
    digests = {c.checkpoint_id: Contents(warehouse, c, progress).learn() for c in inputs}
    (progress or Silent()).warn(*_register(warehouse.catalog, resolved, unnamed))
    packs = None
    if (for_parts or recipe.strategy in (None, PACKS)) and not resolved.request.no_packs:
        from mergepipe_pipeline.execution.packs import find_packs

        packs = find_packs(warehouse.packs, digests.get, models, merged, grid, resolved.originals)
    stats = _stats(experts)
    measured = measured_facts(warehouse, recipe, models, merged, progress)
    facts = TensorFacts(measured=measured, chosen=_choose_operators(recipe, merged, measured))
    asked = _asked_of_experts(recipe, models, merged, facts.chosen)
    _fill(facts, asked, experts, in_full=recipe.budget == Budget() and not for_parts)
    builder = PlanBuilder(
        recipe=recipe,
        models=models,
        digests=digests,
        stats=stats,
        facts=facts,
        grid=grid,
        side=resolved.side,
        packs=packs,
    )
    return builder, read


def _register(
    catalog: Catalog, resolved: ResolvedRecipe, unnamed: Collection[str]
) -> Iterator[str]:
    """Make the recipe's checkpoints known by name; warns of names that mean other files now.

    A name's own base stays as it is.
    """
    known = set(catalog.names())
    base = None if resolved.base is None else resolved.base.checkpoint.name
    checkpoints = [c for model in resolved.originals for c in model.checkpoints]
    for c in (c for c in checkpoints if c.name not in unnamed):
        new_expert = c.name != base and c.name not in known and base not in unnamed
        registration = catalog.register(c, base if new_expert else None)
        if registration.is_new and c.name in known:
            yield (
                f"{c.name}: the files in {c.root} are not those that were registered "
                f"under this name; they are version {registration.version} of it now"
            )


def _stats(experts: Experts) -> dict[tuple[int, int], ExpertStats]:
    with Workers(threads.CATALOG) as workers:
        every = workers.map(lambda e: e.stats(("hist",)), experts.values())
        return dict(zip(experts, every, strict=True))


def _complete(experts: Experts, *, is_counted: bool) -> tuple[str, ...]:
    """Analyse what is not known of experts; the names of those that had to be read for it."""
    read = {e.expert.name: None for e in experts.values() if is_counted and e.missing()}
    for base in dict.fromkeys(base for _, base in experts):
        complete([e for (_, against), e in experts.items() if against == base])
    return tuple(read)


def _fill(facts: TensorFacts, asked: Asked, experts: Experts, *, in_full: bool) -> None:
    """Add facts of single experts that the operators ask for; squared norms weigh parts of a merge.

    Of the next expert histograms are loaded meanwhile.
    """
    every = [experts[expert, base] for expert, base, _ in asked]
    with Workers(1) as workers:
        loaded = workers.map(_histograms, () if in_full else every, depth=2)
        for e, ((*_, fact), places) in zip(every, asked.items(), strict=True):
            if not in_full:
                next(loaded)
            e.add(fact, places, facts, in_full=in_full)
            if not in_full:
                e.add_sq_norms(fact, places, facts)
            e.forget_histograms()


def _asked_of_experts(
    recipe: Recipe,
    models: Sequence[Model],
    merged: Sequence[TensorRecipe],
    chosen: Mapping[str, Choosing],
) -> Asked:
    """Where the operators ask for facts of experts."""
    asked: Asked = {}
    for t in merged:
        if t.base is None:
            continue
        own = Choosing(recipe.method, t.params, tuple(i.params for i in t.inputs), "")
        choosing = chosen.get(t.name, own)
        copied = choosing.operator == "copy"
        fact: Fact = "none" if copied else OPERATORS[choosing.operator].schema.fact
        for number, i in enumerate(t.inputs if fact != "none" else ()):
            view = models[i.model].views[i.tensor]
            s = Sparsified(
                place=(t.name, number),
                pair=(i.tensor, t.base.tensor),
                position=i.position,
                seed=recipe.seed,
                params=choosing.params,
                model_params=choosing.model_params[number],
                shape=stored_like(t, models).shape,
                numel=view.numel,
            )
            asked.setdefault((i.model, t.base.model, fact), []).append(s)
    return asked


def _choose_operators(
    recipe: Recipe, merged: Sequence[TensorRecipe], measured: Mapping[str, tuple[float, ...]]
) -> dict[str, Choosing]:
    """Output tensor to what the recipe's method chose for it; empty for methods that are one."""
    choose = OPERATORS[recipe.method].choose
    if choose is None:
        return {}
    out = {}
    for t in merged:
        rows = tuple(i.params for i in t.inputs)
        out[t.name] = choose(t.params, rows, measured[t.name])
    return out


def _histograms(e: AnalysedExpert) -> object:
    return e.histograms
