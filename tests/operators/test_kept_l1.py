"""Norms are sums in one order, to the last bit: plans and layers of any release depend on it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.operators.kernels.kept_l1 import (
    CHUNK_ELEMS,
    LANES,
    kept_l1,
    kept_l1_bfloat16,
)
from mergepipe_pipeline.operators.kernels.uniforms import fill_uniforms
from tests.support.stored import Floats

KEY, START_ELEM = np.uint64(77), 3 * CHUNK_ELEMS
#: Among them sums that overflow in bfloat16, and subnormal numbers.
ODD = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F7F, 0xFF7F, 0x0001], np.uint16)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    """The bits of two tensors whose elements are of every size, and sometimes not finite."""
    n = draw(st.sampled_from([1, 255, 257, 4095, 4096, 4097, 9000]))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    expert, base = rng.integers(0, 0x7F80, (2, n)).astype(np.uint16)
    expert ^= (rng.integers(0, 2, n) << 15).astype(np.uint16)
    if draw(st.booleans()):
        at = rng.integers(0, n, 5)
        expert[at] = rng.choice(ODD, 5)
    return expert, base


def _in_lanes(sizes: npt.NDArray[np.float64]) -> float:
    """Of one chunk: each lane adds up every 256th element, then the lanes are added, in order."""
    lanes, total = np.zeros(LANES), 0.0
    for row in sizes.reshape(-1, LANES):
        lanes += row
    for lane in lanes.tolist():
        total += lane
    return total


@given(both=pairs(), last=st.sampled_from([0, 1 << 31, 2**32 - 1]))
def test_norms_of_chunks_are_added_up_lane_by_lane_in_float64(
    both: tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]], last: int
) -> None:
    n, chunks = len(both[0]), -(-len(both[0]) // CHUNK_ELEMS)
    expert, base = ((bits.astype(np.uint32) << 16).view(np.float32) for bits in both)
    delta: Floats = np.zeros(chunks * CHUNK_ELEMS, np.float32)
    numbers = np.empty(len(delta), np.uint32)
    fill_uniforms(KEY, START_ELEM, numbers)
    with np.errstate(over="ignore", invalid="ignore"):
        delta[:n] = expert - base
        sizes = np.abs(delta).astype(np.float64).reshape(chunks, -1)
        # A dropped infinity becomes what is not a number.
        kept = sizes * (numbers <= last).reshape(chunks, -1)
        wanted = [[_in_lanes(part) for part in parts] for parts in (kept, sizes)]
    of_bits, of_delta = np.empty((2, chunks)), np.empty((2, chunks))
    kept_l1_bfloat16(*both, KEY, START_ELEM, np.uint32(last), of_bits)
    kept_l1(delta, KEY, START_ELEM, np.uint32(last), of_delta)
    np.testing.assert_array_equal(of_bits, wanted)
    np.testing.assert_array_equal(of_delta, wanted)
