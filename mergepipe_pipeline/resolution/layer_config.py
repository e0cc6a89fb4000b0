"""The layers in config.json of a result of slices: how many, and what each of them is.

What a layer is (windows, rope, experts, …) goes with it to its new place. What no config can say of
layers in such an order is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mergepipe_pipeline.domain.layers import (
    layer_index,
    layer_stack,
    stack_counts,
)
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.model_config import at_place, config_places
from mergepipe_pipeline.domain.plan import ConfigValue
from mergepipe_pipeline.domain.recipe import Recipe, TensorRecipe
from mergepipe_pipeline.errors import CheckpointError, IncompatibleCheckpointsError
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.resolution.layer_rules import (
    CHOOSING_KEYS,
    NUMBERED_KEYS,
    Rule,
    numbered,
    rules_of,
)

_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_transformer_layers")
#: The keys of towers' own parts, and of the stacks of a model that encodes and decodes.
_TOWER_KEYS = (*_LAYER_KEYS, "depth", "encoder_layers")
_DECODER_KEYS = ("decoder_layers", "num_decoder_layers")
_ENCODER_KEYS = (*_LAYER_KEYS, "encoder_layers", "num_encoder_layers")
_TOWER = re.compile(r"(?:^|\.)(?:(audio)|vision|visual)")
#: Lists that have as many entries as a model has layers by chance alone.
_OTHER_LISTS = re.compile(
    r"token|architectures|keys_to_ignore|^(?:mlp|qkv|ssm)_multipliers$|limit$|section|languages"
    r"|label|pinpoints|resolution|^(?:crop|image|patch|window)_size$|stride|^pos_att_type$"
)
#: Texts with a letter per layer, and objects with a key per layer.
_PATTERNS = ("hybrid_override_pattern",)
_BY_NUMBER = ("per_layer_config",)
#: Lists that say which parts each layer has.
LISTED_KINDS = (*_PATTERNS, *_BY_NUMBER, "block_configs")
#: Whether layers are sparse, and tensors of those that are.
EXPERTS, _OF_EXPERTS = "mlp_layer_types", re.compile(r"expert|moe|router")
#: Names of one kind of layers.
SAME_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
#: What a layer is of which nothing is said.
_UNKNOWN = object()
_PLACES = "layers at their places"


@dataclass(frozen=True)
class Layers:
    """A stack of `n` layers as a model's config has it: `values`, in its part called `part`."""

    model: Model
    config: Mapping[str, Any]
    part: str | None
    values: Mapping[str, Any]
    n: int

    @property
    def rules(self) -> Mapping[str, Rule] | None:
        """How its class says what layers are; None for a class that is not known."""
        return rules_of(self.values.get("model_type"))

    @property
    def where(self) -> str:
        """The config's place, for errors."""
        return f"{self.model.checkpoint.root}, config.json"

    def places(self, key: str) -> list[str]:
        """Where the config has a key of these layers, or would have it; a part may repeat it."""
        part = None if self.part is None else f"{self.part}.{key}"
        inner = self.part is not None and key in self.config[self.part]
        top = key in self.config and self.part in (None, "text_config")
        found = [key] * top + [part] * (part is not None and inner)
        return [place for place in found if place] or [part or key]


def depth_of(model: Model) -> int | None:
    """The number of layers that a model's config states; None where it states none."""
    places = config_places(model.stated, _LAYER_KEYS)
    depths = [at_place(model.stated, place) for place in places]
    return next((n for n in depths if isinstance(n, int) and n > 0), None)


def kinds_of(model: Model) -> dict[str, Sequence[Any]]:
    """The kinds of the layers of a model's text, by what is chosen, as rules of its class tell.

    Raises CheckpointError for a config that is not valid.
    """
    part = layers_of(model, "")
    kinds = {topic: _kinds(part, rule) for topic, rule in (part.rules or {}).items()}
    return {topic: known for topic, known in kinds.items() if known}


def layer_changes(
    recipe: Recipe, models: Sequence[Model], template: int
) -> list[tuple[str, ConfigValue]]:
    """List what slices change in the config of the model `template`, as (dotted place, value).

    Raises IncompatibleCheckpointsError for what no config can say, CheckpointError for a config
    that is not valid.
    """
    config = models[template].stated
    changes: list[tuple[str, ConfigValue]] = []
    for stack, n in recipe.sliced:
        depths = _depth_places(config, stack)
        if not depths:
            _refuse_unknown_part(models[template], config, stack, n)
        changes += [(place, n) for place in depths if at_place(config, place) != n]
        _refuse_mixed(recipe, models, stack)
        changes += _Stack.of(recipe, models, template, stack, n).changes()
    return changes


def layer_sources(t: TensorRecipe, method: str) -> list[tuple[int, int]]:
    """The layers that an output tensor is merged from, (model, number): the base's first, where the
    method does not merge it like others, and then it may be no source at all.
    """
    base = () if t.base is None else ((t.base.model, t.base.tensor),)
    inputs = tuple((i.model, i.tensor) for i in t.inputs)
    sources = inputs if inputs and OPERATORS[method].schema.base == "none" else (*base, *inputs)
    numbered = [(model, layer_index(tensor)) for model, tensor in sources]
    return [(model, layer) for model, layer in numbered if layer is not None]


def _refuse_mixed(recipe: Recipe, models: Sequence[Model], stack: str) -> None:
    """Raise IncompatibleCheckpointsError where layers of two kinds are merged into one."""
    kinds: dict[int, dict[str, Sequence[Any]]] = {}
    for t in recipe.tensors:
        sources = layer_sources(t, recipe.method) if layer_stack(t.name) == stack else []
        seen: dict[str, tuple[Any, int, int]] = {}
        for model, layer in sources:
            if model not in kinds:
                kinds[model] = _all_kinds(layers_of(models[model], stack))
            for topic, known in kinds[model].items():
                if layer >= len(known):
                    continue
                kind, other, at = seen.setdefault(topic, (known[layer], model, layer))
                if _plain(kind) != _plain(known[layer]):
                    raise IncompatibleCheckpointsError(
                        "Layers of two kinds cannot be merged into one",
                        where=f"layer {layer_index(t.name)} of {stack}, {topic}",
                        expected=f"{kind}, as layer {at} of {models[other].name}",
                        found=f"{known[layer]}, as layer {layer} of {models[model].name}",
                        next_step="choose ranges in which layers of one kind meet",
                    )


def _plain(kind: Any) -> Any:
    return SAME_KINDS.get(kind, kind) if isinstance(kind, str) else kind


def _all_kinds(part: Layers) -> dict[str, Sequence[Any]]:
    """The kinds of layers that rules of their class tell, and those that a config lists."""
    by_rules = {topic: _kinds(part, rule) for topic, rule in (part.rules or {}).items()}
    by_list = {key: _entries(part, key) for key in ("layer_types", *_PATTERNS)}
    found = {**by_list, **by_rules}
    return {topic: known for topic, known in found.items() if known}


def _refuse_unknown_part(model: Model, config: Mapping[str, Any], stack: str, n: int) -> None:
    """Raise IncompatibleCheckpointsError where a part that is not known states the depth."""
    parts = [
        name
        for name, part in config.items()
        if isinstance(part, dict) and any(key in part for key in _LAYER_KEYS)
    ]
    counted = stack_counts(model.views).get(stack)
    if parts and n != counted:
        raise IncompatibleCheckpointsError(
            "The number of layers is stated in a part of the config that is not known",
            where=f"{model.checkpoint.root}, config.json",
            expected=f"the depth of `{stack}` in the config itself or in text_config",
            found=f"parts {', '.join(parts)}"[:160],
            next_step=f"choose slices of {counted} layers in all",
        )


def _depth_places(config: Mapping[str, Any], stack: str) -> list[str]:
    """Where a config states the number of layers of a stack.

    A part of a config may leave it out, where it is what its class assumes.
    """
    name = _part_name(config, stack)
    part = {} if name is None else config[name]
    if name is not None and name != "text_config":
        stated = [f"{name}.{k}" for k in _TOWER_KEYS if k in part]
    elif any(key in config for key in _DECODER_KEYS):
        keys = _DECODER_KEYS if "decoder" in stack else _ENCODER_KEYS
        stated = [key for key in keys if key in config]
    else:
        stated = config_places(config, _LAYER_KEYS) if not _TOWER.search(stack) else []
    return stated or ([] if name is None else [f"{name}.num_hidden_layers"])


def _part_name(config: Mapping[str, Any], stack: str) -> str | None:
    """The part of a config that describes a stack, None where the config itself does."""
    tower = _TOWER.search(stack)
    names = [key for key in ("encoder", "decoder") if re.search(rf"(?:^|\.){key}\.", stack)]
    if tower is None:
        names.append("text_config")
    else:
        names = ["audio_config" if tower[1] else "vision_config"]
    return next((name for name in names if isinstance(config.get(name), dict)), None)


def layers_of(model: Model, stack: str) -> Layers:
    """A model's layers of a stack, as its config has them."""
    config = model.stated
    part = _part_name(config, stack)
    values = dict(config) if part is None else dict(config[part])
    if part == "text_config":
        values = {**config, **values}
    if part is None and _TOWER.search(stack):  # of nothing is known but the layers themselves
        values = {}
    stated = [at_place(config, place) for place in _depth_places(config, stack)]
    n = next((n for n in stated if isinstance(n, int) and n > 0), None)
    if n is None:
        n = stack_counts(model.views).get(stack, 0)
    return Layers(model, config, part, values, n)


@dataclass(frozen=True)
class _Stack:
    """The layers of a result's stack: of which model each one is, and which one there.

    `parts` are what the models' configs say, by number of the model; `own` is the template's.
    """

    order: tuple[tuple[int, int], ...]
    parts: Mapping[int, Layers]
    own: Layers

    @staticmethod
    def of(recipe: Recipe, models: Sequence[Model], template: int, stack: str, n: int) -> _Stack:
        """The stack of a recipe's output; a layer is what the first of its sources is."""
        found: dict[int, tuple[int, int]] = {}
        for t in recipe.tensors:
            layer, sources = layer_index(t.name), layer_sources(t, recipe.method)
            if layer_stack(t.name) == stack and layer is not None and sources:
                found.setdefault(layer, sources[0])
        order = tuple(found[i] for i in range(n) if i in found)
        parts = {m: layers_of(models[m], stack) for m, _ in order}
        return _Stack(order, parts, parts.get(template) or layers_of(models[template], stack))

    def changes(self) -> list[tuple[str, ConfigValue]]:
        """List what to set in the template's config, as (dotted place, value)."""
        parts = (*self.parts.values(), self.own)
        for part in parts:
            _check_layer_types(part)
        if self._stays() and all(part is self.own for part in parts):
            return []
        if self.own.rules is None:
            self._refuse_unknown()
        changes = self._by_rules()
        ruled = {*(self.own.rules or {}), *changes, *NUMBERED_KEYS}
        for key in dict.fromkeys(key for part in parts for key in part.values):
            if key not in ruled and any(_entries(part, key) is not None for part in parts):
                changes[key] = self._by_list(key)
        return [
            (place, value)
            for key, value in changes.items()
            for place in self.own.places(key)
            if at_place(self.own.config, place) != value
        ]

    def _stays(self) -> bool:
        """Whether each layer keeps its number, and each model's number of layers."""
        kept = all(i == place for place, (_, i) in enumerate(self.order))
        return kept and all(part.n == self.n for part in (*self.parts.values(), self.own))

    @property
    def n(self) -> int:
        """The number of the result's layers."""
        return len(self.order)

    def _of_each(self, by_model: Mapping[int, Sequence[Any] | None]) -> list[Any]:
        """The kind of each layer of the result, by what the models' layers are.

        Layers of which nothing is said are as all others are, where these are alike.
        """
        found = [
            known[i] if (known := by_model[m]) is not None and i < len(known) else _UNKNOWN
            for m, i in self.order
        ]
        told = [kind for kind in found if kind is not _UNKNOWN]
        if not told or any(kind != told[0] for kind in told):
            return found
        return told[:1] * self.n

    def _by_rules(self) -> dict[str, ConfigValue]:
        """The changes that the rules of the models' classes ask for, by key."""
        rules = {m: dict(part.rules or {}) for m, part in self.parts.items()}
        own = dict(self.own.rules or {})
        for key in NUMBERED_KEYS if self.own.rules is None else ():
            for part, known in ((self.own, own), *((self.parts[m], rules[m]) for m in rules)):
                if isinstance(part.values.get(key), list):
                    known[key] = numbered(key)
        changes: dict[str, ConfigValue] = {}
        for topic in dict.fromkeys(t for known in (own, *rules.values()) for t in known):
            kinds = {m: _kinds(p, rules[m].get(topic), topic) for m, p in self.parts.items()}
            wanted = self._of_each(kinds)
            rule = own.get(topic)
            if rule is None and all(kind == wanted[0] for kind in wanted):
                continue
            change = (
                self._saying(rule, changes, wanted) if rule and _UNKNOWN not in wanted else None
            )
            if change is None:
                untold = [m for m, known in kinds.items() if known is None and topic in rules[m]]
                raise self._unsayable(topic, untold, rule)
            changes |= change
        return changes

    def _saying(
        self, rule: Rule, changes: Mapping[str, ConfigValue], wanted: Sequence[Any]
    ) -> dict[str, Any] | None:
        """The changes beyond these that make a config say what is wanted; None: there are none."""
        values = {**self.own.values, **changes}
        for change in ({}, *rule.changes(values, wanted)):
            if rule.kinds({**values, **change}, self.n) == wanted:
                return dict(change)
        return None

    def _by_list(self, key: str) -> ConfigValue:
        """The entries under `key` in the order of the result's layers."""
        by_model = {m: _entries(part, key) for m, part in self.parts.items()}
        entries = self._of_each(by_model)
        if _UNKNOWN in entries:
            raise self._unsayable(key, [m for m, known in by_model.items() if known is None])
        if key in _PATTERNS:
            return "".join(entries)
        if key in _BY_NUMBER:
            return {str(i): entry for i, entry in enumerate(entries) if entry is not None}
        return entries

    def _refuse_unknown(self) -> None:
        """Raise IncompatibleCheckpointsError where unknown code may choose by layers' numbers."""
        if self._stays():
            return
        for part in (*self.parts.values(), self.own):
            for key, neutral in CHOOSING_KEYS.items():
                value = part.values.get(key)
                if value is None or value in neutral or _entries(part, key) is not None:
                    continue
                if key == "max_window_layers" and not part.values.get("use_sliding_window"):
                    continue
                raise IncompatibleCheckpointsError(
                    "Layers cannot change places: their numbers choose what they are",
                    where=f"{part.where}, {key}",
                    expected="a class of models of which it is known what this key does",
                    found=f"{value!r} of a {part.values.get('model_type')!r}"[:160],
                    next_step="merge without slices, or take the key out of config.json if the "
                    "model's code does not read it",
                )

    def _unsayable(
        self, topic: str, untold: Sequence[int], rule: Rule | None = None
    ) -> IncompatibleCheckpointsError:
        """The error for layers that no config can describe; `untold` are models without a list."""
        found = "the layers " + ", ".join(str(i) for _, i in self.order)
        step = "choose ranges that keep " + (rule.keeping if rule and rule.keeping else _PLACES)
        if untold:
            found = f"{self.parts[untold[0]].where} does not list `{topic}`"
            step = f"load this model with transformers and save it again: it then lists `{topic}`"
        return IncompatibleCheckpointsError(
            "No config says what layers in this order are",
            where=f"{self.own.where}, {topic}",
            expected="layers that a config of this class "
            f"({self.own.values.get('model_type')}) can describe at their new places",
            found=found[:240],
            next_step=step,
        )


def _kinds(part: Layers, rule: Rule | None, topic: str = "") -> list[Any] | None:
    """The kinds of a model's layers by its own config; None: it does not say.

    Of a class without experts it does not say that layers are dense.
    """
    if rule is None:
        is_dense = topic == EXPERTS and not any(map(_OF_EXPERTS.search, part.model.views))
        return ["dense"] * part.n if is_dense else None
    try:
        return rule.kinds(part.values, part.n)
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        expected = "numbers and lists as its class has them"
        raise _invalid(part.where, expected, str(error)[:160]) from error


def _entries(part: Layers, key: str) -> Sequence[Any] | None:
    """The entries per layer that a model's config has under `key`; None: none."""
    value = part.values.get(key)
    if key in _PATTERNS and isinstance(value, str) and len(value) == part.n:
        return value
    if key in _BY_NUMBER and isinstance(value, dict):
        return [value.get(str(i)) for i in range(part.n)]
    if not isinstance(value, list) or len(value) != part.n:
        return None
    return None if _OTHER_LISTS.search(key) else value


def _check_layer_types(part: Layers) -> None:
    """Raise CheckpointError where a config's `layer_types` are no texts, one per layer."""
    kinds = part.values.get("layer_types")
    is_list = isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
    if kinds is not None and not is_list:
        expected = "a list of texts, one per layer"
        where = f"{part.model.checkpoint.root}/config.json, layer_types"
        raise _invalid(where, expected, repr(kinds)[:80])


def _invalid(where: str, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        "A model's config is not valid",
        where=where,
        expected=expected,
        found=found,
        next_step="correct config.json, or get the model again",
    )
