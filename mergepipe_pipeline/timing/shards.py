"""Cuts a plan into shards that take about as long as each other.

A shard is a set of layers that one worker merges. The cut follows from the plan, the number of
shards and what this machine was measured to do, so that workers that do not talk to each other cut
alike. What is in the page cache takes no part: each worker has its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mergepipe_pipeline.domain.machine_profile import MachineProfile
from mergepipe_pipeline.domain.outcome import Shard
from mergepipe_pipeline.domain.plan import LayerTask, MergePlan
from mergepipe_pipeline.storage.profile import load_profile
from mergepipe_pipeline.timing.forecast import cold_work
from mergepipe_pipeline.timing.time_model import measured_as, seconds
from mergepipe_pipeline.warehouse import Warehouse


def shards_of(
    warehouse: Warehouse, plan: MergePlan, count: int, only: Sequence[str] | None = None
) -> tuple[Shard, ...]:
    """The named layers of a plan (default: all) in `count` shards, some of them maybe empty."""
    layers = [layer for layer in plan.layers if only is None or layer.name in only]
    costs, unit = _costs(plan, layers, load_profile(warehouse.profile_path))
    return tuple(
        Shard(number, count, names, sum(costs[name] for name in names), unit)
        for number, names in enumerate(balanced(costs, count), 1)
    )


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


def _costs(
    plan: MergePlan, layers: Sequence[LayerTask], profile: MachineProfile | None
) -> tuple[dict[str, float], str]:
    works = {layer.name: cold_work(plan, [layer]) for layer in layers}
    if profile and profile.engine and measured_as(plan.method) in profile.engine.methods:
        return {name: seconds(w, profile).merging_s for name, w in works.items()}, "s"
    return {n: float(w.cold_nbytes + w.output_nbytes) for n, w in works.items()}, "bytes"
