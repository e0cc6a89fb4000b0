"""What merging a plan in shards takes: which layers are whose, and what each has cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mergepipe_pipeline.concurrency.memory import peak_nbytes
from mergepipe_pipeline.deploy.layer_records import LayerRecord, LayerRecords
from mergepipe_pipeline.domain.outcome import LayerOutcome, Shard
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.execution.run import run_layers
from mergepipe_pipeline.timing.shards import shards_of
from mergepipe_pipeline.warehouse import Warehouse


def shard_of(
    warehouse: Warehouse, plan: MergePlan, number: int, count: int, layers: Sequence[str]
) -> Shard:
    """Shard `number` of `count`, from 1, of a plan's named layers; empty for a number above."""
    if number > count:
        return Shard(number, count, (), 0.0, "bytes")
    return shards_of(warehouse, plan, count, layers)[number - 1]


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
