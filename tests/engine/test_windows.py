"""Windows and buffers: how much is held at once, and that nothing is held twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.checkpoints.stored import count_non_finite
from mergepipe_pipeline.concurrency.threads import READING
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.engine.window import BufferPool, count_cut_off, cut, to_bytes

HELD = st.integers(1, 2000)


@given(
    working=HELD,
    out=st.sampled_from([2, 4, 8]),
    row_elems=st.integers(1, 100_000),
    window_elems=st.none() | st.integers(1, 100_000),
)
def test_a_window_holds_whole_rows_and_at_least_one(
    working: int, out: int, row_elems: int, window_elems: int | None
) -> None:
    n = EngineOptions(window_elems=window_elems).window_for(working, out, row_elems)
    assert n >= row_elems
    assert n % row_elems == 0
    if window_elems is not None:
        assert n <= max(window_elems, row_elems)


def test_what_was_asked_for_is_kept_whatever_a_plan_reads() -> None:
    usual, past = EngineOptions(), EngineOptions().past_cache()
    for workers, most_bytes in ((1, 1 << 20), (usual.workers, usual.most_bytes)):
        asked = EngineOptions(threads=workers, memory_bytes=most_bytes)
        for suited in (asked.with_packs(), asked.past_cache()):
            assert (suited.workers, suited.most_bytes) == (workers, most_bytes)
    assert past.workers > usual.workers
    assert past.most_bytes > usual.most_bytes


@given(memory_mib=st.integers(1, 4096))
def test_what_is_read_twice_is_held_in_half_of_the_memory_that_was_asked_for(
    memory_mib: int,
) -> None:
    asked = EngineOptions(memory_bytes=memory_mib << 20)
    found = asked.with_second_reading()
    assert found.most_bytes + found.held_bytes == asked.most_bytes == memory_mib << 20
    assert 0 <= found.most_bytes - found.held_bytes <= 1


def test_what_is_read_twice_is_held_beside_the_usual_memory() -> None:
    found = EngineOptions().with_second_reading()
    assert (found.most_bytes, found.held_bytes) == (EngineOptions().most_bytes, 192 << 20)


def test_norms_are_read_by_no_more_threads_than_were_asked_for() -> None:
    assert EngineOptions().prepass_threads > READING
    assert [EngineOptions(threads=n).prepass_threads for n in range(1, 9)] == [*range(1, 9)]


@given(
    working=HELD,
    out=st.sampled_from([2, 4, 8]),
    threads=st.integers(1, 16),
    n_inputs=st.integers(0, 10_000),
    ahead=st.integers(0, 300),
)
def test_all_windows_in_flight_and_read_ahead_fit_the_memory_beside_the_plan(
    working: int, out: int, threads: int, n_inputs: int, ahead: int
) -> None:
    usual = EngineOptions(threads=threads)
    options = usual.with_packs() if ahead else usual
    n = options.window_for(working, out, 1, n_inputs, ahead)
    assert options.in_flight > options.workers
    held = n * (options.workers * working + options.in_flight * out) + 3328 * n_inputs
    held += n * ahead * (READING + options.in_flight)
    if ahead:  # chunks of 256 KiB as float32, 64 at once, and a bit for each of their elements
        held += options.workers * 64 * ((256 << 10) + (8 << 10))
    assert n == 4096 or held <= options.most_bytes


def test_a_large_plan_leaves_half_of_the_memory_to_windows() -> None:
    options = EngineOptions(memory_bytes=1 << 20, threads=3)
    each = 3 * 2 + options.in_flight * 2
    assert options.window_for(2, 2, 1, 1 << 30) == (1 << 19) // each // 4096 * 4096


def test_windows_get_shorter_the_more_an_element_holds() -> None:
    lengths = [EngineOptions(threads=3).window_for(k, 2) for k in (8, 40, 400, 4000, 100_000)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1] >= 4096


@given(numel=st.integers(0, 10_000), window_elems=st.integers(1, 3000))
def test_windows_cover_a_tensor_in_order(numel: int, window_elems: int) -> None:
    found = [e for start, stop in cut(numel, window_elems) for e in range(start, stop)]
    assert found == list(range(numel))


@given(sizes=st.lists(st.integers(1, 500), min_size=1, max_size=6), again=st.booleans())
def test_pieces_of_a_desk_are_aligned_and_apart(sizes: list[int], again: bool) -> None:
    buffers = BufferPool()
    for _ in range(1 + again):
        buffers.clear(sum(sizes), len(sizes))
        pieces = [buffers.take(n) for n in sizes]
        for i, piece in enumerate(pieces):
            piece[:] = i
        assert [set(p.tolist()) for p in pieces] == [{i} for i in range(len(pieces))]
        assert {(p.ctypes.data - pieces[0].ctypes.data) % 64 for p in pieces} == {0}
        assert [len(p) for p in pieces] == sizes


def test_a_desk_keeps_its_memory_for_the_next_window() -> None:
    buffers = BufferPool()
    buffers.clear(1000, 1)
    address, rows = buffers.take(1000).ctypes.data, buffers.rows(3, 10).data_ptr()
    buffers.clear(500, 1)
    assert buffers.take(500).ctypes.data == address
    assert buffers.rows(2, 15).data_ptr() == rows
    assert buffers.rows(2, 15).shape == (2, 15)


@pytest.mark.parametrize("n", [1, 7])
def test_rows_of_a_desk_are_float32(n: int) -> None:
    assert BufferPool().rows(2, n).numpy().dtype == np.float32


@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_what_float8_e4m3_cuts_off_or_makes_nan_is_counted(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    codes = torch.from_numpy(to_bytes(values, "F8_E4M3"))
    told = count_cut_off(values, codes) + count_non_finite(codes.numpy(), "F8_E4M3")
    assert told == sum(not abs(x) <= 464 for x in numbers)
