"""Reads that are done together give what each would give by itself, and fail as it would."""

from __future__ import annotations

import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.errors import CheckpointChangedError, CheckpointError
from mergepipe_pipeline.storage.read_batch import ReadBatch
from mergepipe_pipeline.storage.source import LocalSource, Reading
from mergepipe_pipeline.storage.uncached import PAGE_NBYTES, page_aligned
from tests.storage.files import drop
from tests.support.laws import examples

_SIZES = {"a": (5 << 20) + 4321, "b": 300_001, "c": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("together")
    for name, nbytes in _SIZES.items():
        (found / name).write_bytes(os.urandom(nbytes))
    return found


places = st.sampled_from(sorted(_SIZES)).flatmap(
    lambda name: st.tuples(
        st.just(name), st.integers(0, _SIZES[name]), st.integers(0, _SIZES[name])
    )
)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(places, max_size=6),
    st.sampled_from(["ahead", "exact", "once"]),
    st.booleans(),
    st.integers(0, 9),
)
def test_a_batch_gives_the_bytes_of_the_files(
    folder: Path, wanted: list[tuple[str, int, int]], reading: Reading, cold: bool, shift: int
) -> None:
    if cold:
        for name in _SIZES:
            drop(folder / name)
    parts = [(name, min(a, b), max(a, b)) for name, a, b in wanted]
    memory = [memoryview(bytearray(b - a + shift))[shift:] for _, a, b in parts]
    copies = [memoryview(bytearray(len(one))) for one in memory]
    with LocalSource(folder, reading) as source, ReadBatch() as batch:
        for (name, a, _), out, copy in zip(parts, memory, copies, strict=True):
            source.put(batch, name, a, out)
            if len(out):
                batch.copy(out, copy)
    for (name, a, b), out, copy in zip(parts, memory, copies, strict=True):
        assert bytes(out) == bytes(copy) == (folder / name).read_bytes()[a:b]


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, _SIZES["a"] - (1 << 17)), st.integers(1 << 17, 1 << 20))
def test_memory_that_lies_in_its_pages_as_the_file_does_is_filled_as_well(
    folder: Path, start: int, nbytes: int
) -> None:
    drop(folder / "a")
    nbytes = min(nbytes, _SIZES["a"] - start)
    lead = start % PAGE_NBYTES
    out = memoryview(page_aligned(nbytes + 2 * PAGE_NBYTES))[lead : lead + nbytes]
    with LocalSource(folder, "once") as source, ReadBatch() as batch:
        source.put(batch, "a", start, out, has_room=True)
    assert bytes(out) == (folder / "a").read_bytes()[start : start + nbytes]


@pytest.mark.parametrize("reading", ["exact", "once"])
def test_a_file_that_ends_early_is_named_and_what_follows_is_not_done(
    tmp_path: Path, reading: Reading
) -> None:
    (tmp_path / "short").write_bytes(bytes(400_001))
    drop(tmp_path / "short")
    done: list[str] = []

    def read() -> None:
        with LocalSource(tmp_path, reading) as source, ReadBatch() as batch:
            source.put(batch, "short", 0, memoryview(bytearray(10)))
            source.put(batch, "short", 2, memoryview(bytearray(400_000)))
            batch.then(lambda: done.append("after"))
            batch.if_it_fails(lambda: done.append("undone"))

    with pytest.raises(CheckpointChangedError, match=r"Expected 400000 bytes.*found 399999 bytes"):
        read()
    assert done == ["undone"]


def test_an_absent_file_is_named_when_it_is_asked_for(tmp_path: Path) -> None:
    with (
        LocalSource(tmp_path) as source,
        ReadBatch() as batch,
        pytest.raises(CheckpointError, match=r"gone.*no such"),
    ):
        source.put(batch, "gone", 0, memoryview(bytearray(10)))


def test_what_fails_is_undone_where_something_after_the_reads_fails(folder: Path) -> None:
    undone: list[int] = []

    def fail() -> None:
        raise ValueError("after all was read")

    def read() -> None:
        with LocalSource(folder) as source, ReadBatch() as batch:
            source.put(batch, "b", 0, memoryview(bytearray(10)))
            batch.if_it_fails(lambda: undone.append(1))
            batch.then(fail)

    with pytest.raises(ValueError, match="after all"):
        read()
    assert undone == [1]


def test_a_batch_leaves_no_file_open(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with LocalSource(folder, "once") as source, ReadBatch() as batch:
        for name, nbytes in _SIZES.items():
            source.put(batch, name, 0, memoryview(bytearray(nbytes)))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("reading", ["exact", "once"])
def test_more_files_than_a_process_may_open_are_read_in_one_batch(
    tmp_path: Path, reading: Reading
) -> None:
    names = [f"{n:03}" for n in range(60)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode() * 70_000)
        drop(tmp_path / name)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory = [memoryview(bytearray(210_000)) for _ in names]
    n_open = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (n_open + 40, hard))
    try:
        with LocalSource(tmp_path, reading) as source, ReadBatch() as batch:
            for name, out in zip(names, memory, strict=True):
                source.put(batch, name, 0, out)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(bytes(m) == n.encode() * 70_000 for n, m in zip(names, memory, strict=True))


def test_where_direct_reads_fail_ordinary_ones_are_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (folder / "a").read_bytes()
    drop(folder / "a")
    monkeypatch.setattr(
        "mergepipe_pipeline.storage.read_batch.run_all", lambda requests, scratch: 0
    )
    out = memoryview(bytearray(len(whole)))
    with LocalSource(folder, "once") as source, ReadBatch() as batch:
        source.put(batch, "a", 0, out)
    assert bytes(out) == whole


def test_threads_read_in_batches_of_their_own(folder: Path) -> None:
    whole = (folder / "a").read_bytes()

    def one(turn: int) -> bool:
        a, n = turn * 40_000, 200_000
        out = memoryview(bytearray(n))
        with ReadBatch() as batch:
            source.put(batch, "a", a, out[: n // 2])
            source.put(batch, "a", a + n // 2, out[n // 2 :])
        return bytes(out) == whole[a : a + n]

    drop(folder / "a")
    with LocalSource(folder, "once") as source, ThreadPoolExecutor(6) as pool:
        assert all(pool.map(one, range(100)))
