"""Facts of whole tensors about several experts together: what an operator's measures say.

Streaming passes over all experts of a tensor compute Gram matrices, variances and counts. The
catalog remembers them under what they depend on, and a task's facts follow from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from mergepipe_pipeline.catalog.pairs import Fact
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.plan import ExpertInput, TensorTask
from mergepipe_pipeline.domain.recipe import Params, Recipe, TensorRecipe
from mergepipe_pipeline.domain.view import TensorView, moved
from mergepipe_pipeline.errors import OperatorError
from mergepipe_pipeline.facts.input_segments import checkpoint_inputs
from mergepipe_pipeline.operators import OPERATORS, Operator
from mergepipe_pipeline.operators.steps.tensor_measures import Largest, Measure
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.warehouse import Warehouse

if TYPE_CHECKING:
    from mergepipe_pipeline.analysis.measure import MeasuredTensor


@dataclass(frozen=True)
class _Group:
    """Models whose tensors are measured together: the numbers of experts, and of their base."""

    warehouse: Warehouse
    recipe: Recipe
    models: Sequence[Model]
    base: int | None
    experts: tuple[int, ...]
    progress: Progress | None

    def numbers(
        self, members: Sequence[TensorRecipe], step: Measure, before: Mapping[str, Fact]
    ) -> dict[str, Fact]:
        """Output tensor to the numbers of one step, given those of the steps before it."""
        base_id = "none" if self.base is None else self.models[self.base].model_id
        owner = "group-" + digest_json([self.models[m].model_id for m in self.experts])[:24]
        known = self.warehouse.catalog.facts(base_id, owner)
        key = f"{step.name}-{'delta' if self._as_delta else 'value'}"
        facts = known.fact(key)
        names = {t.name: _tensor_key(t, step, before[t.name]) for t in members}
        skipped = {t.name: step.skipped for t in members if not step.is_needed(dict(t.params))}
        missing = [t for t in members if t.name not in skipped and names[t.name] not in facts]
        if missing:
            found = self._measure(missing, step, before)
            fresh = {names[name]: numbers for name, numbers in found.items()}
            known.put_fact(key, fresh)
            facts |= fresh
        return {n: skipped[n] if n in skipped else facts.get(key, ()) for n, key in names.items()}

    def _measure(
        self, tensors: Sequence[TensorRecipe], step: Measure, before: Mapping[str, Fact]
    ) -> dict[str, Fact]:
        """The same by a pass over the tensors."""
        from mergepipe_pipeline.analysis.measure import measure

        members = (*self.experts, *(() if self.base is None else (self.base,)))
        checkpoints: list[Checkpoint] = []
        first: list[int] = []
        for m in members:
            first.append(len(checkpoints))
            checkpoints += self.models[m].checkpoints

        def view(place: int, tensor: str) -> TensorView:
            return moved(self.models[members[place]].views[tensor], first[place])

        measured = [self._measured(t, view, before[t.name]) for t in tensors]
        nbytes = sum(v.stored_nbytes for m in measured for v in m.experts)
        nbytes += sum(m.base.stored_nbytes for m in measured if m.base)
        passes = 1 if step.is_sum else 3
        known = checkpoint_inputs(self.warehouse, checkpoints, self.progress)
        progress = self.progress or Silent()
        with progress.task(f"measure {step.name}", nbytes * passes) as advance:
            by_tensor = measure(checkpoints, measured, step, advance, known)
        return {t.name: n for t, n in zip(tensors, by_tensor, strict=True)}

    def _measured(
        self, t: TensorRecipe, view: Callable[[int, str], TensorView], numbers: Fact
    ) -> MeasuredTensor:
        from mergepipe_pipeline.analysis.measure import MeasuredTensor

        schema = OPERATORS[self.recipe.method].schema
        experts = tuple(view(i, entry.tensor) for i, entry in enumerate(t.inputs))
        base = view(len(experts), t.base.tensor) if t.base else None
        like = base or experts[0]
        task = TensorTask(
            t.name,
            like.shape,
            like.dtype,
            schema.name,
            t.params,
            self.recipe.seed,
            None,
            tuple(_input(e.position, v, e.params) for e, v in zip(t.inputs, experts, strict=True)),
            numbers,
        )
        whole_rows = schema.scope == "row" and like.shape
        row_elems = max(1, like.shape[-1]) if whole_rows else 1
        return MeasuredTensor(task, base, experts, self._as_delta, row_elems)

    @property
    def _as_delta(self) -> bool:
        space = OPERATORS[self.recipe.method].schema.space
        return space == "delta" or (space == "delta_if_base" and self.base is not None)


def measured_facts(
    warehouse: Warehouse,
    recipe: Recipe,
    models: Sequence[Model],
    tensors: Sequence[TensorRecipe],
    progress: Progress | None = None,
) -> dict[str, tuple[float, ...]]:
    """Output tensor to facts, for an operator that measures; computes what the catalog lacks.

    Raises OperatorError naming the tensor where the numbers do not allow a merge.
    """
    operator = OPERATORS[recipe.method]
    if not operator.measures:
        return {}
    groups: dict[tuple[int | None, tuple[int, ...]], list[TensorRecipe]] = {}
    for t in tensors:
        base = t.base.model if t.base else None
        groups.setdefault((base, tuple(i.model for i in t.inputs)), []).append(t)
    facts = {}
    for (base, experts), members in groups.items():
        group = _Group(warehouse, recipe, models, base, experts, progress)
        numbers: dict[str, Fact] = {t.name: () for t in members}
        for step in operator.measures:
            by_tensor = group.numbers(members, step, numbers)
            if not isinstance(step, Largest):  # there, infinity says that nothing is kept
                _refuse_damaged(step, by_tensor)
            numbers = {name: (*numbers[name], *by_tensor[name]) for name in numbers}
        for t in members:
            facts[t.name] = _settle(operator, t, numbers[t.name])
    return facts


def _settle(operator: Operator, t: TensorRecipe, numbers: Fact) -> tuple[float, ...]:
    try:
        return operator.settle(t.params, [i.params for i in t.inputs], numbers)
    except OperatorError as error:
        error.where = f"tensor {t.name}"
        raise


def _refuse_damaged(step: Measure, by_tensor: Mapping[str, Fact]) -> None:
    for tensor, numbers in by_tensor.items():
        if not all(map(isfinite, numbers)):
            raise OperatorError(
                "A model holds NaN or infinity where models are measured against each other",
                where=f"tensor {tensor}",
                expected="finite values in every model",
                found=f"{step.name} of {', '.join(f'{n:.6g}' for n in numbers[:9])}",
                next_step="repair the model, or leave it out",
            )


def _tensor_key(t: TensorRecipe, step: Measure, numbers: Fact) -> str:
    """The name of a step's numbers for a tensor: names, parameters, earlier numbers."""
    inputs = [i.tensor for i in t.inputs] + ([t.base.tensor] if t.base else [])
    params = {k: v for k, v in t.params if k in step.depends}
    rows = [{k: v for k, v in i.params if k in step.depends} for i in t.inputs]
    if len(set(inputs)) == 1 and not params and not any(rows) and not numbers:
        return inputs[0]
    as_json = [n if isfinite(n) else str(n) for n in numbers]
    return f"{t.name}#{digest_json([inputs, params, rows, as_json])[:24]}"


def _input(position: int, view: TensorView, params: Params) -> ExpertInput:
    span = ((0, view.numel),)
    return ExpertInput(position, view, "", params, span, span)
