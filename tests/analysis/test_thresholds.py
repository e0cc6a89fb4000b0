"""Trim rules against sorting the whole tensor."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.analysis.statistics import analyze_expert
from mergepipe_pipeline.analysis.thresholds import trim_rules
from mergepipe_pipeline.errors import OperatorError
from mergepipe_pipeline.spec.blocks import BlockGrid
from mergepipe_pipeline.spec.plan import TrimRule
from tests.analysis.pairs import Floats, Stored, delta_of, encode, on_disk

Bools = npt.NDArray[np.bool_]


def rules_for(
    expert: Stored, base: Stored, density: float, window_elems: int = 4096
) -> Mapping[str, TrimRule]:
    with on_disk({"w": expert}, {"w": base}, window_elems) as (e, b):
        return trim_rules(e, b, analyze_expert(e, b, BlockGrid(4096)), {"w": density})


def kept_by(rule: TrimRule, delta: Floats) -> Bools:
    """What TrimRule's definition keeps."""
    bits = np.abs(delta).view(np.uint32)
    before = np.arange(len(delta)) < rule.tie_stop_elem
    kept: Bools = (bits > rule.threshold_bits) | ((bits == rule.threshold_bits) & before)
    return kept


def oracle(delta: Floats, density: float) -> Bools:
    """The int(density·N) first of all elements by magnitude, then by index."""
    order = np.lexsort((np.arange(len(delta)), -np.abs(delta).astype(np.float64)))
    keep = np.zeros(len(delta), dtype=bool)
    keep[order[: int(density * len(delta))]] = True
    return keep


@given(
    n=st.integers(1, 14000),
    values=st.integers(1, 6),
    zeros=st.sampled_from([0.0, 0.5, 0.95]),
    dtypes=st.sampled_from([("BF16", "BF16"), ("F16", "F16"), ("F32", "BF16"), ("F8_E5M2", "F32")]),
    density=st.floats(0.001, 0.999),
    seed=st.integers(0, 1000),
)
def test_a_rule_keeps_the_largest_and_cuts_ties_at_the_lowest_index(
    n: int, values: int, zeros: float, dtypes: tuple[str, str], density: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    start = rng.integers(-4, 5, n) / 4
    change = rng.integers(-values, values + 1, n) / 8 * (rng.random(n) >= zeros)
    expert, base = encode(start + change, dtypes[0]), encode(start, dtypes[1])
    delta = delta_of(expert, base)
    if int(density * n) < 1:
        with pytest.raises(OperatorError, match="keeps nothing"):
            rules_for(expert, base, density)
        return
    rule = rules_for(expert, base, density)["w"]
    # Which zeros are kept cannot be seen in a sparsified delta.
    nonzero = delta != 0
    np.testing.assert_array_equal(kept_by(rule, delta) & nonzero, oracle(delta, density) & nonzero)


@pytest.mark.parametrize("ties", [True, False], ids=["ties", "no ties"])
def test_exactly_k_elements_are_kept_at_every_density(ties: bool) -> None:
    n, rng = 10007, np.random.default_rng(3)
    change = rng.choice([-0.5, 0.25, 0.5, 1.0], n) if ties else rng.standard_normal(n)
    expert, base = encode(change, "F32"), encode(np.zeros(n), "F32")
    delta = delta_of(expert, base)
    with on_disk({"w": expert}, {"w": base}, 4096) as (e, b):
        stats = analyze_expert(e, b, BlockGrid(4096))
        for density in (1 / n, 0.01, 0.1, 0.2, 1 / 3, 0.5, 0.7, 0.9, 0.999, 1 - 1e-9):
            rule = trim_rules(e, b, stats, {"w": density})["w"]
            kept = kept_by(rule, delta)
            assert kept.sum() == int(density * n)
            np.testing.assert_array_equal(kept, oracle(delta, density))


@pytest.mark.parametrize("keep", [1, 4095, 4096, 4097, 8192, 8193, 12287])
def test_the_tie_cut_may_fall_on_either_side_of_a_window_edge(keep: int) -> None:
    n = 12288
    expert, base = encode(np.where(np.arange(n) % 2, 1.0, -1.0), "BF16"), encode(np.zeros(n), "F32")
    rule = rules_for(expert, base, (keep + 0.5) / n)["w"]
    assert rule == TrimRule(int(np.float32(1).view(np.uint32)), keep)


def test_rules_do_not_depend_on_windows() -> None:
    rng = np.random.default_rng(5)
    expert = encode(rng.standard_normal(30000), "BF16")
    base = encode(rng.standard_normal(30000), "BF16")
    found = [rules_for(expert, base, 0.3, w) for w in (4096, 8192, 1 << 20)]
    assert found[0] == found[1] == found[2]


def test_windows_without_a_difference_have_no_part_in_a_threshold() -> None:
    rng = np.random.default_rng(5)
    base = rng.standard_normal(20 * 4096)
    change = rng.choice([-0.5, 0.25, 0.5, 1.0], len(base)) * (np.arange(len(base)) < 10 * 4096)
    expert, stored = encode(base + change, "BF16"), encode(base, "BF16")
    delta = delta_of(expert, stored)
    np.testing.assert_array_equal(
        kept_by(rules_for(expert, stored, 0.2)["w"], delta), oracle(delta, 0.2)
    )


def test_a_delta_sparser_than_the_density_is_kept_whole() -> None:
    change = np.zeros(10000)
    change[::100] = 1e-30
    delta = change.astype(np.float32)
    rule = rules_for(encode(change, "F32"), encode(np.zeros(10000), "F32"), 0.5)["w"]
    np.testing.assert_array_equal(kept_by(rule, delta), delta != 0)


def test_a_threshold_below_the_smallest_normal_number_is_exact() -> None:
    change = np.arange(1, 9001, dtype=np.uint32).view(np.float32)
    rule = rules_for(encode(change, "F32"), encode(np.zeros(9000), "F32"), 0.25)["w"]
    np.testing.assert_array_equal(kept_by(rule, change), oracle(change, 0.25))


def test_a_density_of_one_or_more_needs_no_rule() -> None:
    stored = encode(np.ones(10), "F32"), encode(np.zeros(10), "F32")
    assert rules_for(*stored, 1.0) == {}
    assert rules_for(*stored, 1.5) == {}


@pytest.mark.parametrize("density", [0.0, 0.05, -1.0])
def test_a_density_that_keeps_nothing_is_refused_with_tensor_density_and_next_step(
    density: float,
) -> None:
    pattern = rf"expert, tensor w\..* found density {density}\. Next: raise the density"
    with pytest.raises(OperatorError, match=pattern):
        rules_for(encode(np.ones(10), "F32"), encode(np.zeros(10), "F32"), density)
