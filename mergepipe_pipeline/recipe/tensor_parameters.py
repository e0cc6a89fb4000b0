"""The numbers of one output tensor: levels, filters, gradients and defaults applied.

Look-up order, as in mergekit: the source's own parameters, the slice's, the module's, the recipe's,
the method's default. A source's filters see the name in the model, others the name in the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mergepipe_pipeline.domain.operator import OperatorSchema, Parameter
from mergepipe_pipeline.domain.recipe import Params
from mergepipe_pipeline.recipe.parameters import as_bool, look_up
from mergepipe_pipeline.recipe.problems import KeyPath, Problems
from mergepipe_pipeline.recipe.structure import Level
from mergepipe_pipeline.text import listed


class Repeated:
    """Problems that many tensors share, said once with the first tensor and how many more."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._tensors: dict[tuple[KeyPath, str], dict[str, None]] = {}

    def add(self, path: KeyPath, text: str, tensor: str) -> None:
        """Note that `text` is wrong at `path` for one tensor more."""
        self._tensors.setdefault((path, text), {})[tensor] = None

    def flush(self) -> None:
        """Add what was noted to the problems."""
        for (path, text), tensors in self._tensors.items():
            self._problems.add(path, f"{text}, tensor {listed(tensors, 1)}")


def method_params(
    schema: OperatorSchema, levels: Sequence[Level], tensor: str, t: float, repeated: Repeated
) -> Params:
    """The method's parameters for an output tensor; `levels` from the nearest to the recipe's."""
    return _params(schema, "method", levels, tensor, t, "", repeated)


def model_params(
    schema: OperatorSchema,
    levels: Sequence[Level],
    tensor: str,
    t: float,
    model: str,
    repeated: Repeated,
) -> Params:
    """The parameters of one model, called `model`, for the tensor of that name in it."""
    return _params(schema, "model", levels, tensor, t, f" of model {model!r}", repeated)


def check_sum(
    schema: OperatorSchema,
    params: Params,
    rows: Sequence[Params],
    path: KeyPath,
    tensor: str,
    repeated: Repeated,
) -> None:
    """Add a problem where weights are divided by their sum and it is zero."""
    weights = [row["weight"] for row in map(dict, rows) if "weight" in row]
    if schema.space != "value" or not dict(params).get("normalize") or not weights:
        return
    if sum(map(float, weights)) == 0:
        text = "the weights sum to zero and `normalize` divides by the sum"
        repeated.add(path, f"{text}; change a weight or set `normalize: false`", tensor)


def _params(
    schema: OperatorSchema,
    scope: str,
    levels: Sequence[Level],
    tensor: str,
    t: float,
    owner: str,
    repeated: Repeated,
) -> Params:
    settings = [level.settings for level in levels]
    params: list[tuple[str, float | int | bool | str]] = []
    for p in (p for p in schema.parameters if p.scope == scope):
        value = look_up(p.name, settings, tensor, t, stepwise=p.kind == "bool")
        if value is None:
            if p.default is not None:
                params.append((p.name, _cast(p, p.default)))
            else:
                text = f"the required parameter `{p.name}`{owner} has no value"
                text += _without_effect(schema, levels)
                repeated.add(levels[0].path, text, tensor)
        elif p.kind == "int" and not isinstance(value, str) and not float(value).is_integer():
            text = f"`{p.name}`{owner} must be a whole number, found {value:g}"
            repeated.add((*_place(p.name, levels), p.name), text, tensor)
        else:
            params.append((p.name, _cast(p, value)))
    return tuple(params)


def _without_effect(schema: OperatorSchema, levels: Sequence[Level]) -> str:
    """Which given parameters the method does not have, perhaps in place of one that it needs."""
    parameters = {p.name for p in schema.parameters}
    unknown = dict.fromkeys(n for level in levels for n in level.settings if n not in parameters)
    return f"; `{schema.name}` has no parameter `{'`, `'.join(unknown)}`" if unknown else ""


def _place(name: str, levels: Sequence[Level]) -> KeyPath:
    for level in levels:
        if name in level.settings:
            return (*level.path, "parameters")
    return ()


def _cast(parameter: Parameter, value: float | int | bool | str) -> float | int | bool | str:
    if parameter.kind == "bool" and isinstance(value, str):
        return bool(as_bool(value))
    kinds: Mapping[str, type[float] | type[int] | type[bool] | type[str]]
    kinds = {"float": float, "int": int, "bool": bool, "choice": str}
    return kinds[parameter.kind](value)
