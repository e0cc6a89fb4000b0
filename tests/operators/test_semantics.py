"""Small merges by hand: what the merge methods mean where names alone do not say it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mergepipe_pipeline.operators import OPERATORS
from tests.operators.cases import job_for, merge

TIES = OPERATORS["ties"]


def _update(name: str, deltas: list[list[float]], **params: Any) -> list[float]:
    op = OPERATORS[name]
    base = 0.0 if op.schema.space == "value" else 1.0
    return [v - base for v in merge(op, job_for(op, deltas, **params)).tolist()]


def test_weights_enter_the_sign_vote() -> None:
    assert _update("ties", [[2.0], [-1.0]], weight=[1.0, 4.0]) == [-1.0]


def test_a_zero_sign_sum_counts_as_plus() -> None:
    assert _update("ties", [[1.0], [-1.0]]) == [1.0]


def test_zeros_never_agree_so_the_divisor_counts_agreeing_weights_only() -> None:
    assert _update("ties", [[3.0], [0.0], [1.0]], weight=[1.0, 8.0, 1.0]) == [2.0]


def test_ties_without_normalize_sums_what_agrees() -> None:
    assert _update("ties", [[3.0], [-1.0], [1.0]], normalize=False) == [4.0]


def test_agreeing_weights_that_cancel_divide_by_one() -> None:
    # 2·1 and −2·−1 agree on plus; their weights sum to zero.
    assert _update("ties", [[1.0], [-1.0]], weight=[2.0, -2.0]) == [4.0]


def test_lambda_scales_after_normalisation() -> None:
    assert _update("ties", [[3.0], [1.0]], lambda_=0.5) == [1.0]


def test_trim_breaks_ties_by_the_lowest_index_over_the_whole_tensor() -> None:
    deltas = [[1.0, -2.0, 2.0, 2.0, -2.0, 0.5]]
    assert _update("ties", deltas, density=[0.5]) == [0.0, -2.0, 2.0, 2.0, 0.0, 0.0]


def test_a_nan_is_never_trimmed_away() -> None:
    job = job_for(TIES, [[1.0, 3.0, 0.5, 0.25] * 9], density=[0.25])
    job.experts[0, 2] = torch.nan
    job.experts[0, 35] = torch.nan
    assert merge(TIES, job).isnan().nonzero().flatten().tolist() == [2, 35]


def test_density_one_or_more_leaves_the_delta_alone_even_if_rescale_is_set() -> None:
    for density in (1.0, 2.0):
        assert _update("ties", [[1.0, 3.0]], density=[density], rescale=True) == [1.0, 3.0]


def test_ties_with_rescale_matches_the_l1_norm() -> None:
    assert _update("ties", [[1.0, 3.0]], density=[0.5], rescale=True) == [0.0, 4.0]


def test_ties_does_not_rescale_by_default() -> None:
    assert _update("ties", [[1.0, 3.0]], density=[0.5]) == [0.0, 3.0]


@pytest.mark.parametrize("name", ["dare_linear", "dare_ties"])
def test_dare_matches_the_l1_norm_by_default(name: str) -> None:
    update = _update(name, [[1.0] * 64], density=[0.5])
    assert sum(update) == pytest.approx(64, rel=1e-6)
    assert 0 < update.count(0.0) < 64


@pytest.mark.parametrize("name", ["dare_linear", "dare_ties"])
def test_dare_with_density_zero_gives_the_base(name: str) -> None:
    assert _update(name, [[1.0, 2.0]], density=[0.0]) == [0.0, 0.0]


def test_task_arithmetic_does_not_normalize_by_default() -> None:
    assert _update("task_arithmetic", [[1.0], [3.0]], weight=[0.5, 0.5]) == [2.0]
    assert _update("task_arithmetic", [[1.0], [3.0]], normalize=True) == [2.0]


def test_task_arithmetic_weights_that_cancel_are_not_divided_by() -> None:
    assert _update("task_arithmetic", [[1.0], [3.0]], weight=[1.0, -1.0], normalize=True) == [-2.0]


def test_linear_normalizes_by_default() -> None:
    assert _update("linear", [[1.0], [3.0]], weight=[2.0, 2.0]) == [3.0]
    assert _update("linear", [[1.0], [3.0]], weight=[2.0, 2.0], normalize=False) == [12.0]
