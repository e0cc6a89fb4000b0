"""L1 rescale factors against whole tensors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.analysis.scales import drop_scales, trim_scales
from mergepipe_pipeline.analysis.statistics import analyze_expert
from mergepipe_pipeline.analysis.thresholds import trim_rules
from mergepipe_pipeline.operators.random import keep_mask
from mergepipe_pipeline.spec.blocks import BlockGrid
from tests.analysis.pairs import Stored, delta_of, encode, on_disk
from tests.oracles import l1_scale, trim_keep

GRID = BlockGrid(4096)


def pair(n: int, seed: int) -> tuple[Stored, Stored]:
    rng = np.random.default_rng(seed)
    base = rng.standard_normal(n)
    return encode(base + rng.standard_normal(n) / 50, "BF16"), encode(base, "BF16")


def drop_scale(
    expert: Stored, base: Stored, density: float, seed: int = 7, window_elems: int = 4096
) -> float:
    with on_disk({"w": expert}, {"w": base}, window_elems) as (e, b):
        stats = analyze_expert(e, b, GRID)
        return drop_scales(e, b, stats, {"w": density}, position=2, seed=seed)["w"]


@given(n=st.integers(1, 14000), density=st.floats(0.01, 1.0), seed=st.integers(0, 1000))
def test_a_drop_scale_is_the_l1_norm_over_what_the_mask_keeps(
    n: int, density: float, seed: int
) -> None:
    expert, base = pair(n, seed)
    delta = delta_of(expert, base).astype(np.float64)
    expected = l1_scale(delta, keep_mask(seed, 2, "w", 0, n, density))
    assert drop_scale(expert, base, density, seed) == pytest.approx(expected, rel=1e-12)


@given(n=st.integers(10, 14000), density=st.floats(0.1, 0.99), seed=st.integers(0, 1000))
def test_a_trim_scale_is_the_l1_norm_over_what_the_rule_keeps(
    n: int, density: float, seed: int
) -> None:
    expert, base = pair(n, seed)
    delta = delta_of(expert, base).astype(np.float64)
    with on_disk({"w": expert}, {"w": base}, 4096) as (e, b):
        stats = analyze_expert(e, b, GRID)
        found = trim_scales(e, b, stats, trim_rules(e, b, stats, {"w": density}))["w"]
    assert found == pytest.approx(l1_scale(delta, trim_keep(delta, density)), rel=1e-12)


def test_scales_do_not_depend_on_windows() -> None:
    found = {drop_scale(*pair(30000, 1), 0.4, window_elems=w) for w in (4096, 8192, 1 << 20)}
    assert len(found) == 1


def test_windows_without_a_difference_add_nothing_to_a_scale() -> None:
    rng = np.random.default_rng(5)
    base = rng.standard_normal(20 * 4096)
    change = rng.standard_normal(len(base)) * (np.arange(len(base)) < 10 * 4096)
    expert, stored = encode(base + change, "F32"), encode(base, "F32")
    delta = delta_of(expert, stored).astype(np.float64)
    expected = l1_scale(delta, keep_mask(7, 2, "w", 0, len(base), 0.5))
    assert drop_scale(expert, stored, 0.5) == pytest.approx(expected, rel=1e-12)


def test_a_zero_delta_and_a_density_of_zero_have_scale_one() -> None:
    expert, base = pair(9000, 1)
    assert drop_scale(base, base, 0.5) == 1.0
    assert drop_scale(expert, base, 0.0) == 1.0


def test_a_density_of_one_has_scale_exactly_one() -> None:
    assert drop_scale(*pair(30000, 2), 1.0) == 1.0


@pytest.mark.parametrize(("magnitude", "expected"), [(1e-12, 1.0), (1.0, 2.0)])
def test_norms_below_1e_7_are_not_rescaled(magnitude: float, expected: float) -> None:
    n = 20000
    found = drop_scale(encode(np.full(n, magnitude), "F32"), encode(np.zeros(n), "F32"), 0.5)
    assert found == pytest.approx(expected, rel=0.05)
    assert (found == 1.0) == (expected == 1.0)
