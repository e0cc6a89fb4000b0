"""What merging a plan in shards takes: which layers are whose, and what each has cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mergepipe_pipeline.concurrency.threads import peak_nbytes
from mergepipe_pipeline.deploy.layer_records import LayerRecord, LayerRecords
from mergepipe_pipeline.domain.outcome import LayerOutcome, Shard
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.execution.run import run_layers
from mergepipe_pipeline.warehouse import Warehouse


def shard_of(plan: MergePlan, number: int, count: int, only: Sequence[str]) -> Shard:
    """Shard `number` of `count`, from 1, of a plan's named layers; empty for a number above.

    The cut follows from the plan and the number of shards, so that workers that do not talk to each
    other cut alike.
    """
    layers = {layer.name: layer.nbytes for layer in plan.layers if layer.name in only}
    names = balanced(layers, count)[number - 1] if number <= count else ()
    return Shard(number, count, names, sum(layers[name] for name in names))


def balanced(costs: Mapping[str, float], count: int) -> tuple[tuple[str, ...], ...]:
    """Names in `count` groups of about equal cost, each group in the order of `costs`.

    The dearest that is left goes to the group that has least; no group has more than 4/3 of what
    the largest group of the best cut has.
    """
    names = list(costs)
    loads = [0.0] * count
    group_of = {}
    for name in sorted(names, key=lambda n: -costs[n]):
        group = loads.index(min(loads))
        loads[group] += costs[name]
        group_of[name] = group
    return tuple(tuple(n for n in names if group_of[n] == group) for group in range(count))


def run_recorded(
    warehouse: Warehouse,
    recipe: str,
    plan: MergePlan,
    layers: Sequence[str],
    options: EngineOptions,
    shard: int = 1,
) -> Iterator[LayerOutcome]:
    """Run or reuse layers of a recipe's plan, and remember what each has cost, and whom."""
    records = LayerRecords(warehouse.layer_records_dir(recipe))
    for done in run_layers(warehouse, plan, layers, options=options):
        records.keep(plan, shard, done, peak_nbytes())
        yield done


def merged_layers(warehouse: Warehouse, recipe: str, plan: MergePlan) -> Sequence[LayerRecord]:
    """What the layers of a plan cost so far, over all workers and runs."""
    return list(LayerRecords(warehouse.layer_records_dir(recipe)).of(plan))
