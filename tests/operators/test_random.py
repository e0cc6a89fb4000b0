"""Laws of the numbered random masks."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.operators.steps.random import keep_below, keep_mask, uniforms
from tests.support.laws import examples


@settings(max_examples=examples(50), deadline=None)
@given(
    start=st.integers(0, 200),
    n=st.integers(0, 200),
    density=st.floats(0, 1),
    seed=st.integers(0, 2**63),
)
def test_any_slice_equals_the_slice_of_the_whole(
    start: int, n: int, density: float, seed: int
) -> None:
    whole = keep_mask(seed, 2, "w", 0, 400, density)
    assert (keep_mask(seed, 2, "w", start, n, density) == whole[start : start + n]).all()


def test_slices_far_into_a_tensor_meet() -> None:
    far = 5 * 2**32 + 3
    whole = keep_mask(1, 0, "w", far, 64, 0.5)
    assert (keep_mask(1, 0, "w", far + 17, 47, 0.5) == whole[17:]).all()
    assert not (whole == keep_mask(1, 0, "w", 3, 64, 0.5)).all()


def test_density_zero_keeps_none_and_density_one_keeps_all() -> None:
    assert not keep_mask(0, 0, "w", 5, 1000, 0.0).any()
    assert keep_mask(0, 0, "w", 5, 1000, 1.0).all()


@pytest.mark.parametrize("density", [0.01, 0.3, 0.9])
def test_the_share_kept_is_the_density(density: float) -> None:
    n = 1_000_000
    kept = int(keep_mask(3, 1, "w", 0, n, density).sum())
    assert abs(kept - density * n) < 5 * np.sqrt(density * (1 - density) * n)


@pytest.mark.parametrize("other", [(4, 1, "w"), (3, 2, "w"), (3, 1, "v")])
def test_seed_position_and_tensor_name_each_give_an_independent_mask(
    other: tuple[int, int, str],
) -> None:
    n = 100_000
    a, b = keep_mask(3, 1, "w", 0, n, 0.5), keep_mask(*other, 0, n, 0.5)
    assert abs(int((a == b).sum()) - n / 2) < 5 * np.sqrt(n / 4)


def test_a_higher_density_keeps_a_superset() -> None:
    low, high = (keep_mask(3, 1, "w", 0, 10_000, d) for d in (0.3, 0.4))
    assert (high | ~low).all()


@settings(max_examples=examples(20), deadline=None)
@given(start=st.integers(0, 60), n=st.integers(0, 60), density=st.floats(0.01, 0.99))
def test_a_mask_is_what_the_numbers_of_its_elements_say(start: int, n: int, density: float) -> None:
    numbers = uniforms(3, 1, "w", start, n)
    assert numbers.dtype == np.uint32
    assert numbers.shape == (n,)
    kept = keep_mask(3, 1, "w", start, n, density)
    assert (kept == (numbers < round(density * 2**32))).all()


def test_masks_never_change_between_versions() -> None:
    bits = np.packbits(keep_mask(42, 0, "model.norm.weight", 0, 64, 0.5)).tobytes().hex()
    assert bits == "69c35c5adfed76b8"


def test_the_limit_below_which_elements_are_kept_is_the_share_of_all_numbers() -> None:
    assert [keep_below(d) for d in (-1.0, 0.0, 0.25, 1.0, 2.0)] == [0, 0, 2**30, 2**32, 2**32]


def test_loading_the_operators_loads_no_compiler() -> None:
    code = "import mergepipe_pipeline.operators, sys; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
