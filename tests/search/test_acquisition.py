"""How candidates of equal gain are told apart."""

from __future__ import annotations

import numpy as np

from mergepipe_pipeline.search.bayes import reranked

VALUES = np.array([[0.0, 1.0], [0.1, 0.9], [1.0, 0.0]])
POINTS = np.array([[0.1, 0.1], [0.5, 0.5], [0.9, 0.9]])
EQUAL, NOWHERE = np.zeros(3), np.full((3, 2), -9.0)
NONE = np.empty((0, 2))


def test_of_equal_gains_the_candidate_in_the_widest_gap_comes_first() -> None:
    means = np.array([[0.05, 0.95], [0.55, 0.45], [1.0, 0.0]])
    assert reranked(POINTS, EQUAL, means, VALUES, NONE)[0] == 1


def test_of_equal_gains_the_candidate_next_to_a_pending_point_comes_last() -> None:
    assert reranked(POINTS, EQUAL, NOWHERE, VALUES, np.array([[0.12, 0.1]]))[-1] == 0


def test_neither_gap_nor_distance_outweighs_a_gain_that_is_far_ahead() -> None:
    means = np.array([[0.55, 0.45], [0.0, 0.0], [1.0, 0.0]])
    gains = np.array([-3.0, -1.0, -3.0])
    assert reranked(POINTS, gains, means, VALUES, POINTS[1:2])[0] == 1


def test_a_gap_outweighs_what_a_tenth_of_the_gain_is_worth_but_not_a_third() -> None:
    means = np.array([[0.55, 0.45], [-9.0, -9.0], [-9.0, -9.0]])
    for share, first in ((0.9, 0), (0.67, 1)):
        gains = np.log([share, 1.0, 1e-9])  # the worst one says nothing about the others
        assert reranked(POINTS, gains, means, VALUES, NONE)[0] == first


def test_a_front_of_one_point_has_no_gap_to_fill() -> None:
    assert reranked(POINTS, EQUAL, NOWHERE, VALUES[:1], NONE).tolist() == [0, 1, 2]
