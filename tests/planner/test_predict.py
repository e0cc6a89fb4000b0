"""Predicted errors against deltas that are known: right on average, and off as far as stated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.domain.stats import SKETCH_WIDTH, narrowed
from mergepipe_pipeline.planner.candidates import Candidates, Curve, lay_out
from mergepipe_pipeline.planner.predict import STATED_ERRORS, Prediction, predict, try_choices
from mergepipe_pipeline.planner.simulation import PARTS
from tests.planner.drawn import GRID, Drawn, Floats, Replayed, candidates, known, left_out, row


@given(seed=st.integers(0, 2**32))
def test_a_single_omitted_delta_at_each_site_is_predicted_exactly(seed: int) -> None:
    rng = np.random.default_rng(seed)
    deltas = rng.normal(size=(3, 6, 64))
    c = lay_out(known(deltas, rng.normal(size=3).tolist()), GRID)
    choice = np.ones(len(c.row), np.bool_)
    choice[rng.integers(0, 3, 6) * 6 + np.arange(6)] = False
    (found,) = predict(c, [choice]) or []
    assert found.error == pytest.approx(left_out(c, deltas, choice) ** 0.5)
    assert found.margin == pytest.approx(0, abs=1e-6)


@given(c=candidates(), share=st.floats(0, 1))
def test_choices_are_predicted_one_by_one_or_together(c: Candidates, share: float) -> None:
    rng = np.random.default_rng(1)
    choices = [rng.random(len(c.row)) < share for _ in range(3)]
    together = predict(c, choices)
    assert together == [p for choice in choices for p in predict(c, [choice]) or []]
    (nothing,) = predict(c, [~c.zero]) or []
    assert (nothing.error, nothing.margin) == (0.0, 0.0)


def test_without_statistics_nothing_is_predicted() -> None:
    unknown = replace(row(1.0), block_l2sq=None, block_nonzero=None)
    assert predict(lay_out([unknown], GRID), [np.zeros(1, np.bool_)]) is None


def sketched(
    rng: np.random.Generator, rho: float, *, experts: int, blocks: int, numel: int
) -> tuple[Candidates, Floats]:
    """Deltas [E, blocks, numel] with cosines `rho`, and candidates with sketches of them."""
    common = rng.normal(size=(blocks, numel))
    deltas = rho**0.5 * common + (1 - rho) ** 0.5 * rng.normal(size=(experts, blocks, numel))
    deltas *= np.exp(rng.normal(0, 0.7, (experts, blocks, 1)))
    signs = rng.choice([-1.0, 1.0], numel)
    lanes = np.zeros((experts, blocks, SKETCH_WIDTH))
    for lane in range(SKETCH_WIDTH):
        lanes[:, :, lane] = (deltas * signs)[:, :, lane::SKETCH_WIDTH].sum(axis=2)
    rows = [
        replace(
            row(*np.square(d).sum(axis=1).tolist(), position=i),
            coefficient=float(rng.uniform(0.3, 1.0)),
            block_sketch=narrowed(lane.astype(np.float32)),
        )
        for i, (d, lane) in enumerate(zip(deltas, lanes, strict=True))
    ]
    return lay_out(rows, GRID), deltas


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize(
    ("experts", "blocks", "draws", "beyond"),
    [(2, 4, 150, 0.02), (8, 4, 150, 0.02), (4, 40, 60, 0)],
)
def test_predictions_err_as_often_as_their_margins_say(
    rho: float, experts: int, blocks: int, draws: int, beyond: float
) -> None:
    """Over many draws the error in standard errors has mean 0 and spread 1.

    Of few blocks, the error is not quite normal and its size is estimated with it.
    """
    rng = np.random.default_rng(3)
    scores = []
    for _ in range(draws):
        c, deltas = sketched(rng, rho, experts=experts, blocks=blocks, numel=256)
        choice = rng.random(len(c.row)) < (0.2 if experts > 2 else 0.0)
        (found,) = predict(c, [choice]) or []
        weights = np.array([r.coefficient for r in c.rows])
        omitted = ~choice.reshape(experts, blocks)
        true = np.linalg.norm(np.einsum("e,eb,ebk->bk", weights, omitted, deltas))
        assert found.margin is not None
        scores.append((found.error - true) * STATED_ERRORS / found.margin)
    assert abs(np.mean(scores)) < 0.35
    assert 0.7 < np.std(scores) < 1.25
    assert np.mean(np.abs(scores) > STATED_ERRORS) <= beyond


def test_opposite_deltas_leave_nothing_and_equal_ones_add_up() -> None:
    one = np.random.default_rng(0).normal(size=(1, 5, 64))
    equal = lay_out(known(np.concatenate([one, one]), [1.0, 0.5]), GRID)
    opposite = lay_out(known(np.concatenate([one, -one]), [1.0, 1.0]), GRID)
    none, norm = np.zeros(10, np.bool_), float(np.linalg.norm(one))
    assert (predict(equal, [none]) or [])[0].error == pytest.approx(1.5 * norm, rel=1e-4)
    assert (predict(opposite, [none]) or [])[0].error < 1e-2 * norm


@pytest.mark.parametrize("keep", [0.9, 0.5, 0.1])
@pytest.mark.parametrize("rho", [0.0, 0.8])
def test_what_a_random_drop_leaves_is_predicted_within_the_margin(keep: float, rho: float) -> None:
    rng = np.random.default_rng(4)
    scores = []
    for _ in range(60):
        deltas = sketched(rng, rho, experts=3, blocks=1, numel=4096)[1]
        rows = [
            replace(
                row(float(np.square(deltas[i]).sum()), position=i),
                coefficient=weight / keep,
                block_sq_norm=keep * np.square(deltas[i]).sum(axis=1),
                keep=keep,
                block_sketch=exact(deltas)[i],
            )
            for i, weight in enumerate((1.0, 0.7, -0.4))
        ]
        c = lay_out(rows, GRID)
        none = np.zeros(3, np.bool_)
        (found,) = predict(c, [none]) or []
        kept = deltas * (rng.random(deltas.shape) < keep)
        weights = np.array([r.coefficient for r in c.rows])
        true = float(np.linalg.norm(np.einsum("e,ebk->bk", weights, kept)))
        assert found.margin is not None
        scores.append((found.error - true) * STATED_ERRORS / found.margin)
    assert np.abs(scores).max() < STATED_ERRORS
    assert abs(np.mean(scores)) < 0.5


def exact(deltas: Floats) -> list[npt.NDArray[np.uint16]]:
    """Sketches [E, blocks, 64] of fewer than 65 deltas whose inner products are exact."""
    gram = np.einsum("ibk,jbk->bij", deltas, deltas)
    root = np.linalg.cholesky(gram)
    lanes = np.zeros((len(deltas), deltas.shape[1], SKETCH_WIDTH), np.float32)
    lanes[:, :, : len(deltas)] = root.transpose(1, 0, 2)
    return [narrowed(e) for e in lanes]


def test_no_margin_is_stated_for_what_is_no_sum() -> None:
    rows = [row(4.0, 1.0), replace(row(9.0, tensor=1), is_sum=False)]
    c = lay_out(rows, GRID)
    found = predict(c, [np.array([False, False, True]), np.array([True, True, False])])
    assert found is not None
    assert found[0].error == pytest.approx(5**0.5)
    assert found[0].margin == 0
    assert found[1] == Prediction(3.0, None)


def test_a_rehearsed_tensor_errs_as_its_curve_says_at_every_site() -> None:
    rows = [replace(row(9.0, 1.0, 0.0), is_sum=False), replace(row(4.0, 4.0, 0.0, position=1))]
    curve = Curve(np.array([0.0, 0.5, 1.0]), np.array([1.0, 0.1, 0.0]), 2.0)
    c = lay_out(rows, GRID, Drawn({0: curve}))
    choice = np.array([True, False, False, False, True, False])
    (found,) = predict(c, [choice]) or []
    first = 2.0 * 13 * np.interp(9 / 13, curve.share, curve.residual)
    second = 2.0 * 5 * np.interp(4 / 5, curve.share, curve.residual)
    assert found.error == pytest.approx((first + second) ** 0.5)
    assert found.margin is None


def test_only_what_the_samples_agree_on_is_certainly_nearer() -> None:
    """Block 0 of each of 8 parts saves about 2, block 1 about 1: by more or less chance."""
    rng = np.random.default_rng(0)
    noise, rows = rng.normal(size=PARTS), [replace(row(2.0, 1.0), is_sum=False)]
    first, second = np.array([True, False]), np.array([False, True])
    for spread, is_certain in ((0.1, True), (3.0, False)):
        costs = np.array([2 + spread * noise, 1 - spread * noise])
        c = lay_out(rows, GRID, Replayed({0: costs}))
        trial = try_choices(c, [first, second])
        assert trial.is_nearer(0, 1) is is_certain
        assert not trial.is_nearer(1, 0)
        assert not trial.is_nearer(0, 0)
        (found,) = predict(c, [second], replay=True) or []
        assert found.error == pytest.approx(costs[0].mean() ** 0.5)


def test_what_leaves_out_infinity_is_not_certainly_nearer() -> None:
    c = lay_out([replace(row(np.inf, 1.0), is_sum=False)], GRID, Replayed({0: np.ones((2, PARTS))}))
    with_it, without = np.array([True, False]), np.array([False, True])
    trial = try_choices(c, [without, with_it])
    assert not trial.is_nearer(0, 1)
    assert not trial.is_nearer(1, 0)
