"""The mean of models has one value: that of the exact sum, in any order and by any way there."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mergepipe_pipeline.arrays import F32Array
from mergepipe_pipeline.operators.steps.exact import Sums, mean_of
from tests.support.laws import examples

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
#: Numbers of sizes that meet, of sizes that never do, and any.
NUMBERS = st.one_of(st.floats(-1, 1, width=16), st.sampled_from([1e-45, 1e30, -0.0, 1.0]), FINITE)
ROWS = st.tuples(st.integers(1, 9), st.integers(1, 40)).flatmap(
    lambda shape: arrays(np.float32, shape, elements=NUMBERS)
)


def bits(values: F32Array) -> list[int]:
    return [int(b) for b in values.view(np.uint32)]


def rounded(column: F32Array) -> np.float32:
    """The mean by fractions: the sum rounded once, then divided, then rounded."""
    total = float(sum(map(Fraction, column.tolist())))
    return np.float32(total / len(column))


@settings(max_examples=examples(200))
@given(ROWS)
def test_a_mean_is_that_of_the_sum_by_fractions(rows: F32Array) -> None:
    wanted = np.array([rounded(rows[:, e]) for e in range(rows.shape[1])], np.float32)
    assert bits(mean_of(rows)[0]) == bits(wanted + np.float32(0))


@settings(max_examples=examples(100))
@given(ROWS, st.randoms(use_true_random=False))
def test_no_order_of_the_models_changes_a_bit(rows: F32Array, random: object) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert bits(mean_of(rows)[0]) == bits(mean_of(rows[order])[0])


@settings(max_examples=examples(200))
@given(ROWS, st.integers(1, 8))
def test_sums_that_slide_are_the_sums_of_all_or_say_that_they_are_none(
    rows: F32Array, count: int
) -> None:
    count = min(count, len(rows))
    sums = mean_of(rows[:count])[1]
    for new in range(count, len(rows)):
        sums.add(rows[[new - count, new]], [-1, 1])
        all_of_them = mean_of(rows[new - count + 1 : new + 1])[0]
        slid = sums.mean(count)
        assert bits(slid[sums.exact]) == bits(all_of_them[sums.exact])


def test_sums_of_training_are_exact_and_those_of_far_sizes_say_that_they_are_none() -> None:
    noise = np.random.default_rng(0)
    rows = noise.normal(0, 0.02, (20, 1 << 14)).astype(np.float32)
    assert mean_of(rows)[1].exact.all()
    assert not mean_of(np.array([[1e30], [1e-45], [1e-7], [7e-20]], np.float32))[1].exact.any()


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_and_is_no_exact_sum(odd: float) -> None:
    rows = np.array([[1.0, 2.0], [odd, 3.0], [-1.0, 4.0]], np.float32)
    mean, sums = mean_of(rows)
    assert np.array_equal(mean, np.array([odd, 3.0], np.float32), equal_nan=True)
    assert list(sums.exact) == [False, True]
    both = np.array([[np.inf], [-np.inf]], np.float32)
    assert np.isnan(mean_of(both)[0]).all()


def test_adding_nothing_changes_nothing() -> None:
    sums = Sums.zero(3)
    sums.add(np.zeros((2, 3), np.float32), [1, -1])
    assert sums.exact.all()
    assert not sums.high.any()
