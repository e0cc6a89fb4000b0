"""One `TensorRecipe` of plain numbers per output tensor: filters, gradients, defaults applied.

Look-up order: the model's own parameters, the recipe's, the method's default. No tensor is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from mergepipe_pipeline.recipe.checks import Entry
from mergepipe_pipeline.recipe.parameters import Settings, look_up, position
from mergepipe_pipeline.recipe.problems import KeyPath, Problems, shown_path
from mergepipe_pipeline.spec.layers import layer_count
from mergepipe_pipeline.spec.operator import OperatorSchema, Parameter
from mergepipe_pipeline.spec.recipe import Params, TensorRecipe


class _Repeated:
    """Problems that many tensors share, said once with the first tensor and how many more."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._tensors: dict[tuple[KeyPath, str], list[str]] = {}

    def add(self, path: KeyPath, text: str, tensor: str) -> None:
        self._tensors.setdefault((path, text), []).append(tensor)

    def flush(self) -> None:
        for (path, text), tensors in self._tensors.items():
            more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
            self._problems.add(path, f"{text}, tensor {tensors[0]}{more}")


def resolve_tensors(
    schema: OperatorSchema,
    settings: Settings,
    models: Sequence[Entry],
    tensors: Sequence[str],
    presence: Sequence[AbstractSet[str]],
    problems: Problems,
) -> tuple[TensorRecipe, ...]:
    """The recipe of each tensor in `tensors`, in order.

    `models` are those that contribute and `presence[i]` the tensor names that model i has; one that
    lacks a tensor is left out of it. Adds problems for required parameters without a value, for
    values of the wrong kind, and for weights to be divided by that sum to zero.
    """
    repeated = _Repeated(problems)
    n_layers = layer_count(tensors)
    method_scope = [p for p in schema.parameters if p.scope == "method"]
    model_scope = [p for p in schema.parameters if p.scope == "model"]
    recipes = []
    for name in tensors:
        t = position(name, n_layers)
        params = _params(method_scope, [settings], name, t, ("parameters",), "", repeated)
        present = tuple(i for i, names in enumerate(presence) if name in names)
        rows = tuple(
            _params(
                model_scope,
                [models[i].settings, settings],
                name,
                t,
                models[i].path,
                f" of model {models[i].text!r}",
                repeated,
            )
            for i in present
        )
        if schema.space == "value":
            _check_sum(params, rows, name, repeated)
        recipes.append(TensorRecipe(name, params, present, rows))
    repeated.flush()
    return tuple(recipes)


def idle_filters(
    settings: Settings, models: Sequence[Entry], tensors: Sequence[str]
) -> tuple[str, ...]:
    """One warning per filter that is part of no tensor's name, so that its value is never used."""
    levels: list[tuple[KeyPath, Settings]] = [(("parameters",), settings)]
    levels += [((*entry.path, "parameters"), entry.settings) for entry in models]
    return tuple(
        f"{shown_path((*path, name))}: the filter {rule.filter!r} matches no tensor"
        for path, level in levels
        for name, setting in level.items()
        for rule in setting
        if rule.filter is not None and not any(rule.filter in tensor for tensor in tensors)
    )


def _params(
    parameters: Sequence[Parameter],
    levels: Sequence[Settings],
    tensor: str,
    t: float,
    path: KeyPath,
    owner: str,
    repeated: _Repeated,
) -> Params:
    params = []
    for p in parameters:
        value = look_up(p.name, levels, tensor, t)
        if value is None and p.default is None:
            repeated.add(path, f"the required parameter `{p.name}`{owner} has no value", tensor)
        elif value is None:
            params.append((p.name, _cast(p, float(p.default or 0))))
        elif p.kind == "int" and not value.is_integer():
            text = f"`{p.name}`{owner} must be a whole number, found {value:g}"
            repeated.add((*path, p.name), text, tensor)
        else:
            params.append((p.name, _cast(p, value)))
    return tuple(params)


def _cast(parameter: Parameter, value: float) -> float | int | bool:
    kinds: Mapping[str, type[float] | type[int] | type[bool]]
    kinds = {"float": float, "int": int, "bool": bool}
    return kinds[parameter.kind](value)


def _check_sum(params: Params, rows: Sequence[Params], tensor: str, repeated: _Repeated) -> None:
    weights = [row["weight"] for row in map(dict, rows) if "weight" in row]
    if dict(params).get("normalize") and weights and sum(map(float, weights)) == 0:
        text = "the weights sum to zero and `normalize` divides by the sum"
        repeated.add(("models",), f"{text}; change a weight or set `normalize: false`", tensor)
