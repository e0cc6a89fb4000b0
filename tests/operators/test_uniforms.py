"""Compiled random numbers: those of the reference, and as good as random."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.operators.kernels.splitmix import GAMMA
from mergepipe_pipeline.operators.kernels.uniforms import fill_uniforms
from mergepipe_pipeline.operators.steps.random import stream_key, uniforms
from tests.support.laws import examples

KEYS = [0, 1, 2**64 - 1, int(GAMMA), int(stream_key(3, 1, "w"))]
N = 1 << 20


def drawn(key: int, n: int, start: int = 0) -> npt.NDArray[np.uint32]:
    out = np.empty(n, np.uint32)
    fill_uniforms(np.uint64(key), start, out)
    return out


def ones(numbers: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    """The share of numbers in which each of the 32 bits is set."""
    return np.array([((numbers >> np.uint32(bit)) & 1).mean() for bit in range(32)])


@settings(max_examples=examples(50), deadline=None)
@given(
    seed=st.integers(0, 2**40),
    start=st.integers(0, 70) | st.integers(2**32 - 40, 2**32 + 40) | st.integers(0, 2**48),
    n=st.integers(0, 200),
)
def test_compiled_numbers_are_those_of_the_reference(seed: int, start: int, n: int) -> None:
    found = drawn(int(stream_key(seed, 2, "w")), n, start)
    assert (found == uniforms(seed, 2, "w", start, n)).all()


def test_words_are_the_published_ones_of_splitmix64() -> None:
    """Seed 1234567, https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64."""
    assert drawn(1234567, 10).view("<u8").tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize("key", KEYS)
def test_high_and_low_bits_are_uniform(key: int) -> None:
    numbers = drawn(key, N)
    for part in (numbers >> np.uint32(24), numbers & np.uint32(255)):
        counts = np.bincount(part, minlength=256)
        chi2 = float(((counts - N / 256) ** 2 / (N / 256)).sum())
        assert abs(chi2 - 255) < 5 * np.sqrt(2 * 255)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("lag", [1, 2, 3, 32, 1024, 4096])
def test_elements_do_not_know_their_neighbours(key: int, lag: int) -> None:
    numbers = drawn(key, N)
    values = numbers / 2**32 - 0.5
    correlation = float((values[lag:] * values[:-lag]).mean()) * 12
    assert abs(correlation) < 5 / np.sqrt(N)
    changed = ones(numbers[lag:] ^ numbers[:-lag])
    assert np.abs(changed - 0.5).max() < 6 * 0.5 / np.sqrt(N)


@pytest.mark.parametrize("bit", [0, 1, 31, 32, 63])
def test_one_bit_of_the_key_changes_half_of_all_bits(bit: int) -> None:
    key = KEYS[-1]
    changed = ones(drawn(key, N) ^ drawn(key ^ (1 << bit), N))
    assert np.abs(changed - 0.5).max() < 6 * 0.5 / np.sqrt(N)


def test_pairs_of_neighbours_fill_the_square_evenly() -> None:
    numbers = drawn(KEYS[-1], 4 * N) >> np.uint32(26)
    for pairs in (numbers[:-1] * 64 + numbers[1:], numbers[:-2] * 64 + numbers[2:]):
        counts = np.bincount(pairs, minlength=4096)
        expected = len(pairs) / 4096
        chi2 = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi2 - 4095) < 5 * np.sqrt(2 * 4095)


def test_runs_of_kept_elements_have_the_lengths_of_coin_tosses() -> None:
    kept = drawn(KEYS[-1], N) < np.uint32(2**31)
    for length in range(1, 9):
        windows = np.lib.stride_tricks.sliding_window_view(kept, length).all(axis=1)
        share = 0.5**length
        # Overlapping windows: the variance is at most `length` times that of apart ones.
        assert abs(windows.mean() - share) < 5 * np.sqrt(2 * length * share / N)
