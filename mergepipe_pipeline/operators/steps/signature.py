"""Recipe parameters of an operator: read from its function's signature, and bound to a recipe.

The annotations that several operators share stand here with their help texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter as Argument
from inspect import signature
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

from mergepipe_pipeline.domain.operator import Kind, OperatorSchema, Parameter
from mergepipe_pipeline.domain.recipe import Params
from mergepipe_pipeline.errors import OperatorError


class PerModel(tuple[float, ...]):
    """Annotation of a parameter given per expert: one value for each, in recipe order."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Annotation of a parameter that has a smallest value."""

    value: float


#: Default of a per-model parameter: 1.0 for each expert.
ONE_EACH: Final = PerModel((1.0,))

# What the parameters that several operators share mean; the annotation carries the help text.
Weight = Annotated[PerModel, "factor of this model"]
Density = Annotated[PerModel, "share of the delta's elements to keep; 1 or more keeps all"]
Lambda = Annotated[float, "factor of the merged update, applied after normalisation"]
Int8Mask = Annotated[bool, "accepted for mergekit recipes, without effect on results"]
Variant = Annotated[
    Literal["mergekit", "paper"], "whose operator is meant where the field has two of one name"
]

_Kind = tuple[Literal["model", "method"], Kind]
_CHOICE: _Kind = ("method", "choice")
_KINDS: dict[Any, _Kind] = {
    PerModel: ("model", "float"),
    float: ("method", "float"),
    bool: ("method", "bool"),
    int: ("method", "int"),
}


def parameters_of(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    """The keyword-only arguments of an operator's function as recipe parameters, in their order.

    Raises OperatorError for an argument without type or help.
    """
    # Tensor is unknown at run time: torch is imported for type checking only.
    hints = get_type_hints(function, localns={"Tensor": object}, include_extras=True)
    where = f"{function.__module__}.{function.__qualname__}"
    return tuple(
        parameter(a.name, hints.get(a.name), a.default, where=where)
        for a in signature(function).parameters.values()
        if a.kind is Argument.KEYWORD_ONLY
    )


def parameter(
    name: str, hint: Any, default: Any = Argument.empty, *, where: str = "an operator"
) -> Parameter:
    """The recipe parameter that an annotation like `Weight` and a default describe.

    An underscore at the end of `name` is dropped (`lambda_`). Raises OperatorError for an
    annotation without type or help.
    """
    kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    if (kind not in _KINDS and not choices) or not notes or not isinstance(notes[0], str):
        raise OperatorError(
            f"The argument {name!r} of an operator has no type and help text",
            where=where,
            expected="Annotated[PerModel | float | bool | int | Literal[texts], help]",
            found=repr(hint),
            next_step="annotate the argument",
        )
    default = None if default is Argument.empty else default
    if isinstance(default, PerModel):
        (default,) = default
    scope, value_kind = _CHOICE if choices else _KINDS[kind]
    return Parameter(
        name=name.removesuffix("_"),
        scope=scope,
        kind=value_kind,
        default=default,
        help=notes[0],
        choices=choices,
        least=next((note.value for note in notes if isinstance(note, AtLeast)), None),
    )


def bind(
    schema: OperatorSchema, where: str, params: Params, model_params: Sequence[Params]
) -> dict[str, Any]:
    """Keyword arguments of an operator's function: every parameter, defaults filled in.

    Raises OperatorError for a name the schema lacks, a required one left out, and a value that is
    no finite number or below the least.
    """
    scopes: dict[str, Sequence[Params]] = {"method": [params], "model": model_params}
    rows_by_scope: dict[str, list[dict[str, Any]]] = {}
    for scope, rows in scopes.items():
        names = {p.name for p in schema.parameters if p.scope == scope}
        rows_by_scope[scope] = [dict(row) for row in rows]
        for key in (key for row in rows_by_scope[scope] for key in row if key not in names):
            raise OperatorError(
                f"{schema.name} has no {scope} parameter {key!r}",
                where=where,
                expected="one of " + ", ".join(sorted(names)),
                found=repr(key),
                next_step="remove or rename the parameter",
            )
    values: dict[str, Any] = {}
    for p in schema.parameters:
        column = [_value(schema, p, where, row) for row in rows_by_scope[p.scope]]
        values[_argument(p.name)] = PerModel(column) if p.scope == "model" else column[0]
    return values


def _argument(parameter_name: str) -> str:
    return parameter_name + "_" if parameter_name == "lambda" else parameter_name


def _value(schema: OperatorSchema, p: Parameter, where: str, row: dict[str, Any]) -> Any:
    raw = row.get(p.name, p.default)
    if p.kind == "choice":
        if raw not in p.choices:
            raise _unusable(schema, p, where, raw, "one of " + ", ".join(p.choices))
        return raw
    try:
        number = float(raw)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise _unusable(schema, p, where, raw, f"a finite number ({p.help})")
    if p.least is not None and number < p.least:
        raise _unusable(schema, p, where, raw, f"a number from {p.least:g} up ({p.help})")
    return {"float": float, "bool": bool, "int": int}[p.kind](number)


def _unusable(
    schema: OperatorSchema, p: Parameter, where: str, raw: Any, expected: str
) -> OperatorError:
    return OperatorError(
        f"{schema.name} cannot use its parameter {p.name!r}",
        where=where,
        expected=expected,
        found="nothing" if raw is None else repr(raw),
        next_step=f"give {p.name} a value in the recipe",
    )
