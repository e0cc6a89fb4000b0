"""What a sparsifying method keeps, against deltas that are sparsified for real."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.plan import TrimRule
from mergepipe_pipeline.domain.stats import SAMPLE_WIDTH, Kept, TensorStats
from mergepipe_pipeline.planner.kept_sq_norm import Sparse, kept_sq_norms
from tests.support.laws import examples
from tests.support.oracles import largest

GRID = BlockGrid(4096)
Deltas = npt.NDArray[np.float32]


def statistics(delta: Deltas) -> TensorStats:
    """What an analysis finds, from the definitions."""
    bits = np.abs(delta).view(np.uint32)
    bins, counts = np.unique((bits >> 16).astype(np.uint16), return_counts=True)
    square = np.square(delta.astype(np.float64))
    starts = np.arange(0, len(delta), GRID.block_elems)
    nothing = np.zeros((len(starts), SAMPLE_WIDTH), np.uint16)
    return TensorStats(
        tensor="w",
        base_tensor="w",
        digest="",
        base_digest="",
        dtype="F32",
        base_dtype="F32",
        numel=len(delta),
        l1=float(np.abs(delta).sum(dtype=np.float64)),
        l2sq=float(square.sum()),
        max_abs=float(np.abs(delta).max()),
        nonzero=int(np.count_nonzero(delta)),
        hist_bins=bins,
        hist_counts=counts.astype(np.int64),
        block_l2sq=np.add.reduceat(square, starts),
        block_max_abs=np.maximum.reduceat(np.abs(delta), starts),
        block_nonzero=np.add.reduceat((delta != 0).astype(np.int64), starts),
        block_sample=nothing,
    )


def rule(delta: Deltas, keep: int) -> tuple[TrimRule, npt.NDArray[np.bool_]]:
    """The rule that keeps so many of the largest, and what it keeps."""
    size = np.abs(delta)
    kept = largest(size.astype(np.float64), keep)
    least = size[kept].min()
    ties = np.flatnonzero(kept & (size == least))
    return TrimRule(int(least.view(np.uint32)), int(ties.max()) + 1), kept


def kept_sq_norm(
    stats: TensorStats, trim: TrimRule | None, above: TrimRule | None, counts: tuple[int, int]
) -> Kept:
    """What is kept of one tensor."""
    (kept,) = kept_sq_norms([sparse(stats, trim, above, counts)], GRID)
    return kept


def sparse(
    stats: TensorStats, trim: TrimRule | None, above: TrimRule | None, counts: tuple[int, int]
) -> Sparse:
    return Sparse(stats, (stats.hist_bins, stats.hist_counts), trim, above, counts)


def normal(seed: int, blocks: float, *, spread: float = 0.5) -> Deltas:
    """Normal deltas whose blocks differ in size."""
    rng = np.random.default_rng(seed)
    n = int(blocks * GRID.block_elems)
    sizes = np.exp(rng.normal(0, spread, GRID.count(n))) * 1e-3
    return (rng.normal(size=n) * sizes[np.arange(n) // GRID.block_elems]).astype(np.float32)


def near_ulp(seed: int, n: int) -> Deltas:
    """Deltas of bfloat16 that are an ulp or a few: every magnitude occurs very often."""
    rng = np.random.default_rng(seed)
    ulps = np.exp2(rng.integers(-12, -9, n))
    return (np.rint(rng.normal(size=n)) * ulps).astype(np.float32)


class Band(NamedTuple):
    """A band's two rules, how many of the largest are above each, and what it leaves of deltas."""

    trim: TrimRule
    above: TrimRule
    counts: tuple[int, int]
    left: Deltas


def band_of(delta: Deltas, density: float, outliers: float) -> Band:
    n_above = max(1, int(outliers * len(delta)))
    n_kept = min(len(delta), n_above + max(1, int(density * len(delta))))
    above, out = rule(delta, n_above)
    trim, kept = rule(delta, n_kept)
    return Band(trim, above, (n_kept, n_above), np.where(kept & ~out, delta, np.float32(0)))


@settings(max_examples=examples(50))
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 9000),
    density=st.floats(0.001, 1),
    kind=st.sampled_from(["normal", "heavy", "few values", "sparse", "tiny"]),
)
def test_no_sparsified_delta_has_more_sq_norm_than_the_most(
    seed: int, n: int, density: float, kind: str
) -> None:
    rng = np.random.default_rng(seed)
    drawn = {
        "normal": rng.normal(size=n),
        "heavy": rng.standard_t(1.5, n),
        "few values": rng.choice([-0.5, 0.25, 0.0], n),
        "sparse": rng.normal(size=n) * (rng.random(n) < 0.01),
        "tiny": rng.normal(size=n) * 1e-30,
    }[kind]
    delta = drawn.astype(np.float32)
    stats = statistics(delta)
    band, keep = band_of(delta, density, 0.05), max(1, int(density * n))
    kept = rule(delta, keep)
    for found, exact in (
        (kept_sq_norm(stats, kept[0], None, (keep, 0)), np.where(kept[1], delta, 0)),
        (kept_sq_norm(stats, band.trim, band.above, band.counts), band.left),
        (kept_sq_norm(stats, None, None, (n, 0)), delta),
    ):
        true = np.square(exact.astype(np.float64)).sum()
        assert true <= found.most * (1 + 1e-9)
        assert found.most <= stats.l2sq * (1 + 1e-6)
        assert (found.block_sq_norm >= 0).all()
        assert (found.block_sq_norm <= stats.block_l2sq * (1 + 1e-9)).all()


@pytest.mark.parametrize("density", [0.05, 0.2, 0.6])
@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_blocks_keep_about_what_a_trim_leaves_them(density: float, spread: float) -> None:
    delta = normal(3, 24.5, spread=spread)
    keep = int(density * len(delta))
    trim, kept = rule(delta, keep)
    found = kept_sq_norm(statistics(delta), trim, None, (keep, 0)).block_sq_norm
    exact = statistics(np.where(kept, delta, np.float32(0))).block_l2sq
    assert found.sum() == pytest.approx(exact.sum(), rel=0.02)
    assert np.corrcoef(found, exact)[0, 1] > 0.99 or spread == 0


@pytest.mark.parametrize(
    "delta",
    [normal(4, 16), near_ulp(4, 70_000), np.sign(near_ulp(4, 70_000))],
    ids=["normal", "ulps", "one magnitude"],
)
def test_blocks_keep_about_what_a_band_leaves_them(delta: Deltas) -> None:
    band = band_of(delta, 0.3, 0.02)
    found = kept_sq_norm(statistics(delta), band.trim, band.above, band.counts)
    assert found.block_sq_norm.sum() == pytest.approx(statistics(band.left).l2sq, rel=0.02)


@pytest.mark.parametrize("density", [0.05, 0.2, 0.3, 0.6])
def test_of_equal_deltas_only_those_count_that_a_trim_keeps(density: float) -> None:
    delta = near_ulp(9, 100_000)
    keep = int(density * len(delta))
    trim, kept = rule(delta, keep)
    found = kept_sq_norm(statistics(delta), trim, None, (keep, 0)).block_sq_norm
    assert found.sum() == pytest.approx(np.square(delta[kept], dtype=np.float64).sum(), rel=0.02)


def test_without_thresholds_all_is_kept_and_of_nothing_nothing() -> None:
    delta = normal(5, 2)
    stats = statistics(delta)
    whole = kept_sq_norm(stats, None, None, (len(delta), 0)).block_sq_norm
    np.testing.assert_allclose(whole, stats.block_l2sq)
    nothing = statistics(np.zeros(5000, np.float32))
    assert kept_sq_norm(nothing, TrimRule(0, 0), None, (1, 0)).most == 0


def test_a_block_below_the_threshold_keeps_nothing() -> None:
    delta = np.concatenate([normal(6, 1), normal(7, 1) * np.float32(1e-3)])
    trim, _ = rule(delta, 1000)
    assert kept_sq_norm(statistics(delta), trim, None, (1000, 0)).block_sq_norm[1] == 0


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 2**32), lengths=st.lists(st.integers(1, 9000), min_size=2, max_size=5))
def test_each_tensor_is_estimated_as_it_is_alone(seed: int, lengths: list[int]) -> None:
    tensors = []
    for number, n in enumerate(lengths):
        # From one that is all zero up to one a million times as large.
        delta = normal(seed + number, n / GRID.block_elems) * np.float32(10**number * (number > 0))
        keep = max(1, n // 3)
        tensors.append(sparse(statistics(delta), rule(delta, keep)[0], None, (keep, 0)))
    together = kept_sq_norms(tensors, GRID)
    for tensor, kept in zip(tensors, together, strict=True):
        (alone,) = kept_sq_norms([tensor], GRID)
        np.testing.assert_allclose(kept.block_sq_norm, alone.block_sq_norm, rtol=1e-9)
        assert kept.most == pytest.approx(alone.most, rel=1e-9)
