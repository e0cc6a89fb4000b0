"""Cosines from sketches: right on average, exact at the ends, cautious where chance explains it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from mergepipe_pipeline.domain.stats import SKETCH_WIDTH, narrowed
from mergepipe_pipeline.planner.inner_products import Gram

Halves = npt.NDArray[np.float32]


def sketches(cosine: npt.ArrayLike, blocks: int, seed: int = 0) -> list[npt.NDArray[np.uint16]]:
    """Sketches of experts with these cosines [E, E] in every block, of random sizes."""
    rng = np.random.default_rng(seed)
    root = np.linalg.cholesky(np.asarray(cosine, np.float64))
    lanes = np.einsum("ij,bjk->ibk", root, rng.normal(size=(blocks, len(root), SKETCH_WIDTH)))
    lanes *= np.exp(rng.normal(size=(len(root), blocks, 1)))
    return [narrowed(e.astype(np.float32)) for e in lanes]


def cosines(given: list[npt.NDArray[np.uint16]], *, cautious: bool) -> Halves:
    """All batches as one table."""
    gram = Gram(given)
    return np.concatenate([c for _, c in (gram.cautious() if cautious else gram.plain())])


def matrix(rho: float, experts: int = 3) -> npt.NDArray[np.float64]:
    return np.full((experts, experts), rho) + (1 - rho) * np.eye(experts)


@pytest.mark.parametrize("rho", [-0.4, 0.0, 0.3, 0.8])
def test_without_caution_cosines_are_right_on_average_and_err_as_stated(rho: float) -> None:
    found = cosines(sketches(matrix(rho), 4000), cautious=False)[:, 0, 1]
    error = (1 - rho**2) / SKETCH_WIDTH**0.5
    assert abs(float(found.mean()) - rho) < 4 * error / 4000**0.5
    assert float(found.std()) == pytest.approx(error, rel=0.08)


def test_without_caution_blocks_err_independently_whatever_their_size() -> None:
    given = sketches(matrix(0.5, 2), 2000)
    off = cosines(given, cautious=False)[:, 0, 1] - 0.5
    assert abs(np.corrcoef(off[1:], off[:-1])[0, 1]) < 4 / 2000**0.5


@pytest.mark.parametrize("cautious", [False, True])
def test_equal_deltas_have_cosine_one_opposite_ones_minus_one(cautious: bool) -> None:
    (a,) = sketches(matrix(0, 1), 5)
    opposite = a ^ np.uint16(0x8000)
    found = cosines([a, a, opposite], cautious=cautious)
    wanted = np.broadcast_to([[1, 1, -1], [1, 1, -1], [-1, -1, 1]], found.shape)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("cautious", [False, True])
def test_what_is_zero_has_cosine_zero_and_shorter_experts_are_zero_beyond_their_end(
    cautious: bool,
) -> None:
    a, b = sketches(matrix(0.9, 2), 40)
    found = cosines([a, b[:25], np.zeros_like(a)], cautious=cautious)
    assert found.shape == (40, 3, 3)
    assert (found[25:, 0, 1] == 0).all()
    assert (found[:, :2, 2] == 0).all()
    assert (found[:25, 0, 1] > 0.5).all()
    assert (found[:, range(3), range(3)] == 1).all()


def test_what_is_not_finite_spoils_no_other_pair() -> None:
    a, b, c = sketches(matrix(0.9), 8)
    a = a.copy()
    a[0, :2] = np.array([0x7FC0, 0x7F80], np.uint16)
    found = cosines([a, b, c], cautious=False)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found[:, 1, 2], cosines([b, c], cautious=False)[:, 0, 1])


def test_cosines_are_symmetric_and_within_their_range() -> None:
    for cautious in (False, True):
        found = cosines(sketches(matrix(0.97, 4), 30), cautious=cautious)
        np.testing.assert_allclose(found, found.transpose(0, 2, 1), atol=1e-6)
        assert np.abs(found).max() <= 1


def test_with_caution_orthogonal_deltas_count_as_orthogonal() -> None:
    given = sketches(matrix(0.0, 6), 200)
    apart = ~np.eye(6, dtype=bool)
    careful = np.abs(cosines(given, cautious=True)[:, apart])
    assert float((careful == 0).mean()) > 0.95
    assert float(careful.mean()) < 0.02 * float(np.abs(cosines(given, cautious=False)).mean())


def test_with_caution_a_cosine_that_all_blocks_share_is_shared() -> None:
    found = cosines(sketches(matrix(0.5, 2), 200), cautious=True)[:, 0, 1]
    assert float(found.std()) < 0.02
    assert float(found.mean()) == pytest.approx(0.5, abs=0.1)


def test_with_caution_blocks_that_truly_differ_keep_their_own_cosines() -> None:
    alike, opposed = sketches(matrix(0.8, 2), 100), sketches(matrix(-0.8, 2), 100, seed=1)
    both = [np.concatenate(pair) for pair in zip(alike, opposed, strict=True)]
    found = cosines(both, cautious=True)[:, 0, 1]
    assert float(found[:100].mean()) > 0.7
    assert float(found[100:].mean()) < -0.7


@pytest.mark.parametrize("rho", [0.0, 0.2, 0.6])
def test_caution_never_makes_the_typical_cosine_larger(rho: float) -> None:
    for blocks in (1, 2, 50):
        given = sketches(matrix(rho), blocks, seed=blocks)
        careful, plain = (np.abs(cosines(given, cautious=c)) for c in (True, False))
        assert np.square(careful).sum() <= np.square(plain).sum() * 1.01
