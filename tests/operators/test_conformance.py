"""What every operator owes: the oracle's result for any windows; zero deltas change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.errors import OperatorError
from mergepipe_pipeline.operators import OPERATORS, Operator, Window
from tests.operators.cases import (
    assert_same_bits,
    big_job,
    job_for,
    jobs,
    make_job,
    merge,
    windows_of,
)
from tests.support import oracles, oracles_spherical
from tests.support.laws import examples
from tests.support.oracles import ORACLES, Bools, Case

EPS = float(np.finfo(np.float32).eps)
law = settings(max_examples=examples(30), deadline=None)
#: Methods that choose an operator merge nothing themselves.
MERGING = {name: op for name, op in OPERATORS.items() if op.choose is None}


def every(choose: Callable[[Operator], bool] = lambda op: True) -> pytest.MarkDecorator:
    chosen = {name: op for name, op in MERGING.items() if choose(op)}
    return pytest.mark.parametrize("op", chosen.values(), ids=chosen.keys())


every_operator = every()
#: Whose oracle is exact per element; merges by angles have tests of their own.
every_elementwise = every(lambda op: op.schema.name in ORACLES)
#: Methods that give the base where no model differs from it; slerp rounds.
every_update = every(lambda op: op.schema.needs_base and op.schema.name != "slerp")


def test_every_operator_has_an_oracle() -> None:
    assert set(MERGING) == set(ORACLES) | set(oracles_spherical.ORACLES_SPHERICAL)


@every_operator
def test_an_operator_says_formula_reference_and_help(op: Operator) -> None:
    schema = op.schema
    assert OPERATORS[schema.name] is op
    assert schema.formula
    assert schema.reference.startswith("https://")
    assert all(p.help for p in schema.parameters)


def _base(op: Operator, case: Case) -> oracles.Floats:
    """What the update is added to."""
    if op.schema.needs_base and case.base is not None:
        return case.base
    return np.zeros(case.experts.shape[1])


def _undecided(op: Operator, case: Case) -> Bools:
    """Where rounding decides: importance at the threshold, a divergence of float32 rounding."""
    if op.schema.name != "arcee_fusion":
        return np.zeros(case.experts.shape[1], dtype=bool)
    score = oracles.importance(case)
    unsure = 1e-6 * np.abs(case.deltas[0]) + 1e-4 * score
    close: Bools = np.abs(score - oracles.arcee_threshold(score)) <= 2 * max(unsure)
    return close


@every_elementwise
@law
@given(data=st.data())
def test_a_merge_equals_the_float64_oracle_within_float32_rounding(
    op: Operator, data: st.DataObject
) -> None:
    job = data.draw(jobs(op))
    want = ORACLES[op.schema.name](job.case)
    base = _base(op, job.case)
    allowed = 4 * EPS * (np.abs(base) + np.abs(want - base))
    if op.schema.name.startswith("ram"):  # each term of the mean is rounded
        allowed += EPS * np.abs(job.case.deltas).sum(0)
    error = np.abs(merge(op, job).double().numpy() - want)
    bad = (error > allowed) & ~_undecided(op, job.case)
    assert not bad.any(), (want[bad], error[bad])


@every_operator
@law
@given(data=st.data())
def test_windows_of_any_cut_in_any_order_give_identical_bits(
    op: Operator, data: st.DataObject
) -> None:
    job = data.draw(jobs(op, max_numel=300))
    cuts = data.draw(st.lists(st.integers(1, max(1, job.numel - 1)), max_size=6))
    order = data.draw(st.permutations(range(len(windows_of(op, job, cuts)))))
    assert_same_bits(merge(op, job, cuts, order), merge(op, job))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@every_operator
def test_threads_and_odd_windows_do_not_change_a_bit_of_a_large_tensor(op: Operator) -> None:
    job = big_job(op, (151, 997))
    with _threads(1):
        whole = merge(op, job)
        pieces = merge(op, job, cuts=[1, 9, 1_000, 33_333, 99_998, 149_999])
    with _threads(3):
        assert_same_bits(merge(op, job), whole)
    assert_same_bits(pieces, whole)


@every_elementwise
def test_a_large_rounded_merge_stays_close_to_the_oracle(op: Operator) -> None:
    job = big_job(op, (31, 997))
    # Float32 sees a sign sum on the other side of zero at most where the sum is all but zero.
    error = np.abs(merge(op, job).double().numpy() - ORACLES[op.schema.name](job.case))
    assert np.quantile(error, 0.999) < 1e-5


@every_update
@law
@given(data=st.data())
def test_experts_equal_to_the_base_give_its_bits(op: Operator, data: st.DataObject) -> None:
    job = data.draw(jobs(op))
    assert job.base is not None
    base = job.base.masked_fill(job.base.abs() < 1, -0.0)
    rows = torch.zeros_like(job.experts)
    if op.schema.space == "value":
        rows += base
    assert_same_bits(merge(op, replace(job, base=base, experts=rows)), base)
    if op.schema.space == "delta":
        assert_same_bits(merge(op, replace(job, base=base, experts=-rows)), base)


@every_update
def test_a_tensor_without_experts_is_its_base(op: Operator) -> None:
    job = job_for(op, [[1.0, 2.0], [1.0, 2.0]])
    task = replace(job.task, experts=())
    assert_same_bits(merge(op, replace(job, task=task, experts=job.experts[:0])), torch.ones(2))


@every(lambda op: op.schema.name in ORACLES and not op.measures and op.schema.name != "ram")
@law
@given(data=st.data())
def test_experts_in_another_order_give_the_same_bits_where_sums_are_exact(
    op: Operator, data: st.DataObject
) -> None:
    job = data.draw(jobs(op))
    order = data.draw(st.permutations(range(len(job.task.experts))))
    experts = tuple(job.task.experts[i] for i in order)
    moved = replace(job, task=replace(job.task, experts=experts), experts=job.experts[list(order)])
    assert_same_bits(merge(op, moved), merge(op, job))


@every_operator
def test_the_base_is_never_written_to(op: Operator) -> None:
    job = job_for(op, [[1.0, -2.0, 0.5], [2.0, 1.0, 0.5]])
    assert job.base is not None
    out = op.apply(Window(job.base, job.experts.clone(), job.task, 0))
    assert_same_bits(job.base, torch.ones(3))
    assert out.shape == (3,)
    assert out.dtype == torch.float32


@every_operator
def test_a_nan_in_an_expert_is_not_hidden(op: Operator) -> None:
    job = job_for(op, [[1.0] * 20, [2.0] * 20])
    job.experts[0, 9] = torch.nan
    assert merge(op, job).isnan().nonzero().flatten().tolist() == [9]


@every(lambda op: op.schema.response in ("additive", "vote") and op.schema.name != "ramplus_tl")
def test_coefficients_give_the_merge_of_agreeing_experts(op: Operator) -> None:
    deltas = [[1.0, 2.0, 3.0], [0.5, 2.0, 1.0]]
    given = _with(op, weight=[0.75, 0.5], scale=[0.5], lambda_=0.5, normalize=True)
    job = job_for(op, deltas, **given)
    models = [e.params for e in job.task.experts]
    c = np.array(op.coefficients(job.task.params, models, job.task.facts))
    update = c @ job.experts.double().numpy()
    start = _base(op, job.case)
    if op.schema.name not in ORACLES and job.case.base is not None:  # a merge by angles
        start = job.task.facts[0] * job.case.base
    np.testing.assert_allclose(merge(op, job).numpy(), start + update, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "reach"), [("ram", [1.0, 1.0]), ("ramplus_tl", [1.25, 2.0]), ("sce", [1.0, 1.0])]
)
def test_coefficients_of_a_mean_are_those_of_a_lone_change(name: str, reach: list[float]) -> None:
    op = OPERATORS[name]
    rows = [[2.0, 2.0, 2.0, 0.0], [4.0, 0.0, 0.0, 0.0]]
    task = job_for(op, rows, **_with(op, r=0.5, alpha=2.0)).task
    assert list(op.coefficients(task.params, [(), ()], task.facts)) == reach


@every(lambda op: "variant" in {p.name for p in op.schema.parameters} and op.schema.fact == "drop")
def test_coefficients_hold_the_scale_of_the_paper(op: Operator) -> None:
    models = [(("weight", 3.0), ("density", d)) for d in (0.5, 1.0, 2.0)]
    assert op.coefficients((("variant", "paper"),), models, ()) == (6.0, 3.0, 3.0)
    assert op.coefficients((("variant", "paper"), ("rescale", False)), models, ()) == (3.0,) * 3
    assert op.coefficients((), models, ()) == (3.0,) * 3


def _with(op: Operator, **params: Any) -> dict[str, Any]:
    names = {p.name for p in op.schema.parameters}
    return {k: v for k, v in params.items() if k.rstrip("_") in names}


@every_operator
def test_int8_mask_has_no_effect(op: Operator) -> None:
    rows = [[1.0, -2.0, 0.5], [-2.0, 1.0, 0.5]]
    with_mask = merge(op, job_for(op, rows, **_with(op, int8_mask=True)))
    assert_same_bits(with_mask, merge(op, job_for(op, rows)))


@every(lambda op: op.schema.base != "optional")
def test_a_case_without_a_base_suits_exactly_the_operators_that_need_none(op: Operator) -> None:
    job = job_for(op, [[1.0, 2.0], [1.0, 2.0]])
    free = replace(job, base=None)
    if op.schema.needs_base:
        with pytest.raises(OperatorError, match="does not fit its task"):
            merge(op, free)
    else:
        assert_same_bits(merge(op, free), merge(op, job))


@pytest.mark.parametrize("name", ["dare_linear", "della_linear"])
def test_make_job_uses_the_numbers_it_tells_the_oracle(name: str) -> None:
    op = OPERATORS[name]
    job = job_for(op, [[1.0] * 50], density=[0.5], rescale=False)
    probability = oracles.dare_probability if name == "dare_linear" else oracles.della_probability
    keep = oracles.dropped(job.case, probability(job.case))
    assert (merge(op, job).numpy() == 1.0 + keep[0]).all()
    assert make_job(op, job.case).task == job.task
