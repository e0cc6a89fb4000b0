"""How a signature becomes a schema, and how wrong parameters are refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Annotated

import pytest

from mergepipe_pipeline.domain.operator import Parameter
from mergepipe_pipeline.errors import OperatorError
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.operators.steps.registry import ONE_EACH, Density, Lambda, Weight, operator
from tests.operators.cases import job_for, merge

W = (("weight", 1.0),)


def _register(name: str, function: object) -> None:
    operator(name, formula="f", reference="https://x")(function)  # type: ignore[arg-type]


def test_a_signature_is_the_schema() -> None:
    def new(
        window: object,
        *,
        weight: Weight,
        density: Density = ONE_EACH,
        rounds: Annotated[int, "how often"] = 3,
        lambda_: Lambda = 1.0,
    ) -> object: ...

    _register("new", new)
    weight, density, rounds, lambda_ = OPERATORS.pop("new").schema.parameters
    assert (weight.scope, weight.kind, weight.default) == ("model", "float", None)
    assert (density.scope, density.default) == ("model", 1.0)
    assert rounds == Parameter("rounds", "method", "int", 3, "how often")
    assert lambda_.name == "lambda"


def test_an_argument_without_help_is_refused() -> None:
    def bare(window: object, *, weight: float) -> object: ...

    with pytest.raises(OperatorError, match="'weight' of an operator has no type and help text"):
        _register("bare", bare)
    assert "bare" not in OPERATORS


def test_a_name_can_be_taken_once() -> None:
    def again(window: object) -> object: ...

    with pytest.raises(OperatorError, match="Two operators have the same name"):
        _register("ties", again)


def test_importing_the_operators_does_not_import_torch() -> None:
    code = "import sys, mergepipe_pipeline.operators; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "params", "models", "message"),
    [
        ("ties", (("lamda", 1.0),), [W], "ties has no method parameter 'lamda'"),
        ("linear", (), [(*W, ("density", 0.5))], "linear has no model parameter 'density'"),
        ("ties", (), [()], "cannot use its parameter 'weight'"),
        ("ties", (), [(("weight", float("nan")),)], "cannot use its parameter 'weight'"),
        ("ties", (("lambda", "much"),), [W], "cannot use its parameter 'lambda'"),
        ("ties", (("variant", "peft"),), [W], "cannot use its parameter 'variant'"),
        (
            "ties",
            (("variant", "paper"),),
            [W, (("weight", 2.0),)],
            "TIES of the paper has no weights",
        ),
        ("della", (), [(*W, ("density", 0.9))], "leave the range of probabilities"),
        ("della", (), [(*W, ("density", 0.1))], "leave the range of probabilities"),
        ("breadcrumbs", (), [(*W, ("gamma", -0.1))], "cannot use its parameter 'gamma'"),
        ("ramplus_tl", (("r", -0.1),), [()], "cannot use its parameter 'r'"),
        ("dare_ties", (), [(*W, ("density", -0.5))], "A density is negative"),
        ("linear", (), [W, (("weight", -1.0),)], "weights of a linear merge sum to zero"),
    ],
)
def test_parameters_that_cannot_work_are_refused_before_any_read(
    name: str, params: tuple[tuple[str, float]], models: list[tuple[object]], message: str
) -> None:
    with pytest.raises(OperatorError, match=message) as caught:
        OPERATORS[name].validate("model.norm.weight", (16,), params, models)  # type: ignore[arg-type]
    error = caught.value
    assert error.where is not None
    assert "model.norm.weight" in error.where
    assert error.expected
    assert error.found
    assert error.next_step


def test_an_empty_tensor_needs_no_density() -> None:
    OPERATORS["ties"].validate("w", (0,), (), [(*W, ("density", 0.5))])


def test_a_trim_without_a_rule_is_refused() -> None:
    job = job_for(OPERATORS["ties"], [[1.0, 2.0]], density=[0.5])
    bare = replace(job.task, experts=(replace(job.task.experts[0], trim=None),))
    with pytest.raises(OperatorError, match="A trim has no threshold"):
        merge(OPERATORS["ties"], replace(job, task=bare))


def test_a_window_with_too_few_experts_is_refused() -> None:
    job = job_for(OPERATORS["ties"], [[1.0, 2.0], [1.0, 2.0]])
    with pytest.raises(OperatorError, match="does not fit its task"):
        merge(OPERATORS["ties"], replace(job, experts=job.experts[:1]))
