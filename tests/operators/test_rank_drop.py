"""Ranks from counted digits are those of a stable sort, and decide what is kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.operators.kernels.rank_drop import drop_rows
from tests.support.laws import examples

KINDS = ("bfloat16", "float32", "equal", "few values")


def rows_of(kind: str, r: int, n: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    values = random.normal(size=(r, n)).astype(np.float32)
    if kind == "bfloat16":
        return (values.view(np.uint32) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    if kind == "equal":
        return np.full((r, n), -1.5, np.float32)
    return np.round(values * 2) if kind == "few values" else values


@settings(max_examples=examples(60), deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 4), st.integers(1, 700), st.integers(0, 2**32 - 1))
def test_what_is_kept_is_what_a_stable_sort_would_keep(
    kind: str, r: int, n: int, seed: int
) -> None:
    rows, random = rows_of(kind, r, n, seed), np.random.default_rng(seed + 1)
    numbers = random.integers(0, 2**32, r * n, np.uint32)
    limits = np.sort(random.integers(0, 2**32, n, np.uint64))
    factors = random.uniform(0.5, 2, n).astype(np.float32)
    order = np.argsort(np.abs(rows), axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(n)[None].repeat(r, 0), axis=1)
    kept = numbers.reshape(r, n) < limits[rank]
    wanted = rows * np.where(kept, factors[rank], np.float32(0))
    drop_rows(rows, numbers, limits, factors)
    np.testing.assert_array_equal(rows, wanted)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_ranks_above_all(odd: float) -> None:
    rows = np.array([[3.0, odd, -1.0]], np.float32)
    drop_rows(
        rows,
        np.zeros(3, np.uint32),
        np.array([0, 0, 1], np.uint64),
        np.array([1, 1, 1], np.float32),
    )
    np.testing.assert_array_equal(rows, np.array([[0, odd, 0]], np.float32))
