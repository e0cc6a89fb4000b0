"""Trim rules against sorting the whole tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.analysis import thresholds
from mergepipe_pipeline.analysis.order import KEEP_ALL, KEEP_NONE
from mergepipe_pipeline.analysis.thresholds import trim_rules
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.plan import TrimRule
from tests.analysis.pairs import analyze_one, delta_of, on_disk, windows_of
from tests.support.kinds import KINDS, make_kinds
from tests.support.oracles import largest
from tests.support.stored import Floats, Stored, encode

Bools = npt.NDArray[np.bool_]
GRID = BlockGrid(4096)
W = ("w", "w")


def rule_for(expert: Stored, base: Stored, keep: int, window_elems: int = 4096) -> TrimRule:
    with on_disk({"w": expert}, {"w": base}, window_elems) as (e, b):
        return trim_rules(e, b, {W: (analyze_one(e, b, [W], GRID).by_pair[W], keep)})[W]


def kept_by(rule: TrimRule, delta: Floats) -> Bools:
    """What TrimRule's definition keeps."""
    bits = np.abs(delta).view(np.uint32)
    before = np.arange(len(delta)) < rule.tie_stop_elem
    kept: Bools = (bits > rule.threshold_bits) | ((bits == rule.threshold_bits) & before)
    return kept


def oracle(delta: Floats, keep: int) -> Bools:
    """The first `keep` of all elements by magnitude, then by index."""
    return largest(np.abs(delta).astype(np.float64), keep)


@given(
    n=st.integers(1, 14000),
    values=st.integers(1, 6),
    zeros=st.sampled_from([0.0, 0.5, 0.95]),
    dtypes=st.sampled_from([("BF16", "BF16"), ("F16", "F16"), ("F32", "BF16"), ("F8_E5M2", "F32")]),
    share=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_a_rule_keeps_the_largest_and_cuts_ties_at_the_lowest_index(
    n: int, values: int, zeros: float, dtypes: tuple[str, str], share: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    start = rng.integers(-4, 5, n) / 4
    change = rng.integers(-values, values + 1, n) / 8 * (rng.random(n) >= zeros)
    expert, base = encode(start + change, dtypes[0]), encode(start, dtypes[1])
    delta, keep = delta_of(expert, base), int(share * n)
    rule = rule_for(expert, base, keep)
    # Which zeros are kept cannot be seen in a sparsified delta.
    nonzero = delta != 0
    np.testing.assert_array_equal(kept_by(rule, delta) & nonzero, oracle(delta, keep) & nonzero)


@pytest.mark.parametrize("ties", [True, False], ids=["ties", "no ties"])
def test_exactly_k_elements_are_kept_for_every_k(ties: bool) -> None:
    n, rng = 10007, np.random.default_rng(3)
    change = rng.choice([-0.5, 0.25, 0.5, 1.0], n) if ties else rng.standard_normal(n)
    expert, base = encode(change, "F32"), encode(np.zeros(n), "F32")
    delta = delta_of(expert, base)
    with on_disk({"w": expert}, {"w": base}, 4096) as (e, b):
        stats = analyze_one(e, b, [W], GRID)
        for keep in (0, 1, 100, 1000, 2001, n // 3, n // 2, 7004, n - 10, n - 1, n):
            kept = kept_by(trim_rules(e, b, {W: (stats.by_pair[W], keep)})[W], delta)
            assert kept.sum() == keep
            np.testing.assert_array_equal(kept, oracle(delta, keep))


@pytest.mark.parametrize("name", KINDS)
def test_an_expert_of_any_kind_is_trimmed_by_its_delta(tmp_path: Path, name: str) -> None:
    kinds = make_kinds(tmp_path)
    kind, n = kinds.experts[name], kinds.experts[name].view.numel
    delta = kind.delta[:n]
    with windows_of(4096):
        stats = analyze_one(kind.model, kinds.base, [W], GRID)
        for keep in (1, n // 5, n // 2):
            kept = kept_by(
                trim_rules(kind.model, kinds.base, {W: (stats.by_pair[W], keep)})[W], delta
            )
            np.testing.assert_array_equal(
                kept & (delta != 0), oracle(delta, keep) & (delta != 0), str(keep)
            )


@pytest.mark.parametrize("keep", [1, 4095, 4096, 4097, 8192, 8193, 12287])
def test_the_tie_cut_may_fall_on_either_side_of_a_window_edge(keep: int) -> None:
    n = 12288
    expert, base = encode(np.where(np.arange(n) % 2, 1.0, -1.0), "BF16"), encode(np.zeros(n), "F32")
    assert rule_for(expert, base, keep) == TrimRule(int(np.float32(1).view(np.uint32)), keep)


def test_rules_do_not_depend_on_windows() -> None:
    rng = np.random.default_rng(5)
    expert = encode(rng.standard_normal(30000), "BF16")
    base = encode(rng.standard_normal(30000), "BF16")
    found = [rule_for(expert, base, 9000, w) for w in (4096, 8192, 1 << 20)]
    assert found[0] == found[1] == found[2]


def test_windows_without_a_difference_have_no_part_in_a_threshold() -> None:
    rng = np.random.default_rng(5)
    base = rng.standard_normal(20 * 4096)
    change = rng.choice([-0.5, 0.25, 0.5, 1.0], len(base)) * (np.arange(len(base)) < 10 * 4096)
    expert, stored = encode(base + change, "BF16"), encode(base, "BF16")
    delta = delta_of(expert, stored)
    np.testing.assert_array_equal(
        kept_by(rule_for(expert, stored, 16384), delta), oracle(delta, 16384)
    )


def test_a_delta_sparser_than_what_is_to_be_kept_is_kept_whole_without_a_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change = np.zeros(10000)
    change[::100] = 1e-30
    delta = change.astype(np.float32)
    monkeypatch.setattr(thresholds, "keep_largest", None)
    rule = rule_for(encode(change, "F32"), encode(np.zeros(10000), "F32"), 5000)
    np.testing.assert_array_equal(kept_by(rule, delta), delta != 0)


def test_a_threshold_below_the_smallest_normal_number_is_exact() -> None:
    change = np.arange(1, 9001, dtype=np.uint32).view(np.float32)
    rule = rule_for(encode(change, "F32"), encode(np.zeros(9000), "F32"), 2250)
    np.testing.assert_array_equal(kept_by(rule, change), oracle(change, 2250))


def test_keeping_nothing_and_keeping_all_need_no_threshold() -> None:
    ones, zeros = encode(np.ones(10), "F32"), encode(np.zeros(10), "F32")
    assert rule_for(ones, zeros, 0) == KEEP_NONE
    assert rule_for(ones, zeros, 10) == rule_for(ones, zeros, 11) == KEEP_ALL
    assert rule_for(zeros, zeros, 5) == KEEP_ALL
    assert kept_by(KEEP_NONE, np.array([1, np.finfo(np.float32).max], np.float32)).tolist() == [
        False,
        False,
    ]


def test_progress_is_told_of_every_byte_read() -> None:
    expert, base = encode(np.arange(20000) % 50, "BF16"), encode(np.zeros(20000), "BF16")
    done: list[int] = []
    with on_disk({"w": expert}, {"w": base}) as (e, b):
        stats = analyze_one(e, b, [W], GRID)
        trim_rules(e, b, {W: (stats.by_pair[W], 3000)}, progress=done.append)
    # One pass, and one window again for where ties are cut.
    assert sum(done[:3]) == len(expert[2])
    assert len(done) == 4
