"""Whether the layers of a result have the tensors that its config asks for.

A config of the template's class asks for such tensors as the template has, of their shapes. What
its own layers differ in, a config may say of others, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mergepipe_pipeline.domain.layers import is_buffer, layer_index, layer_stack, with_layer_index
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.recipe import Recipe
from mergepipe_pipeline.errors import IncompatibleCheckpointsError
from mergepipe_pipeline.resolution.layer_config import EXPERTS, Layers, layer_sources, layers_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Layer:
    """A layer of the result, which comes from layer `number` of a model; its tensors' shapes.

    Names are those of layer 0.
    """

    model: Model
    number: int
    shapes: dict[str, Shape] = field(default_factory=dict)


def refuse_unlike_layers(recipe: Recipe, models: Sequence[Model], template: int) -> None:
    """Raise IncompatibleCheckpointsError for layers that the config of `template` does not fit."""
    if models[template].is_partial:
        return
    for stack in dict.fromkeys(layer_stack(t.name) for t in recipe.tensors):
        if stack is not None:
            parts = {m: layers_of(models[m], stack) for m in sorted({*recipe.used, template})}
            _refuse_unlike(_found(recipe, parts, stack), parts, parts[template], stack)


def _found(recipe: Recipe, parts: Mapping[int, Layers], stack: str) -> list[_Layer]:
    """The layers of the result; one beyond those that its model's config counts is none."""
    found: dict[int, _Layer] = {}
    for t in recipe.tensors:
        sources = layer_sources(t, recipe.method) if layer_stack(t.name) == stack else []
        if not sources or is_buffer(t.name) or sources[0][1] >= parts[sources[0][0]].n:
            continue
        model, number = sources[0]
        layer = found.setdefault(layer_index(t.name) or 0, _Layer(parts[model].model, number))
        first = t.inputs[0] if t.base is None else t.base
        shape = parts[first.model].model.views[first.tensor].shape
        layer.shapes[with_layer_index(t.name, 0)] = shape
    return list(found.values())


def _refuse_unlike(
    found: Iterable[_Layer], parts: Mapping[int, Layers], own: Layers, stack: str
) -> None:
    """Raise IncompatibleCheckpointsError for a layer with other tensors than `own` has."""
    shapes, config = _shapes(own, stack), f"the config of {own.model.name!r}"
    always = {name for name, of_all in shapes.items() if len(of_all) == own.n}
    has_kinds = EXPERTS in (own.rules or {})  # its config says which layers have experts
    for layer in found:
        for name, shape in layer.shapes.items():
            known = {*shapes.get(name, ())}
            if len(known) == 1 and shape not in known:
                title = "Layers whose tensors have other shapes fit no config"
                raise _error(title, layer, name, f"{list(*known)}, as in {own.model.name}", shape)
        if not has_kinds and (lacking := sorted(always - layer.shapes.keys())):
            title = f"A layer lacks a tensor that {config} asks for"
            raise _error(title, layer, lacking[0], f"a tensor, as in {own.model.name}", "none")
    # What another class has besides changes what its layers compute.
    kind = own.values.get("model_type")
    foreign = [part for part in parts.values() if part.values.get("model_type") != kind]
    whole = [_Layer(part.model, 0, dict.fromkeys(_shapes(part, stack), ())) for part in foreign]
    for layer in (*found, *whole) if not has_kinds else ():
        if more := sorted(layer.shapes.keys() - shapes.keys()):
            title = f"A layer has a tensor that {config} does not ask for"
            raise _error(title, layer, more[0], f"none, as in {own.model.name}", "a tensor")


def _shapes(part: Layers, stack: str) -> dict[str, list[Shape]]:
    """The shapes of each tensor in a stack's layers, by its name in layer 0."""
    shapes: dict[str, list[Shape]] = {}
    for name, view in part.model.views.items():
        if layer_stack(name) == stack and not is_buffer(name) and (layer_index(name) or 0) < part.n:
            shapes.setdefault(with_layer_index(name, 0), []).append(view.shape)
    return shapes


def _error(
    title: str, layer: _Layer, name: str, expected: str, found: str | Shape
) -> IncompatibleCheckpointsError:
    return IncompatibleCheckpointsError(
        title,
        where=f"{layer.model.checkpoint.root}, tensor {with_layer_index(name, layer.number)}",
        expected=expected,
        found=found if isinstance(found, str) else f"{list(found)}",
        next_step="merge models of one class and size, or leave this one out",
    )
