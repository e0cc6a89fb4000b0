"""A plan with some layers of another one: what a change does in these layers alone.

Both have been merged, so that the action cache gives every layer, and nothing is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from mergepipe_pipeline.spec.plan import ExpertInput, LayerTask, MergePlan, TensorTask
from mergepipe_pipeline.spec.view import renumbered

T = TypeVar("T")


def layers_apart(plan: MergePlan, other: MergePlan) -> tuple[str, ...]:
    """The layers that both have and that differ, in plan order."""
    keys = {layer.name: layer.action_key for layer in other.layers}
    return tuple(
        layer.name
        for layer in plan.layers
        if layer.name in keys and keys[layer.name] != layer.action_key
    )


def stitched(plan: MergePlan, other: MergePlan, layers: Collection[str]) -> MergePlan:
    """The plan with these layers as the other one has them; the rest, files included, stays."""
    sources, numbers = _joined(plan.sources, other.sources)
    packs, pack_numbers = _joined(plan.packs, other.packs)
    theirs = {layer.name: layer for layer in other.layers if layer.name in layers}
    return replace(
        plan,
        recipe_text=f"# layers {', '.join(layers)} are those of plan {other.plan_id[:16]}\n"
        + plan.recipe_text,
        sources=sources,
        roles=(*plan.roles, *(other.roles[i] for i, n in numbers.items() if n >= len(plan.roles))),
        packs=packs,
        layers=tuple(
            _moved(theirs[layer.name], numbers, pack_numbers) if layer.name in theirs else layer
            for layer in plan.layers
        ),
    )


def _joined(ours: Sequence[T], theirs: Sequence[T]) -> tuple[tuple[T, ...], dict[int, int]]:
    """All of both, each once, ours first; and where each of theirs is among them."""
    joined = tuple(dict.fromkeys((*ours, *theirs)))
    # A sequence of ours that names one twice keeps its numbers.
    joined = (*ours, *(x for x in joined if x not in ours))
    return joined, {i: joined.index(x) for i, x in enumerate(theirs)}


def _moved(layer: LayerTask, numbers: Mapping[int, int], packs: Mapping[int, int]) -> LayerTask:
    def of_expert(e: ExpertInput) -> ExpertInput:
        packed = e.packed and replace(e.packed, pack=packs[e.packed.pack])
        return replace(e, view=renumbered(e.view, numbers), packed=packed)

    def of_task(t: TensorTask) -> TensorTask:
        base = t.base and replace(t.base, view=renumbered(t.base.view, numbers))
        return replace(t, base=base, experts=tuple(map(of_expert, t.experts)))

    return LayerTask(layer.name, tuple(map(of_task, layer.tasks)))
