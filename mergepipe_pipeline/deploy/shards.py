"""How the layers of a plan are shared among workers, and what each layer cost whom.

A record is a file per layer, written by who merged it. Several workers merge the layers of one plan
at once, on machines of their own, and one of them may be killed at any moment: a file that all of
them rewrite would lose what the others wrote.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mergepipe_pipeline.concurrency.threads import peak_nbytes
from mergepipe_pipeline.domain.outcome import LayerOutcome, Realised, Shard
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.execution.run import run_layers
from mergepipe_pipeline.storage.forms import keep_record, kept_record
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """The cost of a layer in shard `shard` of the plan, and who merged it.

    `worker` is a machine and a process, `held_nbytes` the most memory it had held until then.
    """

    plan_id: str
    shard: int
    worker: str
    held_nbytes: int
    cost: Realised


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
    """Run or reuse layers of a recipe's plan, and remember what each has cost, and whom.

    One that is reused keeps what this plan has paid for it before.
    """
    worker = f"{platform.node()}:{os.getpid()}"
    for done in run_layers(warehouse, plan, layers, options=options):
        if not done.reused or _kept(warehouse, recipe, plan, done.name) is None:
            cost, held = Realised.total([done.cost]), peak_nbytes()
            record = LayerRecord(plan.plan_id, shard, worker, held, cost)
            keep_record(_path(warehouse, recipe, done.name), record)
        yield done


def merged_layers(warehouse: Warehouse, recipe: str, plan: MergePlan) -> list[LayerRecord]:
    """The costs of a plan's layers so far, over all workers and runs, in the plan's order."""
    records = (_kept(warehouse, recipe, plan, layer.name) for layer in plan.layers)
    return [record for record in records if record is not None]


def _kept(warehouse: Warehouse, recipe: str, plan: MergePlan, layer: str) -> LayerRecord | None:
    """The record of a layer, if it is this plan's."""
    record = kept_record(_path(warehouse, recipe, layer), LayerRecord)
    return record if record and record.plan_id == plan.plan_id else None


def _path(warehouse: Warehouse, recipe: str, layer: str) -> Path:
    return warehouse.layer_records_dir(recipe) / f"{layer}.json"
