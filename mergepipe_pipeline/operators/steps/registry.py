"""What an operator is, and the table of all of them; a function's signature is its schema.

Not a merge: nothing here computes. `recipe` reads the schemas, `planner` the coefficients, and the
engine calls `apply` for one window after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter as Argument
from inspect import signature
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    get_args,
    get_origin,
    get_type_hints,
)

from mergepipe_pipeline.errors import OperatorError
from mergepipe_pipeline.operators.steps.fused import Fused
from mergepipe_pipeline.operators.steps.tensor_measures import Measure
from mergepipe_pipeline.operators.steps.tensor_window import Window
from mergepipe_pipeline.spec.operator import (
    BaseUse,
    Choosing,
    Fact,
    Kind,
    OperatorSchema,
    Parameter,
    Response,
    Scope,
    Space,
)
from mergepipe_pipeline.spec.plan import TensorTask
from mergepipe_pipeline.spec.recipe import Params

if TYPE_CHECKING:
    from torch import Tensor

OPERATORS: dict[str, Operator] = {}


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


@dataclass(frozen=True, slots=True)
class Operator:
    """A registered merge method.

    `apply(window)` gives the merged values, base included, as [n] float32.
    `coefficients(params, model_params, facts)` gives one effective cᵢ of δᵢ per expert: exact for
    additive operators (without the drop scale), for votes the share when all experts agree.
    `validate(tensor, shape, params, model_params)` raises OperatorError if the parameters cannot
    work for a tensor of that shape. `measures` are what must be known of whole tensors first, and
    `settle(params, model_params, measured)` turns it into the task's `facts`. `response(params)`
    says how its error is bounded. `choose(params, model_params, facts)` names the operator to apply
    instead, for a method that only chooses. `fused(task)` describes `apply` on a tensor to a
    compiled kernel, where there is one.
    """

    schema: OperatorSchema
    apply: Callable[[Window], Tensor]
    response: Callable[[Params], Response]
    coefficients: Callable[[Params, Sequence[Params], tuple[float, ...]], tuple[float, ...]]
    validate: Callable[[str, tuple[int, ...], Params, Sequence[Params]], None]
    measures: tuple[Measure, ...] = ()
    settle: Callable[[Params, Sequence[Params], tuple[float, ...]], tuple[float, ...]] = (
        lambda params, model_params, measured: measured
    )
    choose: Callable[[Params, Sequence[Params], tuple[float, ...]], Choosing] | None = None
    fused: Callable[[TensorTask], Fused] | None = None


def operator(
    name: str,
    *,
    formula: str,
    reference: str,
    coefficients: Callable[..., tuple[float, ...]] | None = None,
    check: Callable[..., None] | None = None,
    space: Space = "delta",
    base: BaseUse = "required",
    experts: tuple[int, int | None] = (1, None),
    fact: Fact = "none",
    scope: Scope = "element",
    response: Response = "additive",
    measures: Sequence[Measure] = (),
    settle: Callable[..., tuple[float, ...]] | None = None,
    response_of: Callable[..., Response] | None = None,
    choose: Callable[..., Choosing] | None = None,
    fused: Callable[..., Fused] | None = None,
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register `function(window, *, parameters…) -> Tensor` as the merge method `name`.

    Keyword-only arguments become recipe parameters: `Annotated[PerModel, help]` is given per model,
    `Annotated[float | bool | int | Literal[texts], help]` once per tensor, either with an `AtLeast`
    behind the help; a trailing underscore is dropped (`lambda_`). `check(tensor, shape, **values)`
    and `coefficients(**values)` get the same values; `settle(measured, **values)` and
    `choose(facts, **values)` and `fused(task, **values)` too. Without `coefficients` the facts are
    factors: the base's first, then the experts'. `response_of(**method parameters)` is for methods
    whose response depends on them.

    Raises OperatorError for a name that is taken and for an argument without type or help.
    """

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if name in OPERATORS:
            raise OperatorError(
                "Two operators have the same name",
                where=f"{function.__module__}.{function.__qualname__}",
                expected="a name of its own",
                found=repr(name),
                next_step="rename one of them",
            )
        schema = OperatorSchema(
            name,
            _parameters(function),
            space,
            base,
            experts,
            fact,
            scope,
            response,
            formula,
            reference,
        )

        def apply(window: Window) -> Tensor:
            task = window.task
            _check_window(schema, window)
            if not task.experts and window.base is not None:
                return window.base.clone()
            values = bind(schema, task.name, task.params, [e.params for e in task.experts])
            return function(window, **values)

        def coefficients_of(
            params: Params, model_params: Sequence[Params], facts: tuple[float, ...]
        ) -> tuple[float, ...]:
            if coefficients is None:
                # Factors that differ from row to row or by column are about 1 all together.
                count = len(model_params)
                return facts[1:] if len(facts) == 1 + count else (1.0,) * count
            return coefficients(**bind(schema, f"method {name}", params, model_params))

        def validate(
            tensor: str, shape: tuple[int, ...], params: Params, model_params: Sequence[Params]
        ) -> None:
            values = bind(schema, tensor, params, model_params)
            if check is not None:
                check(tensor, shape, **values)

        def settled(
            params: Params, model_params: Sequence[Params], measured: tuple[float, ...]
        ) -> tuple[float, ...]:
            if settle is None:
                return measured
            return settle(measured, **bind(schema, f"method {name}", params, model_params))

        def response_to(params: Params) -> Response:
            if response_of is None:
                return response
            values = bind(schema, f"method {name}", params, [])
            return response_of(**{k: v for k, v in values.items() if not isinstance(v, PerModel)})

        def chosen(
            params: Params, model_params: Sequence[Params], facts: tuple[float, ...]
        ) -> Choosing:
            assert choose is not None
            return choose(facts, **bind(schema, f"method {name}", params, model_params))

        def fused_for(task: TensorTask) -> Fused:
            assert fused is not None
            values = bind(schema, task.name, task.params, [e.params for e in task.experts])
            return fused(task, **values)

        OPERATORS[name] = Operator(
            schema,
            apply,
            response_to,
            coefficients_of,
            validate,
            tuple(measures),
            settled,
            chosen if choose else None,
            fused_for if fused else None,
        )
        return function

    return register


def bind(
    schema: OperatorSchema, where: str, params: Params, model_params: Sequence[Params]
) -> dict[str, Any]:
    """Keyword arguments of an operator's function: every parameter, defaults filled in.

    Raises OperatorError for a name the schema lacks, a required one left out, and a value that is
    no finite number or below the least.
    """
    scopes: dict[str, Sequence[Params]] = {"method": [params], "model": model_params}
    given: dict[str, list[dict[str, Any]]] = {}
    for scope, rows in scopes.items():
        known = {p.name for p in schema.parameters if p.scope == scope}
        given[scope] = [dict(row) for row in rows]
        for key in (key for row in given[scope] for key in row if key not in known):
            raise OperatorError(
                f"{schema.name} has no {scope} parameter {key!r}",
                where=where,
                expected="one of " + ", ".join(sorted(known)),
                found=repr(key),
                next_step="remove or rename the parameter",
            )
    values: dict[str, Any] = {}
    for p in schema.parameters:
        column = [_value(schema, p, where, row) for row in given[p.scope]]
        values[_argument(p.name)] = PerModel(column) if p.scope == "model" else column[0]
    return values


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


def _check_window(schema: OperatorSchema, window: Window) -> None:
    n_experts = len(window.task.experts)
    missing_base = schema.needs_base and window.base is None
    if missing_base or window.experts.shape[0] != n_experts or not (n_experts or schema.needs_base):
        base = "a base" if schema.needs_base else "a base or none"
        raise OperatorError(
            f"{schema.name} was handed a window that does not fit its task",
            where=f"tensor {window.task.name}, element {window.start_elem}",
            expected=f"{base} and {max(1, n_experts)} experts",
            found=f"{'no' if window.base is None else 'a'} base, {window.experts.shape[0]} experts",
            next_step="report this: the engine and the plan disagree",
        )


def _argument(parameter_name: str) -> str:
    return parameter_name + "_" if parameter_name == "lambda" else parameter_name


def _parameters(function: Callable[..., Tensor]) -> tuple[Parameter, ...]:
    # Tensor is unknown at run time: torch is imported for type checking only.
    hints = get_type_hints(function, localns={"Tensor": object}, include_extras=True)
    arguments = signature(function).parameters.values()
    return tuple(
        _parameter(a, hints.get(a.name), f"{function.__module__}.{function.__qualname__}")
        for a in arguments
        if a.kind is Argument.KEYWORD_ONLY
    )


def _parameter(argument: Argument, hint: Any, where: str) -> Parameter:
    kinds: dict[Any, tuple[Literal["model", "method"], Kind]] = {
        PerModel: ("model", "float"),
        float: ("method", "float"),
        bool: ("method", "bool"),
        int: ("method", "int"),
    }
    kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    if (kind not in kinds and not choices) or not notes or not isinstance(notes[0], str):
        raise OperatorError(
            f"The argument {argument.name!r} of an operator has no type and help text",
            where=where,
            expected="Annotated[PerModel | float | bool | int | Literal[texts], help]",
            found=repr(hint),
            next_step="annotate the argument",
        )
    default = None if argument.default is Argument.empty else argument.default
    if isinstance(default, PerModel):
        (default,) = default
    kinds[Literal] = ("method", "choice")
    scope, value_kind = kinds[Literal if choices else kind]
    least = next((note.value for note in notes if isinstance(note, AtLeast)), None)
    name = argument.name.removesuffix("_")
    return Parameter(name, scope, value_kind, default, notes[0], choices, least)
