"""The verb `plan`: what will be read for a recipe under its budget, stored by id.

Earlier stages of a recipe are merged on the way: a plan names the bytes it reads, so what it reads
must be there. Their results are snapshots like any other, found again by content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.digest import canonical_json
from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.errors import NotFoundError
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.pipeline.analyze import Pair, ensure_digests, ensure_stats
from mergepipe_pipeline.pipeline.check import Checked, check, check_stage, output_view
from mergepipe_pipeline.pipeline.choices import choose_operators
from mergepipe_pipeline.pipeline.facts import ExpertFacts, FactTables, Sparsified
from mergepipe_pipeline.pipeline.measures import measured_facts
from mergepipe_pipeline.pipeline.progress import Progress
from mergepipe_pipeline.pipeline.side import side_of
from mergepipe_pipeline.pipeline.stages import run_stages
from mergepipe_pipeline.pipeline.tokens import Reindexer
from mergepipe_pipeline.planner.build import Method, PlanBuilder, PlanInput, TensorFacts
from mergepipe_pipeline.recipe.load import RawRecipe
from mergepipe_pipeline.spec.checkpoint import Checkpoint
from mergepipe_pipeline.spec.model import Model
from mergepipe_pipeline.spec.operator import Choosing, Fact
from mergepipe_pipeline.spec.plan import MergePlan
from mergepipe_pipeline.spec.recipe import Recipe, TensorRecipe
from mergepipe_pipeline.spec.stats import ExpertStats
from mergepipe_pipeline.storage.atomic import write_atomic
from mergepipe_pipeline.warehouse import Warehouse

Stats = Mapping[tuple[int, int], ExpertStats]


def make_plan(
    home: Warehouse,
    raw: RawRecipe,
    *,
    relative_to: Path | None = None,
    budget: str | None = None,
    strategy: str | None = None,
    block_elems: int | None = None,
    progress: Progress | None = None,
) -> MergePlan:
    """Check the recipe, learn what the catalog lacks, buy blocks, store the plan.

    Raises what `check` raises, and BudgetError for a budget that the strategy cannot meet.
    """
    pending: dict[str, Checkpoint] = {}
    if raw.before:
        check(home, raw, relative_to=relative_to, budget=budget, strategy=strategy)
        given = partial(plan_stage, budget=budget, strategy=strategy, block_elems=block_elems)
        pending = run_stages(home, raw, relative_to, progress, given)
    checked = check_stage(
        home,
        raw,
        pending,
        relative_to=relative_to,
        budget=budget,
        strategy=strategy,
        block_elems=block_elems,
    )
    return plan_checked(home, checked, progress, unnamed=pending)


def plan_stage(
    home: Warehouse,
    raw: RawRecipe,
    pending: Mapping[str, Checkpoint],
    relative_to: Path | None,
    progress: Progress | None,
    *,
    budget: str | None = None,
    strategy: str | None = None,
    block_elems: int | None = None,
) -> MergePlan:
    """The plan of one stage over the results of those before it."""
    checked = check_stage(
        home,
        raw,
        pending,
        relative_to=relative_to,
        budget=budget,
        strategy=strategy,
        block_elems=block_elems,
    )
    return plan_checked(home, checked, progress, unnamed=pending)


def plan_checked(
    home: Warehouse,
    checked: Checked,
    progress: Progress | None = None,
    *,
    unnamed: Mapping[str, Checkpoint] | None = None,
) -> MergePlan:
    """The plan of a checked recipe, stored. Checkpoints in `unnamed` are not registered."""
    recipe = checked.recipe
    models = _with_tokens(home, checked)
    _register(home, recipe, models, unnamed or {})
    merged = [t for t in recipe.tensors if _is_merged(t, models)]
    stats = _stats(home, checked, models, merged, progress)
    measured = measured_facts(home, recipe, models, merged, progress)
    chosen = choose_operators(recipe, merged, measured)
    tables = _facts(home, recipe, models, merged, stats, chosen, progress)
    inputs = [
        PlanInput(m, [ensure_digests(home, c, progress) for c in m.checkpoints]) for m in models
    ]
    facts = TensorFacts(tables.trims, tables.outliers, tables.scales, measured, chosen)
    methods = {name: Method(o.schema, o.coefficients, o.response) for name, o in OPERATORS.items()}
    files = checked.tokenizer.files if checked.tokenizer else None
    side = side_of(recipe, models, files)
    plan = PlanBuilder(recipe, methods, inputs, stats, facts, checked.grid, side).build()
    write_atomic(home.plan_path(plan.plan_id), canonical_json(plan.to_json()))
    return plan


def _with_tokens(home: Warehouse, checked: Checked) -> Sequence[Model]:
    """The models; rows that the output's tokenizer asks for and a model lacks are made now."""
    if checked.tokenizer is None:
        return checked.models
    return Reindexer(home, checked.recipe, checked.originals, checked.tokenizer).models()


def _register(
    home: Warehouse, recipe: Recipe, models: Sequence[Model], unnamed: Mapping[str, Checkpoint]
) -> None:
    """Make the recipe's checkpoints known by name; a name's own base stays as it is."""
    catalog = Catalog(home.catalog)
    known = set(catalog.names())
    base = None if recipe.base is None else models[recipe.base].checkpoint.name
    for model in models:
        for c in model.checkpoints:
            is_made = c.root.startswith(str(home.token_rows))
            if c.name not in unnamed and not is_made:
                new_expert = c.name != base and c.name not in known and base not in unnamed
                catalog.register(c, base if new_expert else None)


def _is_merged(t: TensorRecipe, models: Sequence[Model]) -> bool:
    like = output_view(t, models)
    return bool(t.inputs) and like.dtype in FLOATING and like.numel > 0


def _stats(
    home: Warehouse,
    checked: Checked,
    models: Sequence[Model],
    merged: Sequence[TensorRecipe],
    progress: Progress | None,
) -> dict[tuple[int, int], ExpertStats]:
    """Statistics by (expert's model number, base's)."""
    pairs: dict[tuple[int, int], dict[Pair, None]] = {}
    for t in merged:
        for i in t.inputs:
            if t.base is not None:
                pairs.setdefault((i.model, t.base.model), {})[i.tensor, t.base.tensor] = None
    return {
        (expert, base): ensure_stats(
            home, models[expert], models[base], list(wanted), checked.grid, progress
        )
        for (expert, base), wanted in pairs.items()
    }


def _facts(
    home: Warehouse,
    recipe: Recipe,
    models: Sequence[Model],
    merged: Sequence[TensorRecipe],
    stats: Stats,
    chosen: Mapping[str, Choosing],
    progress: Progress | None,
) -> FactTables:
    """Facts of single experts that the operators ask for."""
    wanted: dict[tuple[int, int, Fact], list[Sparsified]] = {}
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
                shape=output_view(t, models).shape,
                numel=view.numel,
            )
            wanted.setdefault((i.model, t.base.model, fact), []).append(s)
    tables = FactTables()
    for (expert, base, fact), places in wanted.items():
        finder = ExpertFacts(home, models[expert], models[base], stats[expert, base], progress)
        finder.add(fact, places, tables)
    return tables


def load_plan(home: Warehouse, plan_id: str) -> MergePlan:
    """A stored plan by its id. Raises NotFoundError."""
    path = home.plan_path(plan_id)
    if not path.exists():
        raise NotFoundError(
            "No such plan",
            where=str(path),
            found=plan_id,
            next_step="make it with `mergepipe plan RECIPE`",
        )
    return MergePlan.from_json(json.loads(path.read_bytes()))
