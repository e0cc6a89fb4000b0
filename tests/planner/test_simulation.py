"""Curves from samples: the straight line of a sum, and what a vote really does to its deltas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.stats import SAMPLE_WIDTH, TensorStats, narrowed, widened
from mergepipe_pipeline.planner.candidates import Curve, Row
from mergepipe_pipeline.planner.simulation import (
    PARTS,
    Simulate,
    SimulatedCurve,
    Simulation,
    Simulations,
    pooled,
)
from tests.planner.test_kept_sq_norm import statistics
from tests.support.oracles import elected

GRID = BlockGrid(4096)
Deltas = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]


def sampled(deltas: Deltas, weights: Floats) -> tuple[list[Row], list[TensorStats]]:
    """Rows and statistics of deltas [E, N], each block's sample its elements at equal steps."""
    stats, rows = [], []
    for i, delta in enumerate(deltas):
        found = statistics(delta)
        step = GRID.block_elems // SAMPLE_WIDTH
        blocks = delta.reshape(-1, GRID.block_elems)
        stats.append(replace(found, block_sample=narrowed(blocks[:, ::step].copy())))
        rows.append(
            Row(
                tensor=0,
                position=i,
                name=f"t#{i}",
                numel=len(delta),
                itemsize=2,
                coefficient=float(weights[i]),
                block_l2sq=found.block_l2sq,
                block_nonzero=found.block_nonzero,
            )
        )
    return rows, stats


def curve_of(deltas: Deltas, weights: Floats, simulate: Simulate) -> Curve | None:
    found = Simulation(*sampled(deltas, weights), GRID, simulate).simulated_curve()
    return found.curve if found else None


def summed(weights: Floats) -> Simulate:
    return lambda deltas: (weights[:, None] * deltas).sum(axis=0).astype(np.float32)


def voted(weights: Floats, least: float = 0.0) -> Simulate:
    """A normalised sign vote over what a trim at `least` leaves."""

    def simulate(deltas: Deltas) -> Deltas:
        kept = np.where(np.abs(deltas) >= least, deltas, 0) * weights[:, None]
        match = elected(kept)
        divisor = (weights[:, None] * match).sum(axis=0)
        merged = (kept * match).sum(axis=0) / np.where(divisor == 0, 1.0, divisor)
        return np.asarray(merged, np.float32)

    return simulate


def test_a_sum_of_orthogonal_deltas_falls_in_a_straight_line() -> None:
    rng = np.random.default_rng(0)
    deltas = np.zeros((4, 8 * 4096), np.float32)
    step = GRID.block_elems // SAMPLE_WIDTH
    for i in range(4):
        # Each expert changes other ones of the sampled elements.
        places = np.arange(i * step, deltas.shape[1], 4 * step)
        deltas[i, places] = rng.normal(size=len(places)) * (1 + i)
    weights = np.array([1.0, -0.5, 0.7, 0.3])
    curve = curve_of(deltas, weights, summed(weights))
    assert curve is not None
    np.testing.assert_allclose(curve.residual, 1 - curve.share, atol=0.01)
    assert curve.share[0] == 0
    assert curve.share[-1] == pytest.approx(1)
    assert (np.diff(curve.share) > 0).all()
    # A sample stands for the elements between, which do not change here.
    assert curve.factor == pytest.approx(step, rel=0.05)


@pytest.mark.parametrize("common", [0.0, 0.6])
@pytest.mark.parametrize("least", [0.0, 1.0])
def test_a_vote_errs_as_rehearsed_when_whole_experts_are_left_out(
    common: float, least: float
) -> None:
    rng = np.random.default_rng(1)
    n, weights = 128 * 4096, np.array([1.0, 0.8, 0.6, 0.4, 0.2])
    deltas = (common * rng.normal(size=n) + rng.normal(size=(5, n))).astype(np.float32)
    curve = curve_of(deltas, weights, voted(weights, least))
    assert curve is not None
    full = voted(weights, least)(deltas).astype(np.float64)
    sq_norm = (np.square(weights[:, None] * deltas.astype(np.float64))).sum(axis=1)
    update = np.square(full).sum()
    assert curve.factor * sq_norm.sum() == pytest.approx(update, rel=0.1)
    for count in range(5):
        some = deltas.copy()
        some[count:] = 0
        left = np.square(full - voted(weights, least)(some)).sum() / update
        share = sq_norm[:count].sum() / sq_norm.sum()
        assert np.interp(share, curve.share, curve.residual) == pytest.approx(
            left, rel=0.1, abs=0.02
        )


def test_where_nothing_changes_there_is_no_curve() -> None:
    nothing = np.zeros((2, 4096), np.float32)
    assert curve_of(nothing, np.ones(2), summed(np.ones(2))) is None


def test_where_samples_are_no_numbers_there_is_no_curve() -> None:
    deltas = np.ones((2, 4096), np.float32)
    assert curve_of(deltas, np.ones(2), lambda d: np.full(d.shape[1], np.nan, np.float32)) is None


def test_samples_of_many_experts_are_thinned_by_whole_blocks() -> None:
    rng = np.random.default_rng(2)
    deltas = rng.normal(size=(300, 64 * 4096 // 64)).astype(np.float32)
    seen = []
    weights = np.ones(300)

    def simulate(samples: Deltas) -> Deltas:
        seen.append(samples.shape)
        return summed(weights)(samples)

    curve = curve_of(deltas, weights, simulate)
    assert curve is not None
    assert len(seen) < 22, "by counts that double, not by single experts"
    np.testing.assert_allclose(curve.residual, np.interp(curve.share, [0, 1], [1, 0]), atol=0.35)


@given(seed=st.integers(0, 2**32), share=st.floats(0, 1))
def test_a_replay_finds_what_leaving_out_blocks_does_to_the_samples(
    seed: int, share: float
) -> None:
    """With all samples at hand, and each standing for as many elements."""
    rng = np.random.default_rng(seed)
    deltas = rng.normal(size=(3, 5 * 4096)).astype(np.float32)
    weights = rng.uniform(0.2, 1, 3)
    rows, stats = sampled(deltas, weights)
    vote = voted(weights, 0.5)
    omitted = [rng.random((5, 3)) < share, np.ones((5, 3), np.bool_), np.zeros((5, 3), np.bool_)]
    found = Simulation(rows, stats, GRID, vote).squares(omitted)
    assert found is not None
    assert found.shape == (3, PARTS)
    known = np.stack([widened(s.block_sample) for s in stats])  # [E, blocks, width]
    full = vote(known.reshape(3, -1).copy())
    for squares, left in zip(found, omitted, strict=True):
        some = np.where(left.T[:, :, None], 0, known).reshape(3, -1).astype(np.float32)
        wrong = np.square(full.astype(np.float64) - vote(some)).reshape(-1, PARTS)
        # Votes are float32: sums of squares of their differences agree to six digits.
        expected = wrong.sum(axis=0) * PARTS * (4096 / SAMPLE_WIDTH)
        np.testing.assert_allclose(squares, expected, rtol=1e-6)


def test_where_samples_tell_nothing_there_is_no_replay() -> None:
    nothing = np.zeros((2, 4096), np.float32)
    silent = Simulation(*sampled(nothing, np.ones(2)), GRID, summed(np.ones(2)))
    assert silent.squares([np.ones((1, 2), np.bool_)]) is None


def test_a_stage_draws_curves_when_they_are_asked_for_and_replays_by_number() -> None:
    rng = np.random.default_rng(4)
    tried, weights = [], np.ones(2)

    def simulate(samples: Deltas) -> Deltas:
        tried.append(samples.shape)
        return summed(weights)(samples)

    deltas = rng.normal(size=(2, 4096)).astype(np.float32)
    some, other = (Simulation(*sampled(deltas * k, weights), GRID, simulate) for k in (1, 2))
    stage = Simulations([{3: some}, {5: other}])
    assert tried == [], "nothing is tried before it is needed"
    left = [np.array([[True, False]])]
    replayed = stage.squares(5, left), other.squares(left)
    np.testing.assert_array_equal(*replayed)
    assert stage.squares(4, left) is None
    assert len(tried) == 2, "the full merge once, and each choice once"
    assert list(stage.curves) == [3, 5]
    count = len(tried)
    assert stage.curves[3].residual[0] == 1
    assert len(tried) == count


def simulated_curve(n: int, left: float, factor: float) -> SimulatedCurve:
    """A tensor of which this is left with half of the squared norm read, tried on n elements."""
    curve = Curve(np.array([0.0, 0.5, 1.0]), np.array([1.0, left, 0.0]), factor)
    return SimulatedCurve(curve, n, float(n))


def half(curve: Curve) -> float:
    return float(np.interp(0.5, curve.share, curve.residual))


def test_alike_tensors_have_one_curve() -> None:
    found = pooled({3: simulated_curve(64, 0.4, 2.0), 8: simulated_curve(100_000, 0.4, 2.0)})
    assert list(found) == [3, 8]
    for curve in found.values():
        assert half(curve) == pytest.approx(0.4)
        assert curve.factor == pytest.approx(2.0)
        assert (curve.residual[0], curve.residual[-1]) == (1, 0)
    assert pooled({}) == {}


def test_what_few_samples_say_is_drawn_to_what_all_say_and_many_samples_stand() -> None:
    few, many = simulated_curve(64, 0.9, 8.0), simulated_curve(1 << 20, 0.4, 2.0)
    found = pooled({0: few, 1: many})
    assert half(found[1]) <= half(found[0]) < 0.5 * (0.9 + 0.4)
    assert found[1].factor <= found[0].factor < 8.0
    assert half(found[1]) == pytest.approx(0.4, abs=0.001)
    alone = pooled({0: few})[0]
    assert (half(alone), alone.factor) == pytest.approx((0.9, 8.0))


def test_samples_that_show_no_update_weigh_nothing_and_end_no_plan() -> None:
    blank = replace(simulated_curve(64, 0.4, 2.0), sq_norm=0.0)
    found = pooled({0: blank, 1: replace(blank, has_shape=False)})
    assert half(found[0]) == pytest.approx(0.4)
    seen = pooled({0: blank, 1: simulated_curve(64, 0.8, 2.0)})
    assert half(seen[1]) == pytest.approx(0.8)
