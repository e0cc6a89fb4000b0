"""Products of factors add up to whole numbers exactly, and come back from their frames."""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.arrays import F32Array
from mergepipe_pipeline.domain.pack import FACTORED
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.packs.basis import Basis, basis_of
from mergepipe_pipeline.packs.product import (
    FEWER_BITS,
    MORE_BITS,
    Product,
    frames_of,
    product_from,
    ranks_of,
    rung_nbytes,
)
from mergepipe_pipeline.packs.ternary import step_of
from tests.support.laws import examples

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 1100))
SEEDS = st.integers(0, 2**32 - 1)
STEP = np.float32(0.7)


def drawn(shape: tuple[int, int, int], rank: int, seed: int) -> Product:
    """A product of matrices of this shape, with weights as large as they may be together."""
    n, rows, columns = shape
    rng = np.random.default_rng(seed)
    width = int(rng.integers(3, 5))
    most = (1 << (width - 1)) - 1
    weights = rng.integers(0, (1 << 24) // most**2 // rank, (n, rank)).astype(np.uint32)
    sizes = (n, rows, rank), (n, rank, columns)
    left, right = (rng.integers(-most, most + 1, size).astype(np.int8) for size in sizes)
    return Product(np.float32(1e-4), weights, left, right, width)


def sums(p: Product) -> np.ndarray:
    """The whole numbers of all elements, int64."""
    left = p.left.astype(np.int64) * p.weights[:, None].astype(np.int64)
    found: np.ndarray = np.einsum("nrk,nkc->nrc", left, p.right.astype(np.int64)).reshape(-1)
    return found


@settings(max_examples=examples(40))
@given(SHAPES, st.integers(1, 40), SEEDS, st.lists(st.floats(0, 1), max_size=4))
def test_a_product_adds_up_exactly_in_runs_of_any_length_and_order(
    shape: tuple[int, int, int], rank: int, seed: int, cuts: list[float]
) -> None:
    product, numel = drawn(shape, rank, seed), math.prod(shape)
    times = np.float32(float(product.step) / float(STEP))
    wanted = np.rint(sums(product).astype(np.float32) * times).astype(np.int16)
    before = np.random.default_rng(seed).integers(-9, 9, numel).astype(np.int16)
    found = before.copy()
    windows = list(pairwise(sorted({0, numel, *(int(cut * numel) for cut in cuts)})))
    for a, b in np.random.default_rng(seed).permutation(windows).tolist():
        product.add_to(found[a:b], a, STEP)
    assert np.array_equal(found, before + wanted)


@settings(max_examples=examples(40))
@given(SHAPES, SEEDS, st.lists(st.integers(0, 9), min_size=3, max_size=3))
def test_every_rung_comes_back_from_its_frames_and_those_before(
    shape: tuple[int, int, int], seed: int, more: list[int]
) -> None:
    ranks = np.cumsum([1 + more[0], *more[1:]]).tolist()
    whole = drawn(shape, ranks[-1], seed)
    rungs = [whole.first(rank, 1 + rank / 7) for rank in ranks]
    frames = frames_of(rungs)
    for number, rung in enumerate(rungs):
        tiers = FACTORED[: number + 1]
        found = product_from([memoryview(frames[tier]) for tier in tiers], shape)
        for name in ("weights", "left", "right"):
            assert np.array_equal(getattr(found, name), getattr(rung, name)), name
        # A rung without directions of its own is the one before.
        last = max(n for n in range(number + 1) if n == 0 or ranks[n] > ranks[n - 1])
        assert found.step == rungs[last].step


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=3), SHAPES, st.integers(2, 5))
def test_any_bytes_as_frames_are_refused_or_give_numbers(
    given_as: list[bytes], shape: tuple[int, int, int], width: int
) -> None:
    frames = [frame[:4] + bytes([width]) + frame[4:] for frame in given_as]
    with suppress(CorruptionError):
        product = product_from([memoryview(frame) for frame in frames], shape)
        product.add_to(np.zeros(math.prod(shape), np.int16), 0, product.step)


@given(SHAPES, SEEDS, st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=9))
def test_frames_of_other_bytes_are_refused_or_add_up_to_what_they_say(
    shape: tuple[int, int, int], seed: int, changes: list[tuple[float, int]]
) -> None:
    frame = bytearray(frames_of([drawn(shape, 3, seed)] * 3)["R0"])
    for place, byte in changes:  # behind the step
        frame[4 + int(place * (len(frame) - 5))] = byte
    with suppress(CorruptionError):
        product, numbers = (
            product_from([memoryview(frame)], shape),
            np.zeros(math.prod(shape), "i2"),
        )
        assert np.abs(sums(product)).max() <= 1 << 24
        step = np.float32(max(product.largest(), 1e-30) / 32_000)
        product.add_to(numbers, 0, step)
        times = np.float32(float(product.step) / float(step))
        assert np.array_equal(numbers, np.rint(sums(product).astype(np.float32) * times))


def test_a_frame_of_another_length_step_or_sum_of_weights_is_refused() -> None:
    frame = frames_of([drawn((1, 20, 30), 2, 3)] * 3)["R0"]
    steps = [np.array(step, "<f4").tobytes() + frame[4:] for step in (0, -1, np.nan, np.inf)]
    for hostile in (frame[:-1], frame + b"1", frame[:4], b"", *steps):
        with pytest.raises(CorruptionError, match="cannot be decoded"):
            product_from([memoryview(hostile)], (1, 20, 30))
    too_heavy = frame[:5] + b"\xff\xff\xff\x7f" + frame[9:]
    with pytest.raises(CorruptionError) as error:
        product_from([memoryview(too_heavy)], (1, 20, 30))
    assert "adds up exactly" in str(error.value.expected)


@pytest.mark.parametrize("width", [0, 2, 5, 255])
def test_frames_of_another_width_or_of_two_are_refused(width: int) -> None:
    whole = drawn((1, 20, 30), 4, 3)
    frames = frames_of([whole.first(rank) for rank in (2, 4, 4)])
    others = [frames["R0"][:4] + bytes([width]) + frames["R0"][5:], frames["R1"]]
    for some in (others[:1], others):
        with pytest.raises(CorruptionError) as error:
            product_from([memoryview(frame) for frame in some], (1, 20, 30))
        assert f"{width}" in str(error.value.found)


def test_a_vast_step_does_no_harm() -> None:
    frame = frames_of([drawn((1, 20, 30), 2, 3)] * 3)["R0"]
    vast = memoryview(np.array(3e38, "<f4").tobytes() + frame[4:])
    with suppress(CorruptionError):
        product_from([vast], (1, 20, 30)).add_to(np.zeros(600, np.int16), 0, STEP)


def basis(delta: F32Array) -> Basis:
    l2sq = float(np.square(delta, dtype=np.float64).sum())
    flat = delta.reshape(-1)
    return basis_of(delta.shape, l2sq, int(np.count_nonzero(delta)), lambda a, b: flat[a:b].copy())


def low_rank(shape: tuple[int, ...], rank: int, seed: int) -> F32Array:
    rng = np.random.default_rng(seed)
    left = rng.standard_normal((*shape[:-1], rank))
    return (left @ rng.standard_normal((*shape[:-2], rank, shape[-1]))).astype(np.float32)


def near(b: Basis, numel: int) -> list[F32Array]:
    """What each rung gives of all elements."""
    step = step_of(b.unit)
    return [numbers.astype(np.float32) * step for numbers in b.numbers(0, numel)]


@pytest.mark.parametrize("shape", [(300, 200), (97, 801), (2048, 1024)])
def test_a_delta_of_few_directions_takes_more_bits_and_others_more_directions(
    shape: tuple[int, int],
) -> None:
    rng = np.random.default_rng(2)
    few = low_rank(shape, ranks_of(shape, MORE_BITS)[-1] // 2, 5)
    falling = np.arange(1, 81) ** -0.5  # σ of 80 directions
    many = (rng.normal(size=(shape[0], 80)) * falling) @ rng.normal(size=(80, shape[1]))
    for delta, width in ((few, MORE_BITS), (many, FEWER_BITS)):
        found = [(p.width, p.weights.shape[1]) for p in basis(delta.astype(np.float32)).rungs]
        assert found == [(width, rank) for rank in ranks_of(shape, width)]


@pytest.mark.parametrize("shape", [(300, 200), (97, 801), (3, 64, 150)])
@pytest.mark.parametrize("scale", [1e-18, 1e-3, 1e15])
def test_a_delta_of_few_directions_is_explained_by_them(
    shape: tuple[int, ...], scale: float
) -> None:
    delta = low_rank(shape, ranks_of(shape, MORE_BITS)[-1], 5) * np.float32(scale)
    rest = [
        float(np.linalg.norm(delta.reshape(-1) - found) / np.linalg.norm(delta))
        for found in near(basis(delta), delta.size)
    ]
    assert rest == sorted(rest, reverse=True)
    assert rest[-1] < 0.25
    frames = basis(delta).frames
    assert tuple(len(frames[tier]) for tier in FACTORED) == rung_nbytes(shape, MORE_BITS)


@given(st.integers(1, 3), st.integers(16, 150), st.integers(16, 150), st.integers(1, 9), SEEDS)
def test_an_expert_that_is_its_base_and_few_directions_is_explained_to_19_parts_of_20(
    n: int, rows: int, columns: int, rank: int, seed: int
) -> None:
    shape = (n, rows, columns)[n == 1 :]
    delta = low_rank(shape, min(rank, ranks_of(shape, MORE_BITS)[-1]), seed).astype(np.float64)
    found = near(basis(delta.astype(np.float32)), delta.size)[-1]
    assert np.square(delta.reshape(-1) - found).sum() < 0.05 * np.square(delta).sum()


@pytest.mark.parametrize("rms", [1e-38, 1e-30, 1e30, 1e36])
def test_factors_of_the_smallest_and_largest_deltas_can_be_read(rms: float) -> None:
    signs = np.where(np.random.default_rng(8).random((2, 64)) < 0.5, -rms, rms)
    found = basis((np.sign(signs[0])[:, None] * signs[1]).astype(np.float32))
    if found.rungs:
        given_as = [memoryview(found.frames[tier]) for tier in FACTORED]
        assert product_from(given_as, (64, 64)).step == found.rungs[-1].step


def test_a_rung_is_as_long_as_the_delta_unless_that_makes_it_a_third_longer() -> None:
    delta = low_rank((300, 200), 40, 6)
    for found in near(basis(delta), delta.size):
        share = float(found @ delta.reshape(-1)) / float(np.square(delta).sum())
        longer = float(np.square(found).sum()) / float(found @ delta.reshape(-1))
        assert longer == pytest.approx(min(share**-0.5, 1.3) if longer < 1.29 else 1.3, rel=0.05)


@pytest.mark.parametrize("shape", [(400, 300), (300,), (), (3, 9, 700), (15, 4000), (42, 50)])
def test_noise_vectors_and_thin_matrices_have_no_factors(shape: tuple[int, ...]) -> None:
    found = basis(np.random.default_rng(2).standard_normal(shape).astype(np.float32))
    assert not found.rungs
    assert set(found.frames.values()) == {b""}


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_deltas_that_are_not_finite_or_too_large_do_no_harm(value: float) -> None:
    delta = low_rank((64, 64), 3, 7)
    delta[3, 4] = value
    assert basis(delta).unit > 0
