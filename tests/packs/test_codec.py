"""A chunk comes back from its frames: its own bits, or δ as near as a level says."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import pytest
import torch
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from mergepipe_pipeline.domain.pack import (
    CHUNK_ELEMS,
    FACTORED,
    NOT_READ,
    STEPPED,
    TIERS,
    TIERS_OF,
    Level,
    Tier,
)
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.packs.codec import (
    BITS_OF,
    EncodedChunk,
    decode_bits,
    decode_numbers,
    encode_chunk,
    predict,
    unit_of,
)
from mergepipe_pipeline.packs.frames import Frames, contents_of, to_frame
from mergepipe_pipeline.packs.ternary import quantised, step_of
from tests.packs.approximate import decode_approximate, quantised_at

Bits = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]

LENGTHS = st.one_of(st.integers(1, 700), st.sampled_from([CHUNK_ELEMS - 1, CHUNK_ELEMS]))
DTYPES = st.sampled_from(sorted(BITS_OF))
SEEDS = st.integers(0, 2**32 - 1)
TIER_NUMBERS = st.integers(NOT_READ, len(TIERS) - 1)
#: Float32 patterns of magnitudes, of ordinary deltas and of any.
THRESHOLDS = st.one_of(st.just(0), st.integers(0x35000000, 0x3F800000), st.integers(0, 0x7F7FFFFF))
#: What is special of bfloat16, and as the upper half of float32: zeros, a subnormal, ∞ and NaNs.
SPECIAL = np.array([0, 0x8000, 1, 0x8001, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF], np.uint16)


def decode_exact(
    x20: bytes | memoryview | None, x: bytes | memoryview | None, base: Bits, out: Bits
) -> None:
    """As `decode_bits`, of one chunk."""
    decode_bits(Frames.of({"X20": [x20], "X": [x]}), base, out)


def any_bits(n: int, dtype: str, seed: int) -> tuple[Bits, Bits]:
    """An expert and a base of random patterns: some close to each other, some special ones."""
    rng, kind = np.random.default_rng(seed), BITS_OF[dtype]
    base = rng.integers(0, 2 ** (8 * kind().itemsize), n).astype(kind)
    far = rng.integers(0, 2 ** (8 * kind().itemsize), n).astype(kind)
    special = rng.choice(SPECIAL, n).astype(kind) << kind(16 if dtype == "F32" else 0)
    near = base + rng.integers(-3, 4, n).astype(kind)
    expert = np.select([rng.random(n) < share for share in (0.5, 0.2, 0.3)], [near, far, special])
    return np.where(rng.random(n) < 0.1, base, expert).astype(kind), base


def deltas(n: int, seed: int, spread: float = 1e-3) -> Floats:
    """Normal deltas, some of them zero and a few large ones."""
    rng = np.random.default_rng(seed)
    found = rng.standard_normal(n) * spread * np.where(rng.random(n) < 0.01, 50, 1)
    return np.where(rng.random(n) < 0.1, 0, found).astype(np.float32)


def of_delta(delta: Floats, unit: float, threshold_bits: int = 0) -> EncodedChunk:
    """The chunk of a float32 expert on a base of zeros."""
    base = np.zeros(len(delta), np.uint32)
    return encode_chunk(delta.view(np.uint32), base, "F32", unit, threshold_bits)


def approximated(chunk: EncodedChunk, level: Level, unit: float, n: int) -> Floats:
    out = np.full(n, np.nan, np.float32)
    frames = [memoryview(chunk.frames[tier]) for tier in TIERS_OF[level] if tier in STEPPED]
    decode_approximate(frames, unit, out)
    return out


def unit_for(delta: Floats) -> float:
    return unit_of(float(np.square(delta, dtype=np.float64).sum()), int(np.count_nonzero(delta)))


@given(LENGTHS, DTYPES, SEEDS, THRESHOLDS)
def test_an_exact_chunk_comes_back_bit_for_bit_whatever_its_bits_mean(
    n: int, dtype: str, seed: int, threshold_bits: int
) -> None:
    expert, base = any_bits(n, dtype, seed)
    frames = encode_chunk(expert, base, dtype, 1e-3, threshold_bits).frames
    found = np.empty_like(base)
    decode_exact(memoryview(frames["X20"]), memoryview(frames["X"]), base, found)
    assert np.array_equal(found, expert)


@given(LENGTHS, DTYPES, SEEDS, THRESHOLDS)
def test_a_prediction_changes_how_many_bytes_an_exact_chunk_takes_and_no_bit_of_it(
    n: int, dtype: str, seed: int, threshold_bits: int
) -> None:
    expert, base = any_bits(n, dtype, seed)
    rng = np.random.default_rng(seed)
    steps = rng.integers(-20_000, 20_000, n) >> rng.integers(0, 16)
    near = np.where(rng.random(n) < 0.3, 0, steps).astype(np.int16)
    chunk = encode_chunk(expert, base, dtype, 1e-3, threshold_bits, [near] * 3)
    found = np.empty_like(base)
    told = predict(base, near, 1e-3, dtype)
    decode_bits(Frames.of({"X": [chunk.frames["X"]]}), base, found, told)
    assert np.array_equal(found, expert)
    alone = encode_chunk(expert, base, dtype, 1e-3, threshold_bits)
    assert chunk.frames["X20"] == alone.frames["X20"]


@given(st.sampled_from([0.1, 1.0]), DTYPES, SEEDS)
def test_a_prediction_that_is_near_spares_bytes_where_deltas_are_above_the_last_bit(
    off: float, dtype: str, seed: int
) -> None:
    rng, n, kind = np.random.default_rng(seed), CHUNK_ELEMS, "<f2" if dtype == "F16" else "<f4"
    unit, base = 2.0**-7, rng.standard_normal(n, np.float32)
    near = rng.integers(-2000, 2000, n).astype(np.int16)
    delta = near * step_of(unit) + off * rng.standard_normal(n, np.float32) * np.float32(2**-8)
    expert_bits, base_bits = (
        (x.view(np.uint32) >> 16).astype(np.uint16)
        if dtype == "BF16"
        else x.astype(kind).view(BITS_OF[dtype])
        for x in (base + delta.astype(np.float32), base)
    )
    sizes = [
        len(encode_chunk(expert_bits, base_bits, dtype, unit, 0, rungs).frames["X"])
        for rungs in ((), [near] * 3)
    ]
    assert sizes[1] < 0.9 * sizes[0]


@given(LENGTHS, DTYPES, SEEDS)
def test_a_prediction_is_the_nearest_number_and_says_on_which_side_it_was_rounded(
    n: int, dtype: str, seed: int
) -> None:
    rng, kind = np.random.default_rng(seed), BITS_OF[dtype]
    base = (rng.standard_normal(n, np.float32) * np.float32(0.1)).view(np.uint32)
    bits = (base >> 16).astype(kind) if dtype == "BF16" else base.astype(kind)
    bits = base.view(np.float32).astype("<f2").view(kind) if dtype == "F16" else bits
    numbers = rng.integers(-300, 300, n).astype(np.int16)
    told = predict(bits, numbers, 0.01, dtype)
    wanted = _values(bits, dtype) + numbers * step_of(0.01)
    found = _values(told.bits, dtype)
    torch_kind = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
    rounded = torch.from_numpy(wanted).to(torch_kind).float().numpy()
    assert np.array_equal(found, np.where(numbers, rounded, _values(bits, dtype)))
    assert np.array_equal(told.is_below.astype(bool), found < wanted)


@given(LENGTHS, DTYPES, SEEDS, THRESHOLDS)
def test_x20_alone_has_every_delta_from_the_threshold_on_and_the_base_elsewhere(
    n: int, dtype: str, seed: int, threshold_bits: int
) -> None:
    expert, base = any_bits(n, dtype, seed)
    chunk = encode_chunk(expert, base, dtype, 1e-3, threshold_bits)
    found = np.empty_like(base)
    decode_exact(memoryview(chunk.frames["X20"]), None, base, found)
    with np.errstate(all="ignore"):
        delta = _values(expert, dtype) - _values(base, dtype)
    magnitude = np.abs(delta).view(np.uint32)
    is_large = (magnitude >= threshold_bits) & (magnitude > 0)
    assert np.array_equal(found, np.where(is_large, expert, base))
    left_out = float(np.square(delta[~is_large], dtype=np.float64).sum())
    assert _is_just_above(float(chunk.residual_sq[TIERS.index("X20")]), left_out)


@given(LENGTHS, SEEDS, st.sampled_from([1e-30, 1e-3, 1e20]))
def test_levels_are_as_near_as_their_steps_and_say_what_they_leave(
    n: int, seed: int, spread: float
) -> None:
    delta = deltas(n, seed, spread)
    unit = unit_for(delta)
    chunk = of_delta(delta, unit)
    for k, level in enumerate(STEPPED):
        found = approximated(chunk, level, unit, n).astype(np.float64)
        is_inside = np.abs(delta) < 127 * unit
        assert (np.abs(delta - found)[is_inside] <= unit * 3.0**-k / 2 * (1 + 1e-4)).all()
        left = float(np.square(delta - found).sum())
        assert _is_just_above(float(chunk.residual_sq[TIERS.index(level)]), left)


@given(LENGTHS, SEEDS, THRESHOLDS)
def test_quantised_gives_what_the_decoder_gives(n: int, seed: int, threshold_bits: int) -> None:
    delta = deltas(n, seed)
    unit = unit_for(delta)
    chunk = of_delta(delta, unit, threshold_bits)
    for level in STEPPED:
        found = quantised_at(level, delta, unit, threshold_bits)
        assert np.array_equal(found, approximated(chunk, level, unit, n))
    base, bits = np.zeros(n, np.uint32), np.empty(n, np.uint32)
    decode_exact(memoryview(chunk.frames["X20"]), None, base, bits)
    assert np.array_equal(quantised_at("X20", delta, unit, threshold_bits), bits.view(np.float32))
    assert np.array_equal(quantised_at("X", delta, unit, threshold_bits), delta)


@given(SEEDS, THRESHOLDS, st.lists(TIER_NUMBERS, min_size=1, max_size=9), st.integers(1, 3))
def test_rows_are_quantised_each_at_its_own_level_and_by_its_experts_unit(
    seed: int, threshold_bits: int, numbers: list[int], n_experts: int
) -> None:
    tiers = np.array([np.roll(numbers, e) for e in range(n_experts)], np.int8)
    delta = deltas(130 * tiers.size, seed).reshape(*tiers.shape, -1)
    units = np.array([unit_for(of.reshape(-1)) for of in delta])
    least = (threshold_bits + np.arange(n_experts)).astype(np.uint32)
    found = quantised(delta, units, least, tiers)
    for e, r in np.ndindex(*tiers.shape):
        wanted = np.zeros_like(delta[e, r])
        if tiers[e, r] != NOT_READ:
            wanted = quantised_at(TIERS[tiers[e, r]], delta[e, r], float(units[e]), int(least[e]))
        assert np.array_equal(found[e, r], wanted, equal_nan=True)


@given(LENGTHS, DTYPES, SEEDS)
def test_a_chunk_that_equals_the_base_costs_nothing(n: int, dtype: str, seed: int) -> None:
    expert, _ = any_bits(n, dtype, seed)
    chunk = encode_chunk(expert, expert.copy(), dtype, 1.0, 0)
    assert all(frame == b"" for frame in chunk.frames.values())
    is_finite = np.isfinite(_values(expert, dtype)).all()
    assert chunk.residual_sq.tolist() == [0 if is_finite else np.inf] * 7 + [0, 0]
    found = np.empty_like(expert)
    decode_exact(None, None, expert, found)
    assert np.array_equal(found, expert)


def test_what_is_not_finite_is_zero_in_a_level_that_says_it_cannot_be_used() -> None:
    delta = np.array([1, np.inf, -1, np.nan, 200], np.float32)
    chunk = of_delta(delta, 1.0)
    assert chunk.residual_sq.tolist()[:7] == [np.inf] * 7
    assert approximated(chunk, "L0", 1.0, 5).tolist() == [1, 0, -1, 0, 127]


def test_two_threads_encode_and_decode_the_same_bits() -> None:
    pairs = [any_bits(20_000, dtype, seed) for dtype in BITS_OF for seed in range(8)]

    def both_ways(pair: tuple[Bits, Bits]) -> tuple[list[bytes], bytes]:
        expert, base = pair
        dtype = "BF16" if expert.itemsize == 2 else "F32"
        frames = encode_chunk(expert, base, dtype, 1e-3, 1 << 29).frames
        found = np.empty_like(base)
        decode_exact(memoryview(frames["X20"]), memoryview(frames["X"]), base, found)
        return list(frames.values()), found.tobytes()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(both_ways, pairs)) == [both_ways(pair) for pair in pairs]


@pytest.mark.parametrize(
    ("l2sq", "nonzero", "unit"),
    [
        (0.0, 0, 1.0),
        (np.inf, 3, 1.0),
        (np.nan, 3, 1.0),
        (4e-6, 4, 2**-6.8125),
        (1e-300, 1, 2**-100),
    ],
)
def test_a_unit_is_nine_times_the_rms_in_sixteenths_of_an_octave(
    l2sq: float, nonzero: int, unit: float
) -> None:
    assert unit_of(l2sq, nonzero) == np.float32(unit)
    assert unit_of(l2sq * (1 + 1e-12), nonzero) == np.float32(unit)


#: The head of a zstd frame that says to hold 2⁶⁰ bytes.
VAST = bytes.fromhex("28b52ffd e0") + (1 << 60).to_bytes(8, "little") + bytes(20)
HOSTILE = st.one_of(
    st.binary(max_size=400),
    st.tuples(st.lists(st.integers(0, 2**32 - 1), max_size=3), st.binary(max_size=300)).map(
        lambda t: b"".join(x.to_bytes(4, "little") for x in t[0]) + t[1]
    ),
)


@given(LENGTHS, HOSTILE, st.sampled_from([np.uint16, np.uint32]))
@example(100, VAST, np.uint16)
@example(100, zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100)), np.uint16)
def test_hostile_frames_are_refused_or_decoded_to_some_numbers(
    n: int, frame: bytes, kind: type[np.unsignedinteger]
) -> None:
    base = np.zeros(n, kind)
    given_as = memoryview(frame)
    attempts: list[Callable[[], None]] = [
        lambda: decode_exact(given_as, None, base, np.empty_like(base)),
        lambda: decode_exact(None, given_as, base, np.empty_like(base)),
        lambda: decode_approximate([given_as], 1.0, np.empty(n, np.float32)),
        lambda: decode_approximate([None, given_as], 1.0, np.empty(n, np.float32)),
    ]
    for decode in attempts:
        with suppress(CorruptionError):
            decode()


@given(st.lists(HOSTILE, min_size=18, max_size=18), st.integers(1, 700))
def test_hostile_frames_of_several_chunks_are_refused_or_decoded_to_some_numbers(
    given_as: list[bytes], n: int
) -> None:
    frames = Frames.of({tier: given_as[2 * i : 2 * i + 2] for i, tier in enumerate(TIERS)})
    total = CHUNK_ELEMS + n
    with suppress(CorruptionError):
        decode_numbers(frames, [4, 2], np.empty(total, np.int16))
    with suppress(CorruptionError):
        decode_bits(frames, np.zeros(total, np.uint16), np.empty(total, np.uint16))


def test_a_frame_that_states_a_vast_size_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(CorruptionError, match=str(1 << 60)):
        decode_approximate([memoryview(VAST)], 1.0, np.empty(100, np.float32))


@given(SEEDS, st.sampled_from([t for t in TIERS if t not in FACTORED]), st.data())
def test_a_frame_that_is_too_long_is_refused_and_one_cut_short_is_if_it_makes_no_sense(
    seed: int, tier: Tier, data: st.DataObject
) -> None:
    n = 300
    delta = deltas(n, seed)
    whole = of_delta(delta, unit_for(delta), 1 << 29).frames[tier]
    if not whole:
        return
    with pytest.raises(CorruptionError, match="cannot be decoded"):
        _decode_one(memoryview(whole + bytes(n + 1)), tier, n)
    cut = data.draw(st.integers(1, len(whole) - 1))
    with suppress(CorruptionError):  # a checksum finds what still does
        _decode_one(memoryview(whole[:cut]), tier, n)


def _decode_one(frame: memoryview, tier: Tier, n: int) -> None:
    """Decode a frame of float32 elements, with nothing in other tiers."""
    if tier in STEPPED:
        before = [None] * STEPPED.index(tier)
        decode_approximate([*before, frame], 1.0, np.empty(n, np.float32))
    else:
        coarse, rest = (frame, None) if tier == "X20" else (None, frame)
        decode_exact(coarse, rest, np.zeros(n, np.uint32), np.empty(n, np.uint32))


def _values(bits: Bits, dtype: str) -> Floats:
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16 if dtype == "F16" else np.float32).astype(np.float32)


def _is_just_above(stated: float, left: float) -> bool:
    """Whether a float32 is `left` rounded up, give or take the order of a sum."""
    if np.isnan(left) or stated == np.inf:
        return not left < float(np.finfo(np.float32).max)
    return left * (1 - 1e-13) <= stated <= left * (1 + 4e-7) + 2e-45


@given(st.integers(1, 3000), st.floats(0, 0.2), SEEDS)
def test_contents_come_back_however_many_of_their_bytes_are_zero(
    n: int, share: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    content = np.where(rng.random(n) < share, rng.integers(0, 256, n), 0).astype(np.uint8)
    frame = to_frame(content)
    assert unpacked(frame, n) == content.tobytes()
    assert len(frame) <= n


def unpacked(frame: bytes, n: int) -> bytes:
    """The content of a frame, of n bytes."""
    frames, room = Frames.of({"L0": [frame]}), np.zeros(2 * n, np.uint8)
    row = slice(TIERS.index("L0"), TIERS.index("L0") + 1)
    rows = frames.starts[row], frames.nbytes[row], np.full((1, 1), n)
    places, _ = contents_of(frames.raw, *rows, room, n)
    place = int(places[0, 0])
    source, at = (frames.raw, place) if place >= 0 else (room, ~place)
    return source[at : at + n].tobytes()


def test_pairs_that_look_like_a_zstd_frame_are_not_written() -> None:
    content = np.zeros(1000, np.uint8)
    content[0x28], content[0x28 + 0x2F] = 0xB5, 0xFD
    assert unpacked(to_frame(content), 1000) == content.tobytes()
