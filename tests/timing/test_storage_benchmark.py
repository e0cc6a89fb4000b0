"""Storage: one that is known is found again, and what is read of a file is inside it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.timing.calibrate import MIN_NBYTES
from mergepipe_pipeline.timing.storage_benchmark import REPEATS, SIZES, fit, observe

SEEKS = st.floats(1e-5, 2e-2)
RATES = st.floats(5e7, 1e10)


@settings(max_examples=50, deadline=None)
@given(SEEKS, RATES)
def test_a_storage_without_noise_is_found_exactly(seek_s: float, rate: float) -> None:
    found = fit(tuple(observe(lambda s, n: len(s) * (seek_s + n / rate), 1 << 31)))
    assert found == pytest.approx((seek_s, rate), rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(SEEKS, RATES, st.integers(0, 99))
def test_a_noisy_storage_is_found_although_some_reads_are_disturbed(
    seek_s: float, rate: float, seed: int
) -> None:
    rng, calls = random.Random(seed), 0

    def read_s(starts: Sequence[int], nbytes: int) -> float:
        nonlocal calls
        calls += 1
        disturbed = 30 if calls % REPEATS in (1, 3) else 1
        return len(starts) * (seek_s + nbytes / rate) * rng.uniform(0.98, 1.02) * disturbed

    found_seek_s, found_rate = fit(tuple(observe(read_s, 1 << 31)))
    # What a seek costs is seen beside the bytes of the smallest read only.
    assert found_seek_s == pytest.approx(seek_s, rel=0.1, abs=0.1 * SIZES[0] / rate)
    # And the rate beside the seeks of the largest run only.
    assert found_rate == pytest.approx(rate, rel=0.15)


@settings(max_examples=50, deadline=None)
@given(st.integers(MIN_NBYTES, 1 << 40))
def test_reads_are_inside_the_file_and_never_twice_the_same_in_a_trial(file_nbytes: int) -> None:
    def read_s(starts: Sequence[int], nbytes: int) -> float:
        places = sorted(starts)
        assert places[0] >= 0
        assert places[-1] + nbytes <= file_nbytes
        assert all(b - a >= nbytes for a, b in pairwise(places))
        assert all(start % 4096 == 0 for start in starts)
        return 1.0

    found = tuple(observe(read_s, file_nbytes))
    assert found[-1].seeks == 1
    assert len({o.nbytes / o.seeks for o in found}) > 2


def test_a_storage_where_seeks_seem_to_cost_less_than_nothing_has_free_seeks() -> None:
    seek_s, rate = fit(
        tuple(observe(lambda s, n: len(s) * n / (1e9 if len(s) > 1 else 5e8), 1 << 30))
    )
    assert seek_s == 0
    assert 5e8 < rate < 1e9
