"""The type of an operator, its window and parameters, and the table of all operators.

A function's signature is its schema, and the annotations that several operators share stand here
with their help texts. Nothing here computes: `recipe` reads the schemas, `planner` the
coefficients, and the engine calls `apply` for one window after the other.
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

from mergepipe_pipeline.domain.operator import (
    Choosing,
    Kind,
    OperatorSchema,
    Parameter,
    Response,
)
from mergepipe_pipeline.domain.plan import TensorTask
from mergepipe_pipeline.domain.recipe import Params
from mergepipe_pipeline.errors import OperatorError
from mergepipe_pipeline.operators.steps.tensor_measures import Measure

if TYPE_CHECKING:
    from torch import Tensor

    from mergepipe_pipeline.operators.steps.fused import FusedMerge


@dataclass(frozen=True, slots=True)
class Window:
    """Elements [start_elem, start_elem + n) of one tensor, from the base and from K experts.

    `base` is [n] float32 and never written to, or None for an operator that needs none. `experts`
    is [K, n] float32 in the order of `task.experts`: deltas for space "delta", values for space
    "value". The operator may overwrite it. For scope "row", n is a multiple of `row_elems`.
    `task.facts` holds what `Operator.settle` gave.
    """

    base: Tensor | None
    experts: Tensor
    task: TensorTask
    start_elem: int

    @property
    def row_elems(self) -> int:
        """Length of the tensor's rows: its last dimension, all of a vector."""
        return self.task.shape[-1] if self.task.shape else 1


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


OPERATORS: dict[str, Operator] = {}
Facts = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Functions that a method has besides its merge; all get its parameters as keywords.

    `coefficients(**values)` gives one factor of δᵢ per expert; without it the facts are factors,
    the base's first, or without these it is a uniform mean. `check(tensor, shape, **values)` raises
    OperatorError for what cannot work. `settle(measured, **values)` makes the task's facts of the
    measured numbers. `response(**method parameters)` is for methods whose response depends on them.
    `choose(facts, **values)` is for a method that only chooses. `fused(task, **values)` describes
    the merge to a compiled kernel.
    """

    coefficients: Callable[..., tuple[float, ...]] | None = None
    check: Callable[..., None] | None = None
    settle: Callable[..., tuple[float, ...]] | None = None
    response: Callable[..., Response] | None = None
    choose: Callable[..., Choosing] | None = None
    fused: Callable[..., FusedMerge] | None = None


@dataclass(frozen=True, slots=True)
class Operator:
    """A registered merge method; `measures` are what must be known of whole tensors first."""

    schema: OperatorSchema
    function: Callable[..., Tensor]
    hooks: Hooks = Hooks()
    measures: tuple[Measure, ...] = ()

    def apply(self, window: Window) -> Tensor:
        """The merged values, base included, as [n] float32.

        Raises OperatorError for a window that does not fit its task.
        """
        _check_window(self.schema, window)
        if not window.task.experts and window.base is not None:
            return window.base.clone()
        return self.function(window, **self._values_of(window.task))

    def response(self, params: Params) -> Response:
        """How the method's error is bounded with these method parameters."""
        if self.hooks.response is None:
            return self.schema.response
        values = self._values(params, [])
        return self.hooks.response(
            **{k: v for k, v in values.items() if not isinstance(v, PerModel)}
        )

    def coefficients(
        self, params: Params, model_params: Sequence[Params], facts: tuple[float, ...]
    ) -> tuple[float, ...]:
        """One effective cᵢ of δᵢ per expert.

        Exact for additive operators (without the drop scale), for votes the share when all experts
        agree.
        """
        if self.hooks.coefficients is not None:
            return self.hooks.coefficients(**self._values(params, model_params))
        count = len(model_params)
        if self.schema.response == "additive" and not self.measures:
            return (1 / count,) * count
        # Factors that differ from row to row or by column are about 1 all together.
        return facts[1:] if len(facts) == 1 + count else (1.0,) * count

    def validate(
        self, tensor: str, shape: tuple[int, ...], params: Params, model_params: Sequence[Params]
    ) -> None:
        """Raise OperatorError if the parameters cannot work for a tensor of that shape."""
        values = bind(self.schema, tensor, params, model_params)
        if self.hooks.check is not None:
            self.hooks.check(tensor, shape, **values)

    def settle(
        self, params: Params, model_params: Sequence[Params], measured: tuple[float, ...]
    ) -> tuple[float, ...]:
        """The task's `facts`, from the numbers of all `measures`, one after the other."""
        if self.hooks.settle is None:
            return measured
        return self.hooks.settle(measured, **self._values(params, model_params))

    @property
    def choose(self) -> Callable[[Params, Sequence[Params], Facts], Choosing] | None:
        """For a method that only chooses: the operator to apply instead, by these facts."""
        choose = self.hooks.choose
        if choose is None:
            return None
        return lambda params, rows, facts: choose(facts, **self._values(params, rows))

    @property
    def fused(self) -> Callable[[TensorTask], FusedMerge] | None:
        """Describes `apply` on a tensor to a compiled kernel, where there is one."""
        fused = self.hooks.fused
        return None if fused is None else lambda task: fused(task, **self._values_of(task))

    def _values_of(self, task: TensorTask) -> dict[str, Any]:
        return bind(self.schema, task.name, task.params, [e.params for e in task.experts])

    def _values(self, params: Params, model_params: Sequence[Params]) -> dict[str, Any]:
        return bind(self.schema, f"method {self.schema.name}", params, model_params)


def operator(
    name: str,
    *,
    formula: str,
    reference: str,
    hooks: Hooks = Hooks(),
    measures: Sequence[Measure] = (),
    **traits: Any,
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register `function(window, *, parameters…) -> Tensor` as the merge method `name`.

    Keyword-only arguments become recipe parameters: `Annotated[PerModel, help]` is given per model,
    `Annotated[float | bool | int | Literal[texts], help]` once per tensor, either with an `AtLeast`
    behind the help; a trailing underscore is dropped (`lambda_`). `traits` are those of
    `OperatorSchema`; omitted ones are as for `task_arithmetic`.

    Raises OperatorError for a name that is taken and for an argument without type or help.
    """

    def decorate(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        schema = OperatorSchema(name, parameters_of(function), formula, reference, **traits)
        register(Operator(schema, function, hooks, tuple(measures)))
        return function

    return decorate


def register(method: Operator) -> None:
    """Enter a method in OPERATORS. Raises OperatorError for a name that is taken."""
    name, function = method.schema.name, method.function
    if name in OPERATORS:
        raise OperatorError(
            "Two operators have the same name",
            where=f"{function.__module__}.{function.__qualname__}",
            expected="a name of its own",
            found=repr(name),
            next_step="rename one of them",
        )
    OPERATORS[name] = method


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
