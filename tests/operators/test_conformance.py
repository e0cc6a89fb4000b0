"""What every operator owes: the oracle's result for any windows; zero deltas change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.operators import OPERATORS, Operator, Window
from tests.operators.cases import assert_same_bits, big_job, job_for, jobs, make_job, merge
from tests.oracles import ORACLES

EPS = float(np.finfo(np.float32).eps)
law = settings(max_examples=40, deadline=None)
every_operator = pytest.mark.parametrize("op", OPERATORS.values(), ids=OPERATORS.keys())
delta_operators = [op for op in OPERATORS.values() if op.schema.space == "delta"]


def test_every_operator_has_an_oracle() -> None:
    assert set(OPERATORS) == set(ORACLES)


@every_operator
def test_an_operator_says_formula_reference_and_help(op: Operator) -> None:
    schema = op.schema
    assert OPERATORS[schema.name] is op
    assert schema.formula
    assert schema.reference.startswith("https://")
    assert all(p.help for p in schema.parameters)
    assert "weight" in {p.name for p in schema.parameters if p.scope == "model"}


@every_operator
@law
@given(data=st.data())
def test_a_merge_equals_the_float64_oracle_within_float32_rounding(
    op: Operator, data: st.DataObject
) -> None:
    job = data.draw(jobs(op))
    want = ORACLES[op.schema.name](job.case)
    base = np.zeros_like(want) if op.schema.space == "value" else job.case.base
    assert base is not None
    allowed = 4 * EPS * (np.abs(base) + np.abs(want - base))
    error = np.abs(merge(op, job).double().numpy() - want)
    assert (error <= allowed).all(), (want[error > allowed], error[error > allowed])


@every_operator
@law
@given(data=st.data())
def test_windows_of_any_cut_in_any_order_give_identical_bits(
    op: Operator, data: st.DataObject
) -> None:
    job = data.draw(jobs(op, max_numel=300))
    cuts = data.draw(st.lists(st.integers(1, max(1, job.numel - 1)), max_size=6))
    n_windows = len(set(cuts) - {0, job.numel}) + 1
    order = data.draw(st.permutations(range(n_windows)))
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
    job = big_job(op, 150_001)
    with _threads(1):
        whole = merge(op, job)
        pieces = merge(op, job, cuts=[1, 9, 1_000, 33_333, 99_998, 149_999])
    with _threads(3):
        assert_same_bits(merge(op, job), whole)
    assert_same_bits(pieces, whole)


@every_operator
def test_a_large_rounded_merge_stays_close_to_the_oracle(op: Operator) -> None:
    job = big_job(op, 30_000)
    # Float32 sees a sign sum on the other side of zero at most where the sum is all but zero.
    error = np.abs(merge(op, job).double().numpy() - ORACLES[op.schema.name](job.case))
    assert np.quantile(error, 0.999) < 1e-5


@pytest.mark.parametrize("op", delta_operators, ids=lambda op: op.schema.name)
@law
@given(data=st.data())
def test_all_zero_deltas_give_the_bits_of_the_base(op: Operator, data: st.DataObject) -> None:
    job = data.draw(jobs(op))
    assert job.base is not None
    base = job.base.masked_fill(job.base.abs() < 1, -0.0)
    zeros = torch.zeros_like(job.experts)
    assert_same_bits(merge(op, replace(job, base=base, experts=zeros)), base)
    assert_same_bits(merge(op, replace(job, base=base, experts=-zeros)), base)


@pytest.mark.parametrize("op", delta_operators, ids=lambda op: op.schema.name)
def test_a_tensor_without_experts_is_its_base(op: Operator) -> None:
    job = job_for(op, [[1.0, 2.0]])
    task = replace(job.task, experts=())
    assert_same_bits(merge(op, replace(job, task=task, experts=job.experts[:0])), torch.ones(2))


@every_operator
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


@every_operator
def test_coefficients_give_the_merge_of_agreeing_experts(op: Operator) -> None:
    deltas = np.array([[1.0, 2.0, 3.0], [0.5, 2.0, 1.0]])
    job = job_for(op, deltas.tolist(), weight=[0.75, 0.5], **_with(op, lambda_=0.5, normalize=True))
    models = [e.params for e in job.task.experts]
    c = np.array(op.coefficients(job.task.params, models))
    rows = job.experts.double().numpy()
    start = 0.0 if op.schema.space == "value" else 1.0
    np.testing.assert_allclose(merge(op, job).numpy(), start + c @ rows, rtol=1e-6)


def _with(op: Operator, **params: float | bool) -> dict[str, float | bool]:
    names = {p.name for p in op.schema.parameters}
    return {k: v for k, v in params.items() if k.rstrip("_") in names}


@every_operator
def test_int8_mask_has_no_effect(op: Operator) -> None:
    rows = [[1.0, -2.0, 0.5], [-2.0, 1.0, 0.5]]
    with_mask = merge(op, job_for(op, rows, **_with(op, int8_mask=True)))
    assert_same_bits(with_mask, merge(op, job_for(op, rows)))


@every_operator
def test_a_case_without_a_base_suits_exactly_the_operators_that_need_none(op: Operator) -> None:
    job = job_for(op, [[1.0, 2.0]])
    free = replace(job, base=None)
    if op.schema.needs_base:
        with pytest.raises(Exception, match="does not fit its task"):
            merge(op, free)
    else:
        assert_same_bits(merge(op, free), merge(op, job))


def test_make_job_uses_the_masks_it_tells_the_oracle() -> None:
    op = OPERATORS["dare_linear"]
    job = job_for(op, [[1.0] * 50], density=[0.5], rescale=False)
    assert job.case.keep is not None
    assert (merge(op, job).numpy() == 1.0 + job.case.keep[0]).all()
    assert make_job(op, job.case).task == job.task
