"""Frames have one checksum wherever they lie, and no other bytes that are near have it."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from mergepipe_pipeline.packs.checksums import are_equal, checksum

LENGTHS = st.one_of(st.integers(1, 300), st.sampled_from([511, 512, 513, 4096, 70_001]))


@given(st.lists(LENGTHS, min_size=1, max_size=4), st.integers(0, 9), st.integers(0, 2**32 - 1))
@example([8], 0, 0)
def test_one_flipped_bit_is_seen_wherever_frames_lie(
    lengths: list[int], first: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    raw = np.frombuffer(rng.bytes(sum(lengths)), np.uint8).copy()
    nbytes = np.array([lengths])
    starts = nbytes.cumsum()[None] - nbytes
    expected = np.zeros((1, first + len(lengths)), np.uint64)
    for i, (start, n) in enumerate(zip(starts[0], lengths, strict=True)):
        expected[0, first + i] = checksum(raw[start : start + n].copy())
    assert are_equal(raw, starts, nbytes, expected, first)
    raw[int(rng.integers(len(raw)))] ^= 1 << int(rng.integers(8))
    assert not are_equal(raw, starts, nbytes, expected, first)


@given(st.binary(min_size=1, max_size=200), st.integers(0, 2**32 - 1))
def test_what_damage_often_is_gives_another_checksum(data: bytes, seed: int) -> None:
    rng = np.random.default_rng(seed)
    frame = np.frombuffer(data, np.uint8)
    others = [frame[:-1], np.append(frame, np.uint8(0)), np.roll(frame, 1), np.roll(frame, 64)]
    two = frame.copy()  # the uppermost bits of two words
    for word in rng.integers(len(frame), size=2):
        two[word | 7 if (word | 7) < len(frame) else word] ^= 0x80
    known = checksum(frame)
    for other in (*others, two):
        is_same = np.array_equal(other, frame)
        assert (checksum(np.ascontiguousarray(other)) == known) == is_same


def test_frames_of_zeros_differ_by_their_length() -> None:
    assert len({checksum(np.zeros(n, np.uint8)) for n in range(600)}) == 600


def test_a_frame_that_is_absent_is_not_compared() -> None:
    places, expected = np.zeros((1, 1), np.int64), np.ones((1, 1), np.uint64)
    assert are_equal(np.zeros(300, np.uint8), places, places, expected, 0)
