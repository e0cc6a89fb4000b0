"""How far a merge under a budget is from the full one, as `compare` found it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mergepipe_pipeline.catalog.catalog import Fact
from mergepipe_pipeline.domain.layers import layer_count, layer_name, layer_order
from mergepipe_pipeline.domain.plan import LayerTask, MergePlan, TensorTask
from mergepipe_pipeline.warehouse import Warehouse

#: The catalog's name for what is remembered: per tensor ‖W_part − W_full‖² and, if the base was
#: there, ‖W_full − W_base‖². The owner is the part's plan, the base the full one's.
FACT = "realised-error"


@dataclass(frozen=True, slots=True)
class LayerDistance:
    """One layer: ‖W_part − W_full‖₂, and ‖W_full − W_base‖₂ where the base was there."""

    layer: str
    error: float
    update: float | None

    @property
    def relative(self) -> float | None:
        """The error as a share of the update; None where there is none."""
        return self.error / self.update if self.update else None


@dataclass(frozen=True)
class Comparison:
    """How far one plan's result is from another's, as written: after the cast to their dtype."""

    plan_id: str
    full_plan_id: str
    layers: tuple[LayerDistance, ...]

    @property
    def whole(self) -> LayerDistance:
        """All layers together."""
        updates = [x.update for x in self.layers if x.update is not None]
        update = math.hypot(*updates) if len(updates) == len(self.layers) else None
        return LayerDistance("all", math.hypot(*(x.error for x in self.layers)), update)


def full_plan_id(plan: MergePlan) -> str:
    """The id of the plan that reads everything and is otherwise the same."""
    return replace(plan, layers=tuple(map(_full_layer, plan.layers))).plan_id


def _full_layer(layer: LayerTask) -> LayerTask:
    return replace(layer, tasks=tuple(map(_full_task, layer.tasks)))


def _full_task(task: TensorTask) -> TensorTask:
    whole = (replace(e, covered=((0, e.view.numel),), packed=None) for e in task.experts)
    return replace(task, experts=tuple(whole))


def known_comparison(warehouse: Warehouse, plan: MergePlan) -> Comparison | None:
    """What `compare` found for a plan's result and the full merge, or None. Reads no weight."""
    full = full_plan_id(plan)
    facts = warehouse.catalog.fact(full, plan.plan_id, FACT)
    return _comparison(plan.plan_id, full, facts) if facts else None


def _comparison(plan_id: str, full_id: str, facts: Mapping[str, Fact]) -> Comparison:
    """Tensors' squares summed by layer."""
    count = layer_count(facts)
    layers: dict[str, list[Fact]] = {}
    for name, fact in facts.items():
        layers.setdefault(layer_name(name, count), []).append(fact)
    distances = []
    for layer in sorted(layers, key=layer_order):
        updates = [fact[1] for fact in layers[layer] if len(fact) > 1]
        update = math.sqrt(sum(updates)) if len(updates) == len(layers[layer]) else None
        error = math.sqrt(sum(fact[0] for fact in layers[layer]))
        distances.append(LayerDistance(layer, error, update))
    return Comparison(plan_id, full_id, tuple(distances))
