"""Predicted errors against deltas that are known: right on average, and off as far as stated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.arrays import F32Array
from mergepipe_pipeline.planner.candidates import Candidates, Choice, Row, lay_out
from mergepipe_pipeline.planner.samples import STATED_ERRORS, Simulate
from mergepipe_pipeline.planner.selection import Prediction
from tests.planner.drawn import (
    GRID,
    Floats,
    candidates,
    known,
    left_out,
    originals,
    problem_of,
    row,
    sampled,
)


def predicted(
    c: Candidates,
    deltas: Floats | None,
    choices: Sequence[Choice],
    simulate: Simulate | None = None,
) -> list[Prediction]:
    """What is said of choices of whole blocks of one tensor, whose deltas are known."""
    q = problem_of(c)
    if deltas is not None:
        q = replace(q, samples={0: sampled(c.rows, deltas, simulate)})
    return q.predict([originals(choice) for choice in choices]) or []


@given(seed=st.integers(0, 2**32))
def test_a_single_omitted_delta_at_each_site_is_predicted_exactly(seed: int) -> None:
    rng = np.random.default_rng(seed)
    deltas = rng.normal(size=(3, 6, 64))
    c = lay_out(known(deltas, rng.normal(size=3).tolist()), GRID)
    choice = np.ones(len(c.row), np.bool_)
    choice[rng.integers(0, 3, 6) * 6 + np.arange(6)] = False
    (found,) = predicted(c, deltas, [choice])
    assert found.error == pytest.approx(left_out(c, deltas, choice) ** 0.5)
    assert found.margin == pytest.approx(0, abs=1e-4)


@given(c=candidates(), share=st.floats(0, 1))
def test_choices_are_predicted_one_by_one_or_together(c: Candidates, share: float) -> None:
    rng = np.random.default_rng(1)
    choices = [rng.random(len(c.row)) < share for _ in range(3)]
    together = predicted(c, None, choices)
    assert together == [p for choice in choices for p in predicted(c, None, [choice])]
    (nothing,) = predicted(c, None, [~c.zero])
    assert (nothing.error, nothing.margin) == (0.0, 0.0)


def test_without_statistics_nothing_is_predicted() -> None:
    unknown = replace(row(1.0), block_l2sq=None, block_nonzero=None)
    q = problem_of(lay_out([unknown], GRID))
    assert q.predict([np.zeros(1, np.int8)]) is None


def drawn(
    rng: np.random.Generator, rho: float, *, experts: int, blocks: int
) -> tuple[Candidates, Floats]:
    """Deltas [E, blocks, 256] with cosines `rho`, of which each fourth element is a sample."""
    common = rng.normal(size=(blocks, 256))
    deltas = rho**0.5 * common + (1 - rho) ** 0.5 * rng.normal(size=(experts, blocks, 256))
    deltas *= np.exp(rng.normal(0, 0.7, (experts, blocks, 1)))
    return lay_out(known(deltas, rng.uniform(0.3, 1.0, experts).tolist()), GRID), deltas


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize(("experts", "blocks"), [(2, 4), (8, 4), (4, 40)])
def test_predictions_err_as_often_as_their_margins_say(
    rho: float, experts: int, blocks: int
) -> None:
    """Over many draws the error in standard errors has mean 0; its spread is that of few parts."""
    rng = np.random.default_rng(3)
    scores = []
    for _ in range(150):
        c, deltas = drawn(rng, rho, experts=experts, blocks=blocks)
        choice = rng.random(len(c.row)) < (0.2 if experts > 2 else 0.0)
        (found,) = predicted(c, deltas, [choice])
        true = left_out(c, deltas, choice) ** 0.5
        assert found.margin is not None
        scores.append((found.error - true) * STATED_ERRORS / max(found.margin, 1e-9))
    assert abs(np.mean(scores)) < 0.35
    assert 0.5 < np.std(scores) < 1.5
    assert np.mean(np.abs(scores) > STATED_ERRORS) <= 0.02


def test_opposite_deltas_leave_nothing_and_equal_ones_add_up() -> None:
    one = np.random.default_rng(0).normal(size=(1, 5, 64))
    norm, none = float(np.linalg.norm(one)), np.zeros(10, np.bool_)
    equal, opposite = np.concatenate([one, one]), np.concatenate([one, -one])
    for deltas, weights, wanted in ((equal, [1.0, 0.5], 1.5), (opposite, [1.0, 1.0], 0.0)):
        (found,) = predicted(lay_out(known(deltas, weights), GRID), deltas, [none])
        error = 0.0 if found.error == np.inf else found.error  # samples show that nothing is left
        assert error == pytest.approx(wanted * norm, rel=1e-4)


@pytest.mark.parametrize("keep", [0.9, 0.5, 0.1])
@pytest.mark.parametrize("rho", [0.0, 0.8])
def test_what_a_random_drop_leaves_is_predicted_without_a_margin(keep: float, rho: float) -> None:
    rng = np.random.default_rng(4)
    ratios = []
    for _ in range(60):
        _, deltas = drawn(rng, rho, experts=3, blocks=16)
        rows = [
            replace(r, coefficient=r.coefficient / keep, keep=keep)
            for r in known(deltas, [1.0, 0.7, -0.4])
        ]
        (found,) = predicted(lay_out(rows, GRID), deltas, [np.zeros(48, np.bool_)])
        kept = deltas * (rng.random(deltas.shape) < keep)
        weights = np.array([r.coefficient for r in rows])
        true = float(np.linalg.norm(np.einsum("e,ebk->bk", weights, kept)))
        assert found.margin is None
        ratios.append(found.error / true)
    assert abs(np.mean(ratios) - 1) < 0.03
    assert np.std(ratios) < 0.15


def mean_of_kept(deltas: F32Array) -> F32Array:
    """The mean of the deltas that are not zero."""
    count = np.maximum((deltas != 0).sum(axis=0), 1)
    mean: F32Array = deltas.sum(axis=0) / count
    return mean


@given(seed=st.integers(0, 2**32))
def test_a_merge_that_is_no_sum_is_tried_on_samples(seed: int) -> None:
    rng = np.random.default_rng(seed)
    deltas = rng.integers(-8, 8, (3, 4, 64)).astype(np.float64)
    rows: list[Row] = [replace(r, is_sum=False) for r in known(deltas, [1.0, 1.0, 1.0])]
    c, choice = lay_out(rows, GRID), rng.random(12) < 0.5
    read = deltas * choice.reshape(3, 4)[:, :, None]
    off = mean_of_kept(deltas.astype(np.float32)) - mean_of_kept(read.astype(np.float32))
    found, update = predicted(c, deltas, [choice, np.zeros(12, np.bool_)], mean_of_kept)
    # Each sample stands for as many elements as the others.
    scale = (GRID.block_elems / 64) ** 0.5
    assert found.error in (pytest.approx(scale * np.linalg.norm(off)), np.inf)
    whole = scale * float(np.linalg.norm(mean_of_kept(deltas.astype(np.float32))))
    assert update.error == pytest.approx(whole)
    assert update.margin is None
