"""Fronts and what they cover, against inclusion and exclusion."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.search.pareto import REFERENCE, front, gaps, hypervolume


@st.composite
def some_values(draw: st.DrawFn) -> F64Array:
    """Up to seven rows of one to four objectives, with ties, and some below the reference."""
    size = draw(st.integers(0, 7)), draw(st.integers(1, 4))
    cells = draw(st.lists(st.integers(-5, 12), min_size=size[0] * size[1], max_size=49))
    return np.array(cells[: size[0] * size[1]], dtype=float).reshape(size) / 10


def covered(values: F64Array) -> float:
    """The union of boxes from the reference: all, less what two share, plus what three do, …"""
    sides = np.maximum(values - REFERENCE, 0.0)
    return float(
        sum(
            (-1) ** (n + 1) * np.prod(np.min(sides[list(chosen)], axis=0))
            for n in range(1, len(sides) + 1)
            for chosen in combinations(range(len(sides)), n)
        )
    )


@given(some_values())
def test_hypervolume_is_what_inclusion_and_exclusion_give(values: F64Array) -> None:
    assert hypervolume(values) == pytest.approx(covered(values), abs=1e-12)


@given(some_values())
def test_no_row_dominates_one_of_the_front_and_some_row_of_it_dominates_each_other(
    values: F64Array,
) -> None:
    best = front(values)

    def dominated(row: F64Array, by: F64Array) -> bool:
        return any((other >= row).all() and (other > row).any() for other in by)

    assert not any(dominated(row, values) for row in values[best])
    assert all(dominated(row, values[best]) for row in values[~best])


def test_gaps_lie_between_neighbours_of_the_front_and_equal_rows_have_none() -> None:
    values = np.array([[0.0, 1.0], [0.6, 0.2], [0.0, 1.0], [0.3, 0.1], [1.0, 0.0]])
    middles, sizes = gaps(values)
    assert middles == pytest.approx(np.array([[0.3, 0.6], [0.8, 0.1]]))
    assert sizes == pytest.approx([1.0, np.hypot(0.4, 0.2)])
