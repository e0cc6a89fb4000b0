"""However many files are read, few are open, and every read gives the bytes of its own file."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.storage.source import Handles, LocalSource
from tests.support.laws import examples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("many")
    for n in range(300):
        (made / str(n)).write_bytes(n.to_bytes(2, "little"))
    return made


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """The process may open 64 files more than it has open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = max(map(int, os.listdir("/proc/self/fd"))) + 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    yield soft
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_more_files_than_a_process_may_open_are_read_by_several_threads(
    folder: Path, few_descriptors: int
) -> None:
    with LocalSource(folder) as one, LocalSource(folder) as other, ThreadPoolExecutor(8) as pool:
        for source in (one, other):
            read = pool.map(lambda n, s=source: s.read_range(str(n), 0, 2), [*range(300)] * 3)
            assert [int.from_bytes(b, "little") for b in read] == [*range(300)] * 3


def test_a_file_that_opens_slowly_keeps_nobody_else_waiting(folder: Path) -> None:
    handles, begun, may_end = Handles(), Event(), Event()

    def slowly(name: str) -> int:
        begun.set()
        assert may_end.wait(30)
        return os.open(folder / name, os.O_RDONLY)

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(handles.take, "owner", "1", slowly)
        assert begun.wait(30)
        try:
            other = handles.take("owner", "2", lambda name: os.open(folder / name, os.O_RDONLY))
            # Meanwhile another thread opens the same file: one of both descriptors is kept.
            same = handles.take("owner", "1", lambda name: os.open(folder / name, os.O_RDONLY))
        finally:
            may_end.set()
        assert slow.result() is same
    assert (same.users, other.users) == (2, 1)
    assert (
        len({same.descriptor, other.descriptor} & set(map(int, os.listdir("/proc/self/fd")))) == 2
    )


@settings(
    max_examples=examples(50),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=40))
def test_what_is_read_stays_open_and_of_the_rest_no_more_than_allowed(
    folder: Path, most: int, steps: list[tuple[int, bool]]
) -> None:
    handles, reading, seen = Handles(most), [], set()
    for n, done_at_once in steps:
        file = handles.take("owner", str(n), lambda name: os.open(folder / name, os.O_RDONLY))
        seen.add(file)
        if done_at_once:
            handles.give_back(file)
        else:
            reading.append(file)
        assert all(is_open(f.descriptor) for f in reading)
        assert os.pread(file.descriptor, 2, 0) == n.to_bytes(2, "little")
        assert len(handles._files) <= max(most, 1 + len(set(reading)))
    handles.close("owner")
    assert all(is_open(f.descriptor) for f in reading)
    for file in reading:
        handles.give_back(file)
    assert not handles._files
    assert not any(f.wanted and f.users for f in seen)


def test_a_source_that_is_closed_has_no_file_open(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with LocalSource(folder) as source:
        for n in range(20):
            source.will_need(str(n), 0, 2)
        assert len(os.listdir("/proc/self/fd")) > before
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_replaced_file_is_read_anew_by_a_source_opened_after_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with LocalSource(tmp_path) as first:
        assert first.read_range("a", 0, 3) == b"old"
        (tmp_path / "new").write_bytes(b"new")
        (tmp_path / "new").rename(tmp_path / "a")
        with LocalSource(tmp_path) as second:
            assert second.read_range("a", 0, 3) == b"new"


def test_a_file_that_is_not_there_is_named_and_leaves_nothing_open(tmp_path: Path) -> None:
    with LocalSource(tmp_path) as source, pytest.raises(CheckpointError, match=r"gone.*no such"):
        source.read_range("gone", 0, 1)
