"""The compiled comparison agrees with the library, whatever lies where."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from mergepipe_pipeline.packs.xxh3 import SHORT_NBYTES, are_equal

LENGTHS = st.one_of(
    st.integers(1, 3000), st.sampled_from([SHORT_NBYTES, 1024, 1025, 1088, 2048, 2049, 70_001])
)


@given(st.lists(LENGTHS, min_size=1, max_size=4), st.integers(0, 9), st.integers(0, 2**32 - 1))
@example([241], 0, 0)
def test_frames_are_what_the_library_says_and_one_flipped_bit_is_seen(
    lengths: list[int], first: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    raw = np.frombuffer(rng.bytes(sum(lengths)), np.uint8).copy()
    nbytes = np.array([lengths])
    starts = nbytes.cumsum()[None] - nbytes
    expected = np.zeros((1, first + len(lengths)), np.uint64)
    for i, (start, n) in enumerate(zip(starts[0], lengths, strict=True)):
        expected[0, first + i] = xxhash.xxh3_64_intdigest(raw[start : start + n].data)
    assert are_equal(raw, starts, nbytes, expected, first)
    where = int(rng.integers(len(raw)))
    raw[where] ^= 1 << int(rng.integers(8))
    is_short = lengths[int(np.searchsorted(nbytes.cumsum(), where, "right"))] <= SHORT_NBYTES
    assert are_equal(raw, starts, nbytes, expected, first) == is_short


@pytest.mark.parametrize("n", [0, 1, SHORT_NBYTES])
def test_short_frames_are_left_to_the_library(n: int) -> None:
    places, expected = np.zeros((1, 1), np.int64), np.ones((1, 1), np.uint64)
    assert are_equal(np.zeros(300, np.uint8), places, np.full((1, 1), n), expected, 0)
