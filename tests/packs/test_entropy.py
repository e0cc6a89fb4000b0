"""Streams give back the numbers that they are made of, and nothing else is taken for one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.domain.pack import CHUNK_ELEMS
from mergepipe_pipeline.packs.entropy import STREAM_NBYTES, Tables, decode, encode
from tests.support.laws import examples

Numbers = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]

SEEDS = st.integers(0, 2**32 - 1)
LENGTHS = st.one_of(st.integers(1, 3000), st.just(CHUNK_ELEMS))


def drawn(n: int, seed: int, spread: float, bits: int) -> tuple[Numbers, Bytes, Bytes]:
    """Numbers whose size follows from their exponents, some hidden; and some of any size."""
    rng = np.random.default_rng(seed)
    exponents = rng.integers(100, 100 + rng.integers(1, 60), n).astype(np.uint8)
    found = np.abs(rng.normal(0, spread, n)) * 2.0 ** (130.0 - exponents)
    found = np.where(rng.random(n) < 0.01, rng.random(n) * 2.0**bits, found)
    numbers = np.minimum(found, 2**bits - 1).astype(np.uint16 if bits == 16 else np.uint32)
    return numbers, (rng.random(n) < rng.random()).astype(np.uint8), exponents


def streamed(numbers: Numbers, is_hidden: Bytes, exponents: Bytes) -> Bytes:
    room, out = Tables(), np.empty(STREAM_NBYTES, np.uint8)
    nbytes = encode(numbers, is_hidden, exponents, room.codes, room.words, out)
    return out[:nbytes]


def taken(stream: Bytes, exponents: Bytes, kind: type) -> tuple[bool, Numbers, Bytes]:
    """Whether it is a stream, the numbers, and which are hidden; nothing else is written."""
    room, n = Tables(), len(exponents)
    numbers: Numbers = np.full(n + 8, 77, kind)
    is_hidden = np.full(n + 8, 77, np.uint8)
    is_stream = decode(stream, exponents, room.slots, room.words, numbers[:n], is_hidden[:n])
    assert (numbers[n:] == 77).all()
    assert (is_hidden[n:] == 77).all()
    return is_stream, numbers[:n], is_hidden[:n]


@settings(max_examples=examples(60))
@given(LENGTHS, SEEDS, st.sampled_from([0.0, 0.01, 1.0, 100.0]), st.sampled_from([16, 32]))
def test_numbers_come_back_but_for_those_that_are_hidden(
    n: int, seed: int, spread: float, bits: int
) -> None:
    numbers, is_hidden, exponents = drawn(n, seed, spread, bits)
    stream = streamed(numbers, is_hidden, exponents)
    is_stream, found, was_hidden = taken(stream, exponents, numbers.dtype.type)
    assert is_stream
    assert np.array_equal(was_hidden, is_hidden)
    assert np.array_equal(found, np.where(is_hidden, 0, numbers))


@pytest.mark.parametrize("spread", [0.02, 0.3, 5.0])
def test_a_stream_is_no_longer_than_the_entropy_of_its_tables_by_three_percent(
    spread: float,
) -> None:
    rng = np.random.default_rng(0)
    exponents = np.round(rng.normal(120, 1.5, CHUNK_ELEMS)).astype(np.uint8)
    numbers = (np.abs(rng.normal(0, spread, CHUNK_ELEMS)) * 2.0 ** (122.0 - exponents)).astype(
        np.uint16
    )
    bits = 0.0
    for exponent in np.unique(exponents):
        _, counts = np.unique(numbers[exponents == exponent], return_counts=True)
        bits += float((counts * np.log2(counts.sum() / counts)).sum())
    stream = streamed(numbers, np.zeros(CHUNK_ELEMS, np.uint8), exponents)
    assert 8 * len(stream) <= 1.03 * bits + 8 * 200


@settings(max_examples=examples(200))
@given(SEEDS, st.sampled_from([16, 32]), st.data())
def test_what_is_cut_or_changed_is_refused_or_gives_other_numbers_within_its_arrays(
    seed: int, bits: int, data: st.DataObject
) -> None:
    numbers, is_hidden, exponents = drawn(700, seed, 1.0, bits)
    stream = streamed(numbers, is_hidden, exponents)
    changed = stream[: data.draw(st.integers(0, len(stream)))].copy()
    for at in data.draw(st.lists(st.integers(0, len(stream) - 1), max_size=4)):
        if at < len(changed):
            changed[at] = data.draw(st.integers(0, 255))
    is_stream, _, _ = taken(changed, exponents, numbers.dtype.type)
    if np.array_equal(changed, stream):
        assert is_stream
    elif len(changed) < len(stream):
        assert not is_stream


@settings(max_examples=examples(200))
@given(st.binary(max_size=600), st.integers(1, 300))
def test_bytes_of_any_kind_are_refused_or_decoded_within_their_arrays(raw: bytes, n: int) -> None:
    exponents = np.frombuffer(np.random.default_rng(n).bytes(n), np.uint8)
    is_stream, _, is_hidden = taken(np.frombuffer(raw, np.uint8), exponents, np.uint16)
    assert not is_stream or is_hidden.max() <= 1


@pytest.mark.parametrize("bits", [16, 32])
def test_many_rare_numbers_beside_some_of_equal_frequency_come_back(bits: int) -> None:
    kind: type = np.uint16 if bits == 16 else np.uint32
    quarters = [(4 + q) << (octave - 2) for octave in range(3, bits) for q in range(4)]
    least = [*range(8), *quarters]  # of each symbol
    for n_frequent in range(1, len(least) + 1):
        each = 60_000 // n_frequent
        numbers: Numbers = np.array([*least[:n_frequent] * each, *least], kind)
        exponents, is_hidden = np.full((2, len(numbers)), 0, np.uint8)
        is_stream, found, _ = taken(streamed(numbers, is_hidden, exponents), exponents, kind)
        assert is_stream, n_frequent
        assert np.array_equal(found, numbers), n_frequent
