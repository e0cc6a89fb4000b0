"""Whether the layers of a result have the tensors that its config asks for.

A config of the template's class asks for such tensors as the template has, of their shapes. What
its own layers differ in, a config may say of others, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from mergepipe_pipeline.domain.layers import is_buffer, layer_index, layer_stack, with_layer_index
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.recipe import Recipe
from mergepipe_pipeline.errors import IncompatibleCheckpointsError
from mergepipe_pipeline.resolution.layer_config import (
    EXPERTS,
    LISTED_KINDS,
    Layers,
    layer_sources,
    layers_of,
)

Shape = tuple[int, ...]
#: Parts of layers that are sparse or not, as a config with experts says.
_FEED_FORWARD = re.compile(r"\.(?:mlp|feed_forward|block_sparse_moe)\.|expert|router")


class _Tensor(NamedTuple):
    """A tensor in layer `number` of a model; `name` is that of layer 0."""

    model: Model
    number: int
    name: str
    shape: Shape


def refuse_unlike_layers(recipe: Recipe, models: Sequence[Model], template: int) -> None:
    """Raise IncompatibleCheckpointsError for layers that the config of `template` does not fit."""
    if models[template].is_partial:
        return
    for stack in dict.fromkeys(layer_stack(t.name) for t in recipe.tensors):
        if stack is not None:
            parts = {m: layers_of(models[m], stack) for m in sorted({*recipe.used, template})}
            own = parts[template]
            found = _found(recipe, parts, stack)
            _refuse_unlike(found, own, [*_foreign(recipe, parts, own, stack)], stack)


def _found(recipe: Recipe, parts: Mapping[int, Layers], stack: str) -> list[dict[str, _Tensor]]:
    """The tensors of each layer of the result, by name.

    A layer beyond those that its model's config counts is none; as one of a slice it is refused.
    """
    found: dict[int, dict[str, _Tensor]] = {}
    for t in recipe.tensors:
        sources = layer_sources(t, recipe.method) if layer_stack(t.name) == stack else []
        if not sources or is_buffer(t.name):
            continue
        first = t.inputs[0] if t.base is None else t.base
        shape = parts[first.model].model.views[first.tensor].shape
        (model, number), name = sources[0], with_layer_index(t.name, 0)
        tensor, n = _Tensor(parts[model].model, number, name, shape), parts[model].n
        if number >= n:
            if stack in dict(recipe.sliced):
                title = "A slice takes a layer that the config does not count"
                raise _error(title, tensor, f"layers 0 to {n - 1}", f"layer {number}")
            continue
        found.setdefault(layer_index(t.name) or 0, {})[name] = tensor
    return list(found.values())


def _foreign(
    recipe: Recipe, parts: Mapping[int, Layers], own: Layers, stack: str
) -> Iterator[_Tensor]:
    """The tensors of layers that are merged of models of another class, as their configs say.

    What such a layer has besides changes what it computes.
    """
    kind = own.values.get("model_type")
    kinds = {model: part.values.get("model_type") for model, part in parts.items()}
    others = {model for model, of in kinds.items() if None not in (kind, of) and of != kind}
    if not others:
        return
    sources = (s for t in recipe.tensors for s in t.sources if s[0] in others)
    used = {(model, layer_index(name)) for model, name in sources if layer_stack(name) == stack}
    for model in sorted(others):
        yield from (t for t in _tensors(parts[model], stack) if (model, t.number) in used)


def _refuse_unlike(
    found: Sequence[Mapping[str, _Tensor]], own: Layers, foreign: Sequence[_Tensor], stack: str
) -> None:
    """Raise IncompatibleCheckpointsError for layers with other tensors than `own` has."""
    shapes, config = _shapes(own, stack), f"the config of {own.model.name!r}"
    may_differ = _may_differ(own)
    always = [n for n, of_all in shapes.items() if len(of_all) == own.n and not may_differ(n)]
    for layer in found:
        for name, tensor in layer.items():
            known = {*shapes.get(name, ())}
            if len(known) == 1 and tensor.shape not in known:
                title = "Layers whose tensors have other shapes fit no config"
                expected = f"{list(*known)}, as in {own.model.name}"
                raise _error(title, tensor, expected, f"{list(tensor.shape)}")
        for name in always:
            if name not in layer:
                # The layer is named after a model that lacks it, and not after the template.
                of = next((t for t in layer.values() if t.model is not own.model), None)
                tensor = (of or next(iter(layer.values())))._replace(name=name)
                title = f"A layer lacks a tensor that {config} asks for"
                raise _error(title, tensor, f"a tensor, as in {own.model.name}", "none")
    for tensor in (*(t for layer in found for t in layer.values()), *foreign):
        if tensor.name not in shapes and not may_differ(tensor.name):
            title = f"A layer has a tensor that {config} does not ask for"
            raise _error(title, tensor, f"none, as in {own.model.name}", "a tensor")


def _may_differ(own: Layers) -> Callable[[str], bool]:
    """Which tensors some layers have, and others not, as a config of this class says."""
    if any(key in own.values for key in LISTED_KINDS):
        return lambda _: True
    if EXPERTS in (own.rules or {}):
        return lambda name: _FEED_FORWARD.search(name) is not None
    return lambda _: False


def _shapes(part: Layers, stack: str) -> dict[str, list[Shape]]:
    """The shapes of each tensor in a stack's layers, by its name in layer 0."""
    shapes: dict[str, list[Shape]] = {}
    for tensor in _tensors(part, stack):
        shapes.setdefault(tensor.name, []).append(tensor.shape)
    return shapes


def _tensors(part: Layers, stack: str) -> Iterator[_Tensor]:
    """The tensors of the layers that a model's config counts, but for buffers."""
    for name, view in part.model.views.items():
        number = layer_index(name) or 0
        if layer_stack(name) == stack and number < part.n and not is_buffer(name):
            yield _Tensor(part.model, number, with_layer_index(name, 0), view.shape)


def _error(title: str, tensor: _Tensor, expected: str, found: str) -> IncompatibleCheckpointsError:
    name = with_layer_index(tensor.name, tensor.number)
    return IncompatibleCheckpointsError(
        title,
        where=f"{tensor.model.checkpoint.root}, tensor {name}",
        expected=expected,
        found=found,
        next_step="merge layers with equal tensors, or leave this one out",
    )
