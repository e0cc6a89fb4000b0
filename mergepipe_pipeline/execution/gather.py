"""Gathers what the planner needs for a resolved recipe: statistics and facts.

They come from the catalog; only experts that it does not know are read and analysed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mergepipe_pipeline.catalog.pairs import Pair
from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.workers import Workers, prefetch
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.operator import Choosing, Fact
from mergepipe_pipeline.domain.output import is_merged, stored_like
from mergepipe_pipeline.domain.plan import TensorTask
from mergepipe_pipeline.domain.recipe import Budget, Recipe, TensorRecipe
from mergepipe_pipeline.domain.stats import ExpertStats
from mergepipe_pipeline.facts.analysed import AnalysedExpert, FactTables, Sparsified
from mergepipe_pipeline.facts.group import measured_facts
from mergepipe_pipeline.facts.passes import complete
from mergepipe_pipeline.facts.tensor_digests import ensure_digests, verify_place
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.planner.packed_rows import Packs
from mergepipe_pipeline.planner.parts import Method, TensorFacts
from mergepipe_pipeline.planner.plan_builder import PlanBuilder, PlanInput
from mergepipe_pipeline.planner.samples import Simulate
from mergepipe_pipeline.planner.strategies import PACKS
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.resolution.resolve import ResolvedRecipe
from mergepipe_pipeline.resolution.token_rows import Reindexer
from mergepipe_pipeline.warehouse import Warehouse

Stats = Mapping[tuple[int, int], ExpertStats]
#: By (expert's model number, base's).
Experts = Mapping[tuple[int, int], AnalysedExpert]


@dataclass(frozen=True)
class PlanInputs:
    """A resolved recipe with all that its planning depends on.

    `models` have the rows that the output's tokenizer asks for; `stats` are by (expert's model
    number, base's). `read` are the names of the experts that were analysed for it just now.
    """

    resolved: ResolvedRecipe
    models: tuple[Model, ...]
    stats: Stats
    facts: TensorFacts
    read: tuple[str, ...]
    packs: Packs | None = None

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe."""
        return self.resolved.recipe

    def builder(self, digests: Sequence[Sequence[Mapping[str, str]]] | None = None) -> PlanBuilder:
        """The planner's view of it.

        `digests` per model and checkpoint are needed for a plan, not for a planning problem.
        """
        of_models = digests or [()] * len(self.models)
        return PlanBuilder(
            recipe=self.recipe,
            methods={
                name: Method(o.schema, o.coefficients, o.response, _simulated)
                for name, o in OPERATORS.items()
            },
            inputs=[PlanInput(m, d) for m, d in zip(self.models, of_models, strict=True)],
            stats=self.stats,
            facts=self.facts,
            grid=self.resolved.grid,
            side=self.resolved.side,
            packs=self.packs,
        )


def gather(
    warehouse: Warehouse,
    resolved: ResolvedRecipe,
    progress: Progress | None = None,
    *,
    unnamed: Mapping[str, Checkpoint] | None = None,
    for_parts: bool = False,
) -> PlanInputs:
    """Register the recipe's checkpoints and analyse what the catalog lacks of them.

    Checkpoints in `unnamed` are not registered. Facts that a full merge finds by itself are
    gathered only for a budget, or with `for_parts`, when other budgets will be looked at.
    """
    recipe = resolved.recipe
    for checkpoint in (c for model in resolved.originals for c in model.checkpoints):
        verify_place(warehouse, checkpoint, progress)
    models = _with_tokens(warehouse, resolved)
    (progress or Silent()).warn(*_register(warehouse, recipe, models, unnamed or {}))
    merged = [t for t in recipe.tensors if is_merged(t, models)]
    experts = _experts(warehouse, resolved, models, merged, progress)
    read = _complete(experts, is_counted=bool(resolved.cost.analysis_bytes))
    # Packs are found by contents, and a plan does not depend on whether these were known before.
    for c in (c for m in (*models, *resolved.originals) for c in m.checkpoints):
        if warehouse.catalog.digests(c.checkpoint_id) is None:  # what was analysed is known
            ensure_digests(warehouse, c, progress)
    packs = _packs(warehouse, resolved, models, merged, for_parts=for_parts)
    # Histograms are looked at one expert at a time, in `_facts`.
    with Workers(threads.CATALOG) as workers:
        every = workers.map(lambda e: e.stats(("sketch", "hist")), experts.values())
        stats = dict(zip(experts, every, strict=True))
    measured = measured_facts(warehouse, recipe, models, merged, progress)
    chosen = _choose_operators(recipe, merged, measured)
    in_full = recipe.budget == Budget() and not for_parts
    tables = _facts(recipe, models, merged, experts, chosen, in_full=in_full)
    facts = TensorFacts(
        trims=tables.trims,
        outliers=tables.outliers,
        scales=tables.scales,
        measured=measured,
        chosen=chosen,
        l1s=tables.l1s,
        kept=tables.kept,
    )
    return PlanInputs(resolved, tuple(models), stats, facts, read, packs)


def _packs(
    warehouse: Warehouse,
    resolved: ResolvedRecipe,
    models: Sequence[Model],
    merged: Sequence[TensorRecipe],
    *,
    for_parts: bool,
) -> Packs | None:
    """The experts' packs, if the recipe's strategy reads packs, or others are looked at, too."""
    is_wanted = for_parts or resolved.recipe.strategy in (None, PACKS)
    if not is_wanted or resolved.request.no_packs:
        return None
    from mergepipe_pipeline.execution.packs import find_packs

    originals = resolved.models if resolved.tokenizer is None else resolved.originals
    return find_packs(warehouse, models, merged, resolved.grid, originals)


def _simulated(task: TensorTask) -> Simulate:
    # Imports compiled kernels or torch, which planning a sum of deltas can do without.
    from mergepipe_pipeline.analysis.simulate import simulation_of

    return simulation_of(task)


def _with_tokens(warehouse: Warehouse, resolved: ResolvedRecipe) -> Sequence[Model]:
    """The models; rows that the output's tokenizer asks for and a model lacks are made now."""
    if resolved.tokenizer is None:
        return resolved.models
    return Reindexer(warehouse, resolved.recipe, resolved.originals, resolved.tokenizer).models()


def _register(
    warehouse: Warehouse, recipe: Recipe, models: Sequence[Model], unnamed: Mapping[str, Checkpoint]
) -> Iterator[str]:
    """Make the recipe's checkpoints known by name; warns of names that mean other files now.

    A name's own base stays as it is.
    """
    catalog = warehouse.catalog
    known = set(catalog.names())
    base = None if recipe.base is None else models[recipe.base].checkpoint.name
    for model in models:
        for c in model.checkpoints:
            is_made = c.root.startswith(str(warehouse.token_rows))
            if c.name not in unnamed and not is_made:
                new_expert = c.name != base and c.name not in known and base not in unnamed
                registration = catalog.register(c, base if new_expert else None)
                if registration.is_new and c.name in known:
                    yield (
                        f"{c.name}: the files in {c.root} are not those that were registered "
                        f"under this name; they are version {registration.version} of it now"
                    )


def _experts(
    warehouse: Warehouse,
    resolved: ResolvedRecipe,
    models: Sequence[Model],
    merged: Sequence[TensorRecipe],
    progress: Progress | None,
) -> Experts:
    """The experts that differ from a base, with the pairs of tensors that the recipe merges."""
    pairs: dict[tuple[int, int], dict[Pair, None]] = {}
    for t in merged:
        for i in t.inputs:
            if t.base is not None:
                pairs.setdefault((i.model, t.base.model), {})[i.tensor, t.base.tensor] = None
    return {
        (expert, base): AnalysedExpert(
            warehouse, models[expert], models[base], resolved.grid, list(of), progress
        )
        for (expert, base), of in pairs.items()
    }


def _complete(experts: Experts, *, is_counted: bool) -> tuple[str, ...]:
    """Analyse what is not known of experts; the names of those that had to be read for it."""
    read = {e.expert.name: None for e in experts.values() if is_counted and e.missing()}
    for base in dict.fromkeys(base for _, base in experts):
        complete([e for (_, against), e in experts.items() if against == base])
    return tuple(read)


def _facts(
    recipe: Recipe,
    models: Sequence[Model],
    merged: Sequence[TensorRecipe],
    experts: Experts,
    chosen: Mapping[str, Choosing],
    *,
    in_full: bool,
) -> FactTables:
    """Facts of single experts that the operators ask for; squared norms weigh parts of a merge."""
    with_sq_norms = not in_full
    asked = _asked_of_experts(recipe, models, merged, chosen)
    tables = FactTables()
    every = [experts[expert, base] for expert, base, _ in asked]
    # Those of the next expert are loaded meanwhile.
    loaded = prefetch([partial(getattr, e, "histograms") for e in every] if with_sq_norms else [])
    for e, ((*_, fact), places) in zip(every, asked.items(), strict=True):
        if with_sq_norms:
            next(loaded)()
        e.add(fact, places, tables, in_full=in_full)
        if with_sq_norms:
            e.add_sq_norms(fact, places, tables)
        e.forget_histograms()
    return tables


def _asked_of_experts(
    recipe: Recipe,
    models: Sequence[Model],
    merged: Sequence[TensorRecipe],
    chosen: Mapping[str, Choosing],
) -> dict[tuple[int, int, Fact], list[Sparsified]]:
    """By (expert's model number, base's, fact): where the operators ask for that fact."""
    asked: dict[tuple[int, int, Fact], list[Sparsified]] = {}
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
