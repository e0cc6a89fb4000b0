"""Trim rules from what the catalog lists, closed by a look at one block, against sorting."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.analysis.order import KEEP_ALL, KEEP_NONE, open_rule, plain_rule
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.plan import TrimRule
from mergepipe_pipeline.domain.stats import TensorStats
from mergepipe_pipeline.operators.kernels.nth_tie import closed
from tests.analysis.pairs import analyze_one, delta_of, on_disk
from tests.analysis.test_thresholds import kept_by, oracle
from tests.support.stored import Floats, Stored, encode

BLOCK = 4096
W = ("w", "w")


def stats_of(expert: Stored, base: Stored, block_elems: int = BLOCK) -> TensorStats:
    with on_disk({"w": expert}, {"w": base}, max(8192, block_elems)) as (e, b):
        return analyze_one(e, b, [W], BlockGrid(block_elems)).by_pair[W]


def rule_for(stats: TensorStats, keep: int, block_elems: int = BLOCK) -> TrimRule:
    assert stats.block_magnitudes is not None
    return open_rule(stats, stats.block_magnitudes, keep, block_elems)


def closed_by(delta: Floats, rule: TrimRule) -> TrimRule:
    """The rule after a look at its block."""
    return closed(rule, delta[rule.tie_stop_elem :]) if rule.is_open else rule


def keeps_of(stats: TensorStats) -> list[int]:
    """None, one, all, and what cuts at edges of blocks and inside them."""
    n = stats.nonzero
    return sorted({k for k in (0, 1, 2, n // 7, n // 3, n // 2, n - 1, n, n + 1) if k >= 0})


@given(
    n=st.integers(1, 20000),
    values=st.integers(1, 200),
    zeros=st.sampled_from([0.0, 0.5, 0.95]),
    far=st.sampled_from([0.0, 0.01, 0.1]),
    block_elems=st.sampled_from([4096, 8192]),
    seed=st.integers(0, 1000),
)
def test_a_rule_from_the_catalog_keeps_the_largest_and_cuts_ties_at_the_lowest_index(
    n: int, values: int, zeros: float, far: float, block_elems: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    start = rng.integers(-4, 5, n) / 4
    # Bases far smaller than the change leave a δ that no bfloat16 is.
    start[rng.random(n) < far] *= 1.625 * 2.0**-12
    start[rng.random(n) < 0.1] = -0.0
    change = rng.integers(-values, values + 1, n) / 64 * (rng.random(n) >= zeros)
    change[: n // 3] = 0
    expert, base = encode(start + change, "BF16"), encode(start, "BF16")
    delta, stats = delta_of(expert, base), stats_of(expert, base, block_elems)
    for keep in keeps_of(stats):
        rule = rule_for(stats, keep, block_elems)
        kept = kept_by(closed_by(delta, rule), delta)
        np.testing.assert_array_equal(kept & (delta != 0), oracle(delta, keep) & (delta != 0))


def test_a_cut_at_the_end_of_a_block_is_not_open() -> None:
    ones = np.where(np.arange(3 * BLOCK) % 2, 1.0, -1.0)
    stats = stats_of(encode(ones, "BF16"), encode(np.zeros(3 * BLOCK), "BF16"))
    one = int(np.float32(1).view(np.uint32))
    assert rule_for(stats, BLOCK) == TrimRule(one, BLOCK)
    assert rule_for(stats, BLOCK + 1) == TrimRule(one, BLOCK, 1, 2 * BLOCK)
    assert rule_for(stats, 2 * BLOCK - 1) == TrimRule(one, BLOCK, BLOCK - 1, 2 * BLOCK)
    assert rule_for(stats, 2 * BLOCK) == TrimRule(one, 2 * BLOCK)


def test_blocks_without_a_difference_hold_no_ties() -> None:
    change = np.zeros(4 * BLOCK)
    change[BLOCK + 5 : BLOCK + 25] = 1
    change[3 * BLOCK + 7 :] = -1
    stats = stats_of(encode(change, "BF16"), encode(np.zeros(4 * BLOCK), "BF16"))
    rule = rule_for(stats, 30)
    assert (rule.tie_stop_elem, rule.ties_after, rule.ties_until_elem) == (
        3 * BLOCK,
        10,
        4 * BLOCK,
    )
    assert closed_by(change.astype(np.float32), rule) == TrimRule(
        rule.threshold_bits, 3 * BLOCK + 17
    )


def test_the_last_block_ends_with_the_tensor() -> None:
    n = BLOCK + 100
    stats = stats_of(encode(np.ones(n), "BF16"), encode(np.zeros(n), "BF16"))
    assert rule_for(stats, n - 3).ties_until_elem == n


def test_keeping_nothing_and_keeping_all_need_no_list() -> None:
    some = np.arange(BLOCK) % 10.0
    stats = stats_of(encode(some, "BF16"), encode(np.zeros(BLOCK), "BF16"))
    assert plain_rule(stats, 0) == KEEP_NONE
    assert plain_rule(stats, stats.nonzero) == plain_rule(stats, BLOCK) == KEEP_ALL
    assert plain_rule(stats, stats.nonzero - 1) is None


def test_of_fewer_ties_than_are_to_be_kept_all_are() -> None:
    delta = np.ones(100, np.float32)
    bits = int(delta[:1].view(np.uint32)[0])
    assert closed(TrimRule(bits, 4096, 200, 8192), delta) == TrimRule(bits, 8192)


@pytest.mark.parametrize(("dtype", "is_listed"), [("BF16", True), ("F32", False)])
def test_magnitudes_are_listed_where_nearly_all_are_bfloat16(dtype: str, is_listed: bool) -> None:
    rng = np.random.default_rng(0)
    start = rng.standard_normal(3 * BLOCK)
    expert = encode(start + rng.standard_normal(3 * BLOCK) / 100, dtype)
    stats = stats_of(expert, encode(start, dtype))
    assert (stats.block_magnitudes is not None) == is_listed


def test_a_list_has_every_magnitude_of_every_block(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    start = rng.standard_normal(3 * BLOCK + 10)
    expert, base = (
        encode(start + rng.standard_normal(len(start)) / 50, "BF16"),
        encode(start, "BF16"),
    )
    delta, stats = delta_of(expert, base), stats_of(expert, base)
    listed = stats.block_magnitudes
    assert listed is not None
    assert np.any(listed.bits & 0xFFFF)
    for block in range(4):
        bits = np.abs(delta[block * BLOCK : (block + 1) * BLOCK]).view(np.uint32)
        values, counts = np.unique(bits[bits > 0], return_counts=True)
        here = slice(listed.edges[block], listed.edges[block + 1])
        np.testing.assert_array_equal(listed.bits[here], values)
        np.testing.assert_array_equal(listed.counts[here], counts)
