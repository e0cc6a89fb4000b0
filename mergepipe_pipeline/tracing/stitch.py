"""A plan with some layers of another one: what a change does in these layers alone.

Both have been merged, so that the action cache gives every layer, and nothing is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from mergepipe_pipeline.domain.plan import ExpertInput, LayerTask, MergePlan, TensorTask
from mergepipe_pipeline.domain.view import renumbered

T = TypeVar("T")


def layers_apart(plan: MergePlan, other: MergePlan) -> tuple[str, ...]:
    """The layers that both have and that differ, in plan order."""
    keys = {layer.name: layer.action_key for layer in other.layers}
    return tuple(
        layer.name
        for layer in plan.layers
        if layer.name in keys and keys[layer.name] != layer.action_key
    )


def stitched(plan: MergePlan, donor: MergePlan, layers: Collection[str]) -> MergePlan:
    """The plan with these layers as the other one has them; the rest, files included, stays."""
    sources, numbers = _joined(plan.sources, donor.sources)
    packs, pack_numbers = _joined(plan.packs, donor.packs)
    replacements = {layer.name: layer for layer in donor.layers if layer.name in layers}
    return replace(
        plan,
        recipe_text=f"# layers {', '.join(layers)} are those of plan {donor.plan_id[:16]}\n"
        + plan.recipe_text,
        sources=sources,
        roles=(*plan.roles, *(donor.roles[i] for i, n in numbers.items() if n >= len(plan.roles))),
        packs=packs,
        layers=tuple(
            _moved(replacements[layer.name], numbers, pack_numbers)
            if layer.name in replacements
            else layer
            for layer in plan.layers
        ),
    )


def _joined(first: Sequence[T], second: Sequence[T]) -> tuple[tuple[T, ...], dict[int, int]]:
    """The items of both, each once; and the place of each item of `second` among them."""
    joined = tuple(dict.fromkeys((*first, *second)))
    # If `first` has an item twice, the numbers of its items stay.
    joined = (*first, *(x for x in joined if x not in first))
    return joined, {i: joined.index(x) for i, x in enumerate(second)}


def _moved(layer: LayerTask, numbers: Mapping[int, int], packs: Mapping[int, int]) -> LayerTask:
    def of_expert(e: ExpertInput) -> ExpertInput:
        packed = e.packed and replace(e.packed, pack=packs[e.packed.pack])
        return replace(e, view=renumbered(e.view, numbers), packed=packed)

    def of_task(t: TensorTask) -> TensorTask:
        base = t.base and replace(t.base, view=renumbered(t.base.view, numbers))
        return replace(t, base=base, experts=tuple(map(of_expert, t.experts)))

    return LayerTask(layer.name, tuple(map(of_task, layer.tasks)))
