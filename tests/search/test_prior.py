"""Scores from differences of layers, as AP-BMM's code has them, and their length-scales."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.search.prior import (
    length_scales,
    smooth_scores,
)

scores_of_layers = st.lists(st.integers(0, 100), min_size=3, max_size=40, unique=True)


def robust(scores: Sequence[float]) -> list[float]:
    """The paper's normalisation, for scores of which no half is equal."""
    middle = median(scores)
    spread = 1.4826 * median(abs(s - middle) for s in scores) + 1e-8
    return [1 / (1 + exp(-(s - middle) / spread)) for s in scores]


@given(scores_of_layers)
def test_scores_are_normalised_smoothed_and_clipped_as_in_the_paper(layers: list[int]) -> None:
    each = robust(layers)
    inner = [(a + 2 * b + c) / 4 for a, b, c in zip(each, each[1:], each[2:], strict=False)]
    expected = np.clip([each[0], *inner, each[-1]], 0.05, 1.0)
    assert smooth_scores(np.array(layers, float)) == pytest.approx(expected)


@pytest.mark.parametrize("huge", [0.0, 1e300])
def test_scores_that_are_mostly_equal_or_unknown_or_far_apart_are_ranked_without_warning(
    huge: float,
) -> None:
    assert smooth_scores(np.array([3.0, 3, 3, 3])).tolist() == [0.5] * 4
    assert smooth_scores(np.full(4, np.nan)).tolist() == [0.5] * 4
    found = smooth_scores(np.array([0.0, 0, 0, 1e-3 + huge, 0, 0, np.nan]))
    assert found.argmax() in (3, 6)
    few_apart = np.array([0.0, 1e-7, 1.0, 2e-7, huge])
    assert np.isfinite(smooth_scores(few_apart)).all()
    assert np.isfinite(smooth_scores(-few_apart)).all()


def test_length_scales_keep_how_far_scores_are_apart() -> None:
    scores = np.array([1.0, 0.5, 0.05, 0.05])
    assert np.allclose(length_scales(scores), [0.5, 1.0, 10.0, 10.0])
