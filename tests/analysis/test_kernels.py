"""The compiled kernels against NumPy over whole chunks in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.analysis.kernels import (
    describe,
    describe_bfloat16,
)
from mergepipe_pipeline.analysis.magnitudes import room_for
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.stats import Magnitudes
from mergepipe_pipeline.operators.kernels.kept_l1 import CHUNK_ELEMS
from tests.support.stored import Floats

Bits = npt.NDArray[np.uint16]
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
    edges: npt.NDArray[np.int64]
    bits: npt.NDArray[np.uint32]
    block_counts: npt.NDArray[np.uint32]


def run(
    kernel: Callable[..., None],
    n: int,
    *values: npt.NDArray[np.generic],
    block_elems: int = 4096,
) -> Found:
    chunks = -(-n // CHUNK_ELEMS)
    into = (
        np.zeros((chunks, 2)),
        np.zeros(chunks, np.float32),
        np.zeros(chunks, np.int64),
        np.zeros(1 << 15, np.int64),
    )
    room = room_for(n, BlockGrid(block_elems))
    kernel(*values, *into, block_elems, room)
    listed = room.listed() or Magnitudes(*(np.zeros(0, d) for d in ("i8", "u4", "u4")))
    return Found(*into, listed.edges, listed.bits, listed.counts)


def padded(values: Floats) -> Floats:
    """Up to whole chunks, with zeros."""
    out = np.zeros(-(-len(values) // CHUNK_ELEMS) * CHUNK_ELEMS, np.float32)
    out[: len(values)] = values
    return out


def described(delta: Floats) -> Found:
    return run(describe, len(delta), padded(delta))


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
    np.testing.assert_array_equal(found.counts, (chunks != 0).sum(1))
    bins = np.abs(chunks).view(np.uint32).reshape(-1) >> 16
    np.testing.assert_array_equal(found.histogram, np.bincount(bins, minlength=1 << 15))


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
    assert found.counts.tolist() == [0, 1]
    assert np.isnan(found.peaks).tolist() == [False, True]
