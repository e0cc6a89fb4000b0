"""The space of a search: what each coordinate of a point means, and the recipe that a point is.

A candidate is an ordinary recipe in which each source has a weight per layer, by filters on tensor
names, so that `explain`, `replay` and `verify` know it as any other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mergepipe_pipeline.domain.layers import (
    layer_count,
    layer_index,
    layer_name,
    layer_order,
    layer_stack,
)
from mergepipe_pipeline.search.search_file import SearchFile

#: Layers without a number: they are in no block.
_OUTER = ("embed", "head")


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of the result, and by which parts of its tensors' names each source is told of it."""

    name: str
    filters: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share their coordinates; `label` says which."""

    label: str
    layers: tuple[str, ...]


def layers_of(models: Sequence[Iterable[str]]) -> tuple[Layer, ...]:
    """The layers in the tensor names of the sources, in order."""
    tensors = [list(names) for names in models]
    n_layers = layer_count(name for names in tensors for name in names)
    by_layer: dict[str, list[dict[str, None]]] = {}
    for number, names in enumerate(tensors):
        for name in names:
            layer = layer_name(name, n_layers)
            filters = by_layer.setdefault(layer, [{} for _ in tensors])
            filters[number][_filter(name)] = None
    return tuple(
        Layer(name, tuple(map(tuple, by_layer[name]))) for name in sorted(by_layer, key=layer_order)
    )


def _filter(tensor: str) -> str:
    """The part that names of a tensor's layer have in common; a tensor outside them is itself."""
    stack, index = layer_stack(tensor), layer_index(tensor)
    return tensor if stack is None else f"{stack}{index}."


@dataclass(frozen=True)
class Space:
    """Coordinates of a search: per group one weight, or one for each source; then the density."""

    file: SearchFile
    layers: tuple[Layer, ...]
    blocks: tuple[tuple[str, ...], ...]

    @property
    def groups(self) -> tuple[Group, ...]:
        """The blocks, then the head and the embeddings where they are searched."""
        names = [layer.name for layer in self.layers]
        outer = [n for n in ("head", "embed") if n not in self.file.fixed and n in names]
        return (
            *(Group(_label(block), block) for block in self.blocks),
            *(Group(name, (name,)) for name in outer),
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """The meaning of each coordinate, in the order of points."""
        sources = [""] if self.file.is_mix else [f" of {s}" for s in self.file.sources]
        of_weights = [f"{group.label}{source}" for group in self.groups for source in sources]
        return (*of_weights, *(["density"] if self.file.space.density else []))

    @property
    def dims(self) -> int:
        """How many coordinates a point has."""
        return len(self.labels)

    def weights(self, point: Sequence[float]) -> dict[str, tuple[float, ...]]:
        """Per layer the weight of each source at a point."""
        fixed = self.file.fixed
        names = (layer.name for layer in self.layers)
        by_layer = {name: self._weights([fixed[name]]) for name in names if name in fixed}
        step = 1 if self.file.is_mix else len(self.file.sources)
        for number, group in enumerate(self.groups):
            weights = self._weights(point[number * step : (number + 1) * step])
            by_layer |= dict.fromkeys(group.layers, weights)
        return by_layer

    def _weights(self, coordinates: Sequence[float]) -> tuple[float, ...]:
        """The sources' weights; one coordinate is a mix of two, or what all have."""
        if self.file.is_mix:
            (x,) = coordinates
            return (x, 1.0 - x)
        low, high = self.file.space.range or (0.0, 1.0)
        each = [low + x * (high - low) for x in coordinates]
        return tuple(each) if len(each) > 1 else (each[0],) * len(self.file.sources)

    def density(self, point: Sequence[float]) -> float | None:
        """The density at a point; None where it is not searched."""
        if self.file.space.density is None:
            return None
        low, high = self.file.space.density
        return low + point[-1] * (high - low)

    def recipe(self, title: str, point: Sequence[float]) -> str:
        """The recipe of a point, as text; `title` is its first line.

        Without layers, all have one weight.
        """
        weights, density = self.weights(point), self.density(point)
        lines = [
            f"# {title}",
            f"merge_method: {self.file.merge_method}",
            f"base_model: {_text(self.file.base_model)}",
            "models:",
        ]
        for number, source in enumerate(self.file.sources):
            lines += [f"  - model: {_text(source)}", "    parameters:", "      weight:"]
            rules = [
                f"        - {{filter: {_text(part)}, value: {weights[layer.name][number]!r}}}"
                for layer in sorted(self.layers, key=lambda x: x.name in _OUTER)
                for part in layer.filters[number]
            ]
            lines += rules or ["        - {value: 0.5}"]
        parameters = {**self.file.parameters, **({} if density is None else {"density": density})}
        lines += [f"parameters: {_text(parameters)}"] if parameters else []
        lines += [] if self.file.budget is None else [f"budget: {_text(self.file.budget)}"]
        return "\n".join([*lines, ""])


def numbered(layers: Iterable[Layer]) -> tuple[str, ...]:
    """The names of layers that have a number."""
    return tuple(layer.name for layer in layers if layer.name not in _OUTER)


def _label(block: Sequence[str]) -> str:
    return block[0] if len(block) == 1 else f"{block[0]} to {block[-1]}"


def _text(value: Any) -> str:
    """A value in YAML: JSON is YAML."""
    return json.dumps(value, ensure_ascii=False)
