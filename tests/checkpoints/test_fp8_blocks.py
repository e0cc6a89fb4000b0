"""Codes and scales are those of transformers' converter, however the elements come."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.arrays import F32Array, U8Array
from mergepipe_pipeline.checkpoints.fp8_blocks import BlockCoder
from tests.support.codes import fp8_by_transformers, fp8_meant
from tests.support.laws import examples

SHAPES = st.tuples(st.integers(1, 300), st.integers(1, 300), st.sampled_from([(), (1,), (3,)])).map(
    lambda drawn: (*drawn[2], drawn[0], drawn[1])
)
#: The last finite number of float32.
MOST = float(np.finfo(np.float32).max)


def coded(values: torch.Tensor, cuts: Sequence[float] = ()) -> tuple[U8Array, F32Array, float]:
    """Codes, scales and squared error of values that come in runs."""
    flat, coder = values.numpy().reshape(-1), BlockCoder(tuple(values.shape))
    edges = [0, *sorted(round(cut * len(flat)) for cut in cuts), len(flat)]
    runs = [flat[a:b] for a, b in pairwise(edges)]
    codes = np.concatenate([piece for run in runs for piece in coder.codes(run)])
    return codes, coder.scales.view(np.float32), coder.sq_error


def drawn(seed: int, shape: tuple[int, ...], exponent: float) -> torch.Tensor:
    """Values of many sizes, with zeros of both signs and a block of nothing else."""
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=g) * torch.exp2(torch.randn(shape, generator=g) * 6)
    values *= 2.0**exponent
    values[torch.rand(shape, generator=g) < 0.05] = 0.0
    values[torch.rand(shape, generator=g) < 0.05] = -0.0
    values[..., 128:256, :128] = 0.0
    return values


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    shape=SHAPES,
    exponent=st.floats(-100, 90),
    cuts=st.lists(st.floats(0, 1), max_size=4),
)
def test_codes_and_scales_are_those_of_transformers_bit_by_bit(
    seed: int, shape: tuple[int, ...], exponent: float, cuts: list[float]
) -> None:
    values = drawn(seed, shape, exponent)
    codes, scales, sq_error = coded(values, cuts)
    their_codes, their_scales = fp8_by_transformers(values)
    assert np.array_equal(codes, their_codes.view(torch.uint8).numpy().reshape(-1))
    assert np.array_equal(scales, their_scales.numpy().reshape(-1))
    error = (values.double() - fp8_meant(their_codes, their_scales).double()).square().sum().item()
    assert sq_error == pytest.approx(error, rel=1e-9, abs=0)


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 2**32), what=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_what_is_not_finite_is_nan_and_its_block_is_coded_without_it(
    seed: int, what: float
) -> None:
    values = drawn(seed, (130, 140), 0.0)
    places = torch.rand(values.shape, generator=torch.Generator().manual_seed(seed)) < 0.01
    codes, scales, sq_error = coded(values.masked_fill(places, what))
    others, their_scales, error = coded(values.masked_fill(places, 0.0))
    at = places.numpy().reshape(-1)
    assert ((codes[at] & 0x7F) == 0x7F).all()
    assert np.array_equal(codes[~at], others[~at])
    assert np.array_equal(scales, their_scales)
    assert sq_error == error


@pytest.mark.parametrize("size", [1e-45, 1e-42, 1.2e-38, 1e-36, 1e38, MOST])
def test_blocks_of_the_smallest_and_the_largest_numbers_mean_finite_ones_near_them(
    size: float,
) -> None:
    values = torch.linspace(-1, 1, 128 * 128).reshape(128, 128) * torch.tensor(size)
    codes, scales, _ = coded(values)
    stored = torch.from_numpy(codes).view(torch.float8_e4m3fn).reshape(128, 128)
    meant = fp8_meant(stored, torch.from_numpy(scales).reshape(1, 1)).double()
    # No scale is below 1 / MOST, and half a step of codes beside zero is 2^-10 of it.
    assert ((meant - values.double()).abs() <= size * 2**-4 + 2**-10 / MOST).all()
