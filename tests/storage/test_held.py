"""What is read twice gives the same bytes both times, and is asked of storage once if it fits."""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.errors import CheckpointChangedError
from mergepipe_pipeline.storage.held import (
    PIECE_NBYTES,
    FirstReading,
    HeldBytes,
    HeldFiles,
    SecondReading,
)
from mergepipe_pipeline.storage.read_batch import ReadBatch
from mergepipe_pipeline.storage.source import LocalSource
from tests.support.laws import examples

_PIECE = PIECE_NBYTES
_SIZE = 3 * _PIECE + 12345


class Counted(LocalSource):
    """A folder that counts how often each byte of its file was asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "exact")
        self.asked: Counter[int] = Counter()
        self.hints: list[tuple[int, int]] = []

    def read_into(self, path: str, start_byte: int, buffer: memoryview) -> None:
        super().read_into(path, start_byte, buffer)
        self.asked.update(range(start_byte, start_byte + len(buffer), 997))

    def put(
        self,
        batch: ReadBatch,
        path: str,
        start_byte: int,
        buffer: memoryview,
        *,
        has_room: bool = False,
    ) -> None:
        super().put(batch, path, start_byte, buffer, has_room=has_room)
        self.asked.update(range(start_byte, start_byte + len(buffer), 997))

    def will_need(self, path: str, start_byte: int, nbytes: int) -> None:
        self.hints.append((start_byte, nbytes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("held")
    (found / "file").write_bytes(os.urandom(_SIZE))
    return found


def readings(folder: Path, nbytes: int) -> tuple[HeldBytes, Counted, FirstReading, SecondReading]:
    held, source = HeldBytes(nbytes), Counted(folder)
    files = HeldFiles(held)
    return held, source, FirstReading(source, files, source, held), SecondReading(source, files)


def read(
    files: FirstReading | SecondReading,
    start: int,
    stop: int,
    *,
    together: bool = False,
    lent: bool = False,
) -> bytes:
    buffer = bytearray(stop - start)

    def use(raw: memoryview) -> None:
        buffer[:] = raw

    if lent and isinstance(files, FirstReading):
        with ReadBatch() as batch:
            if not files.lend(batch, "file", start, stop - start, use):
                files.put(batch, "file", start, memoryview(buffer))
    elif together:
        with ReadBatch() as batch:
            middle = (start + stop) // 2
            for a, b in ((start, middle), (middle, stop)):
                files.put(batch, "file", a, memoryview(buffer)[a - start : b - start])
    else:
        files.read_into("file", start, memoryview(buffer))
    return bytes(buffer)


def cut(stop: int, length: int) -> list[tuple[int, int]]:
    return [(a, min(a + length, stop)) for a in range(0, stop, length)]


@settings(max_examples=examples(40))
@given(
    st.integers(0, 5),
    st.integers(1, _PIECE >> 15).map(lambda n: n << 15),
    st.integers(1, _SIZE // 30_000).map(lambda n: n * 30_000),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
def test_both_readings_give_the_bytes_of_the_file_however_they_are_cut(
    folder: Path, n_pieces: int, first: int, again: int, repeats: int, together: bool, lent: bool
) -> None:
    whole = (folder / "file").read_bytes()
    held, source, before, merge = readings(folder, n_pieces * _PIECE)
    for a, b in cut(_SIZE, first):
        assert read(before, a, b, together=together, lent=lent) == whole[a:b]
    assert (together and not lent) or all(n == 1 for n in source.asked.values())
    for _ in range(1 + repeats):  # nobody promises that bytes are merged once
        for a, b in cut(_SIZE, again):
            assert read(merge, a, b, together=together) == whole[a:b]
    if n_pieces * first >= _SIZE + first and not repeats and not together:
        assert all(n == 1 for n in source.asked.values())
    buffers = [held.buffer() for _ in range(n_pieces + 1)]
    assert all(buffers[:-1])  # all is free again
    assert buffers[-1] is None  # and there is no more of it than was asked for


@pytest.mark.parametrize(("together", "lent"), [(False, False), (True, False), (False, True)])
def test_threads_that_read_the_same_bytes_never_get_those_of_others(
    folder: Path, together: bool, lent: bool
) -> None:
    whole = (folder / "file").read_bytes()
    _, _, before, merge = readings(folder, 2 * _PIECE)
    parts = cut(_SIZE, 40_000)

    def one(turn: int) -> bool:
        for a, b in parts[turn % 7 :: 7]:
            for files in (before, merge):
                if read(files, a, b, together=together, lent=lent) != whole[a:b]:
                    return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(50)))


def test_who_reads_what_was_let_go_meanwhile_is_told(folder: Path) -> None:
    held, _, before, merge = readings(folder, _PIECE)
    read(before, 0, 2000)
    (seen,) = merge.files.held("file", 0, 2000)
    assert read(merge, 0, 1000) == read(merge, 0, 1000)  # the piece counts as read whole
    assert held.buffer() is seen.buffer  # which may hold others' bytes now
    assert not merge.files.forget("file", seen, 1000)


def test_bytes_are_read_again_only_when_their_first_use_ends(folder: Path) -> None:
    held, source, before, merge = readings(folder, _PIECE)

    def use(raw: memoryview) -> None:
        assert read(merge, 0, 2000) == bytes(raw)  # from the file: nothing is held yet
        assert held.buffer() is None

    with ReadBatch() as batch:
        assert before.lend(batch, "file", 0, 2000, use)
        assert not before.lend(batch, "file", 2000, 2000, use)
    assert source.asked[0] == 2
    assert read(merge, 0, 2000) == (folder / "file").read_bytes()[:2000]
    assert source.asked[0] == 2
    assert held.buffer() is not None


def test_a_use_that_fails_holds_nothing(folder: Path) -> None:
    held, _, before, merge = readings(folder, _PIECE)

    def use(raw: memoryview) -> None:
        raise ZeroDivisionError(raw)

    with pytest.raises(ZeroDivisionError), ReadBatch() as batch:
        assert before.lend(batch, "file", 0, 2000, use)
    assert not merge.files.held("file", 0, 2000)
    assert held.buffer() is not None


def test_storage_hears_only_of_what_it_will_be_asked_for(folder: Path) -> None:
    _, source, before, merge = readings(folder, _PIECE)
    read(before, 1000, 2000)
    merge.will_need("file", 500, 3000)
    assert source.hints == [(500, 500), (2000, 1500)]
    before.will_need("file", 0, 10)
    assert len(source.hints) == 2


@pytest.mark.parametrize("together", [False, True])
def test_a_reading_that_fails_holds_nothing(folder: Path, together: bool) -> None:
    held, _, before, merge = readings(folder, 2 * _PIECE)
    with pytest.raises(CheckpointChangedError):
        read(before, _SIZE - 10, _SIZE + 10, together=together)
    assert held.buffer() is not None
    assert held.buffer() is not None
    with pytest.raises(CheckpointChangedError):
        read(merge, _SIZE - 10, _SIZE + 10, together=together)
