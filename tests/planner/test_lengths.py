"""How much longer δ̂ is read where it is trimmed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.arrays import F32Array, F64Array
from mergepipe_pipeline.packs.tails import tails_of
from mergepipe_pipeline.packs.ternary import step_of
from mergepipe_pipeline.planner.lengths import Trimmed, lengths_of
from tests.support.laws import examples

N = 40_000
UNIT = 0.5


def drawn(seed: int, signal: float) -> tuple[F32Array, list[np.ndarray]]:
    """δ, and three rungs in steps, each nearer to it; δ is noise beside a few directions."""
    rng = np.random.default_rng(seed)
    whole = rng.standard_normal((N // 200, 3)) @ rng.standard_normal((3, 200))
    delta = (signal * whole.reshape(-1) + rng.standard_normal(N)).astype(np.float32)
    near = [share * signal * whole.reshape(-1) for share in (0.6, 0.8, 1.0)]
    return delta, [np.rint(x / step_of(UNIT)).astype(np.int16) for x in near]


def kept(values: np.ndarray, least: float) -> float:
    size = np.abs(values.astype(np.float64))
    return float(np.square(size[size > least]).sum())


def oracle(values: np.ndarray, least: float, target_sq: float) -> float:
    """The least length, in steps of a thousandth, at which so much is kept; 1.15 at most."""
    lengths = np.geomspace(0.5, 1.15, 800)
    return next((x for x in lengths if kept(x * values, least) >= target_sq), 1.15)


@given(st.integers(0, 2**32), st.floats(0.4, 3), st.floats(0.1, 0.9))
@settings(max_examples=examples(25))
def test_what_is_kept_of_a_level_is_as_long_as_its_share_of_delta_says(
    seed: int, signal: float, density: float
) -> None:
    delta, rungs = drawn(seed, signal)
    rms = [float(np.sqrt(np.square(n * step_of(UNIT), dtype=np.float64).mean())) for n in rungs]
    least = float(np.quantile(np.abs(delta), 1 - density))
    whole = float(np.square(delta, dtype=np.float64).sum())
    kept_sq, read = kept(delta, least), [n * step_of(UNIT) for n in rungs]
    left = [float(np.square(delta - x, dtype=np.float64).sum()) for x in read]
    residual_sq = np.array([[x] for x in left] + [[0.1 * whole]] * 4, np.float32)
    trimmed = Trimmed(least, kept_sq, np.array([whole]), N)
    found = lengths_of(tails_of(delta, rungs, UNIT, rms), residual_sq, trimmed)
    for length, x, rest in zip(found, read, left, strict=False):
        share = 0.68 + 0.3 * max(0.0, 1 - rest / whole)
        assert length == pytest.approx(oracle(x, least, share**2 * kept_sq), rel=0.02)


def test_a_row_of_which_nothing_is_known_or_kept_is_read_as_it_is() -> None:
    delta, rungs = drawn(1, 1.0)
    tails = tails_of(delta, rungs, UNIT, [1.0, 1.0, 1.0])
    some, none = np.ones((7, 2), np.float32), np.full((7, 2), np.inf, np.float32)
    known: F64Array = np.array([4.0, 4.0])
    for residual_sq, kept_sq, delta_sq in (
        (none, 1.0, known),
        (some, 0.0, known),
        (some, 1.0, np.array([np.inf, 1.0])),
    ):
        trimmed = Trimmed(0.5, kept_sq, delta_sq, N)
        assert (lengths_of(tails, residual_sq, trimmed) == 1).all()
