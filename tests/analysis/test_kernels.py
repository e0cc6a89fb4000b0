"""The compiled kernels against NumPy over whole chunks in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.analysis.kernels import (
    count_in_bin,
    count_in_bin_bfloat16,
    describe,
    describe_bfloat16,
)
from mergepipe_pipeline.analysis.magnitudes import room_for
from mergepipe_pipeline.analysis.order import in_bin
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.stats import HIST_SHIFT, Magnitudes
from mergepipe_pipeline.operators.kernels.kept_l1 import CHUNK_ELEMS
from tests.analysis.pairs import signs_and_lanes
from tests.support.stored import Floats

Bits = npt.NDArray[np.uint16]
KEY = 0xFEDCBA9876543210
LENGTHS = [0, 1, 63, 64, 255, 257, 4095, 4096, 4097, 8192, 9000]
#: Among them sums that overflow in bfloat16 and subnormal numbers.
ODD = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, -1e30, 1e-40, -1e-40]


@dataclass(frozen=True)
class Found:
    """What a kernel filled in."""

    sums: npt.NDArray[np.float64]
    peaks: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int64]
    histogram: npt.NDArray[np.int64]
    sketches: npt.NDArray[np.float32]
    edges: npt.NDArray[np.int64]
    bits: npt.NDArray[np.uint32]
    block_counts: npt.NDArray[np.uint32]


def run(
    kernel: Callable[..., None],
    n: int,
    *values: npt.NDArray[np.generic],
    key: int = KEY,
    block_elems: int = 4096,
) -> Found:
    chunks = -(-n // CHUNK_ELEMS)
    into = (
        np.zeros((chunks, 2)),
        np.zeros(chunks, np.float32),
        np.zeros((chunks, 2), np.int64),
        np.zeros(1 << 15, np.int64),
        np.zeros((chunks, 64), np.float32),
    )
    room = room_for(n, BlockGrid(block_elems))
    kernel(*values, np.uint64(key), 0, *into, block_elems, room)
    listed = room.listed() or Magnitudes(*(np.zeros(0, d) for d in ("i8", "u4", "u4")))
    return Found(*into, listed.edges, listed.bits, listed.counts)


def padded(values: Floats) -> Floats:
    """Up to whole chunks, with zeros."""
    out = np.zeros(-(-len(values) // CHUNK_ELEMS) * CHUNK_ELEMS, np.float32)
    out[: len(values)] = values
    return out


def described(delta: Floats, key: int = KEY) -> Found:
    return run(describe, len(delta), padded(delta), key=key)


def sketch(delta: Floats, key: int = KEY) -> Floats:
    """Of all of δ as one block, [64]."""
    total: Floats = described(delta, key).sketches.sum(axis=0)
    return total


@st.composite
def deltas(draw: st.DrawFn) -> Floats:
    """Numbers of very different sizes, zeros among them, and sometimes what is not finite."""
    n = draw(st.sampled_from(LENGTHS))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    values = rng.standard_normal(n) * 10.0 ** rng.integers(-20, 20, n)
    values[rng.random(n) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0
    odd = rng.choice(draw(st.lists(st.sampled_from(ODD), min_size=1, max_size=4)), n)
    return np.where(rng.random(n) < draw(st.sampled_from([0.0, 0.001, 0.1])), odd, values).astype(
        np.float32
    )


@given(delta=deltas())
def test_the_kernel_finds_what_numpy_finds_chunk_by_chunk(delta: Floats) -> None:
    found = described(delta)
    chunks = padded(delta).reshape(-1, CHUNK_ELEMS)
    wide = np.abs(chunks.astype(np.float64))
    np.testing.assert_allclose(found.sums, np.stack([wide.sum(1), (wide**2).sum(1)], 1), 1e-13)
    np.testing.assert_array_equal(found.peaks, wide.max(axis=1, initial=0))
    np.testing.assert_array_equal(found.counts[:, 0], (chunks != 0).sum(1))
    np.testing.assert_array_equal(found.counts[:, 1], (chunks > 0).sum(1))
    bins = np.abs(chunks).view(np.uint32).reshape(-1) >> 16
    np.testing.assert_array_equal(found.histogram, np.bincount(bins, minlength=1 << 15))


@given(delta=deltas())
def test_the_sketch_adds_every_element_with_its_own_sign_to_its_own_lane(delta: Floats) -> None:
    signs, lanes = signs_and_lanes(KEY, len(delta))
    chunks = np.arange(len(delta)) // CHUNK_ELEMS
    found = described(delta).sketches
    expected = np.zeros(found.shape)
    sizes = np.zeros(found.shape)
    with np.errstate(invalid="ignore"):
        np.add.at(expected, (chunks, lanes), signs * delta.astype(np.float64))
        np.add.at(sizes, (chunks, lanes), np.abs(delta.astype(np.float64)))
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(found[~finite], expected[~finite])
    # Each lane adds some 64 numbers in float32.
    errors = np.abs(found[finite] - expected[finite])
    assert np.all(errors <= 64 * 2.0**-24 * sizes[finite] + 1e-43)


@given(delta=deltas(), base=deltas(), equal=st.sampled_from([0.0, 0.9, 1.0]), seed=st.integers(0))
def test_the_bfloat16_kernel_finds_the_same_to_the_bit(
    delta: Floats, base: Floats, equal: float, seed: int
) -> None:
    n = min(len(delta), len(base))
    below: Bits = (base[:n].view(np.uint32) >> 16).astype(np.uint16)
    keep = np.random.default_rng(seed).random(-(-n // 512)).repeat(512)[:n] < equal
    expert = np.where(keep, below, (delta[:n].view(np.uint32) >> 16).astype(np.uint16))
    with np.errstate(invalid="ignore"):
        difference = widened(expert) - widened(below)
    fast, generic = run(describe_bfloat16, n, expert, below), described(difference)
    for name, values in vars(generic).items():
        np.testing.assert_array_equal(getattr(fast, name), values, name)
        assert getattr(fast, name).dtype == values.dtype


def widened(bits: Bits) -> Floats:
    """From the definition of bfloat16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_chunks_of_equal_bits_that_are_not_finite_are_not_taken_for_equal(value: float) -> None:
    values = np.ones(5000, np.float32)
    values[4500] = value
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    found = run(describe_bfloat16, 5000, bits, bits)
    assert found.counts[:, 0].tolist() == [0, 1]
    assert np.isnan(found.peaks).tolist() == [False, True]


def test_the_stream_of_signs_goes_on_from_one_window_to_the_next() -> None:
    delta = np.random.default_rng(0).standard_normal(4 * CHUNK_ELEMS).astype(np.float32)
    whole = described(delta)
    names = ("sums", "peaks", "counts", "histogram", "sketches")
    half = SimpleNamespace(**{name: np.zeros_like(getattr(whole, name)) for name in names})
    for at in (0, 2):
        part = slice(at, at + 2)
        describe(
            delta[at * CHUNK_ELEMS : (at + 2) * CHUNK_ELEMS],
            np.uint64(KEY),
            at * CHUNK_ELEMS // 64,
            half.sums[part],
            half.peaks[part],
            half.counts[part],
            half.histogram,
            half.sketches[part],
            4096,
            room_for(2 * CHUNK_ELEMS, BlockGrid(4096)),
        )
    for name in names:
        np.testing.assert_array_equal(getattr(half, name), getattr(whole, name), name)


def test_equal_deltas_have_equal_sketches_and_a_sum_has_the_sum_of_sketches() -> None:
    rng = np.random.default_rng(0)
    # Whole numbers: sums are exact.
    a, b = rng.integers(-99, 100, (2, 20000)).astype(np.float32)
    np.testing.assert_array_equal(sketch(a), sketch(a.copy()))
    np.testing.assert_array_equal(sketch(a + b), sketch(a) + sketch(b))
    np.testing.assert_array_equal(sketch(-3 * a), -3 * sketch(a))


def shapes_of_change(name: str) -> tuple[Floats, Floats]:
    """Two deltas [256, 128] that have something in common."""
    rng = np.random.default_rng(1)
    a, common = rng.standard_normal((2, 256, 128))
    b = rng.standard_normal((256, 128)) + common / 2
    a = a + common / 2
    mask = np.zeros((256, 128))
    if name == "dense":
        mask[:] = 1
    elif name == "one column":
        mask[:, 7] = 1
    elif name == "one row":
        mask[100] = 1
    else:
        mask.reshape(-1)[rng.choice(256 * 128, 20, replace=False)] = 1
    return (a * mask).reshape(-1).astype(np.float32), (b * mask).reshape(-1).astype(np.float32)


@pytest.mark.parametrize("shape", ["dense", "one column", "one row", "a few elements"])
def test_products_of_sketches_are_unbiased_and_err_no_more_than_stated(shape: str) -> None:
    a, b = shapes_of_change(shape)
    wide = a.astype(np.float64), b.astype(np.float64)
    true = wide[0] @ wide[1]
    stated = np.linalg.norm(wide[0]) * np.linalg.norm(wide[1]) * np.sqrt(2 / 64)
    n = 300
    found = [sketch(a, key) @ sketch(b, key).astype(np.float64) for key in range(1, n + 1)]
    errors = np.array(found) - true
    assert abs(errors.mean()) < 4 * errors.std() / np.sqrt(n)
    # 300 draws know a standard deviation to about 4 %, heavier tails to somewhat less.
    assert np.sqrt((errors**2).mean()) < 1.2 * stated


def test_errors_of_different_blocks_are_independent() -> None:
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((2, CHUNK_ELEMS)).astype(np.float32)
    errors = []
    for key in range(1, 301):
        pair = described(np.tile(a, 2), key).sketches, described(np.tile(b, 2), key).sketches
        errors.append((pair[0] * pair[1]).sum(axis=1) - a @ b)
    correlation = np.corrcoef(np.array(errors).T)[0, 1]
    assert abs(correlation) < 4 / np.sqrt(300)


@given(seed=st.integers(0, 2**32), n=st.sampled_from(LENGTHS))
def test_what_lies_in_a_bin_is_counted_by_its_lower_bits(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    stored = rng.integers(0, 2**16, (2, n)).astype(np.uint16)
    stored &= 0xBFFF  # finite numbers, so that no δ is infinite
    below, above = (stored.astype(np.uint32) << 16).view(np.float32)
    delta = above - below
    bits = np.abs(delta).view(np.uint32)
    bin_ = int(rng.choice(bits >> HIST_SHIFT)) if n else 5
    wanted = in_bin(bits, bin_)
    of_delta, of_stored = np.zeros((2, 1 << HIST_SHIFT), np.uint32)
    count_in_bin(delta, bin_, of_delta)
    count_in_bin_bfloat16(stored[1], stored[0], bin_, of_stored)
    for counts in (of_delta, of_stored):
        np.testing.assert_array_equal(np.flatnonzero(counts), wanted.low)
        np.testing.assert_array_equal(counts[wanted.low], wanted.counts)
