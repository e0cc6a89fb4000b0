"""The gate: only the access set is read, and every byte is counted."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.checkpoints.reader import BlockReader, Tally
from mergepipe_pipeline.errors import (
    BudgetError,
    CheckpointChangedError,
    CheckpointError,
    MergePipeError,
)
from mergepipe_pipeline.storage.source import LocalSource
from tests.storage.files import sharded
from tests.support.laws import examples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharded(tmp_path_factory.mktemp("reader") / "m")


@settings(max_examples=examples(40), deadline=None)
@given(st.sampled_from("abc"), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6))))
def test_reads_give_exactly_their_elements_and_are_counted_to_the_byte(
    folder: Path, name: str, pairs: list[tuple[int, int]]
) -> None:
    checkpoint = open_checkpoint(str(folder), "m")
    ranges = [(min(p), max(p)) for p in pairs]
    with LocalSource(folder) as source:
        reader = BlockReader(source, checkpoint, None, tally := Tally())
        for start, stop in ranges:
            data = np.frombuffer(reader.read(checkpoint.by_name[name], start, stop), np.float32)
            assert data.tolist() == list(range(start, stop))
    assert tally.nbytes == 4 * sum(stop - start for start, stop in ranges)


@settings(max_examples=examples(40), deadline=None)
@given(st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted))
def test_a_read_is_allowed_iff_one_range_of_the_access_set_covers_it(
    folder: Path, wanted: list[int]
) -> None:
    start, stop = wanted
    checkpoint = open_checkpoint(str(folder), "m")
    allowed = {"a": ((0, 2), (3, 6))}
    with LocalSource(folder) as source:
        reader = BlockReader(source, checkpoint, allowed, tally := Tally())
        if stop <= 2 or start >= 3:
            reader.read(checkpoint.by_name["a"], start, stop)
        else:
            with pytest.raises(BudgetError, match=rf"tensor a.*\[{start}, {stop}\)"):
                reader.read(checkpoint.by_name["a"], start, stop)
            assert tally.nbytes == 0


def test_a_tensor_outside_the_access_set_cannot_be_read(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder), "m")
    with LocalSource(folder) as source:
        reader = BlockReader(source, checkpoint, {"a": ((0, 6),)})
        with pytest.raises(BudgetError, match="tensor c"):
            reader.read(checkpoint.by_name["c"], 0, 1)


def test_a_buffer_of_another_size_and_a_range_past_the_tensor_are_refused(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder), "m")
    with LocalSource(folder) as source:
        reader = BlockReader(source, checkpoint, None)
        with pytest.raises(ValueError, match="buffer of 3 bytes"):
            reader.read_into(checkpoint.by_name["a"], 0, 1, memoryview(bytearray(3)))
        with pytest.raises(ValueError, match=r"\[0, 7\)"):
            reader.read(checkpoint.by_name["a"], 0, 7)


def test_readers_with_one_tally_count_together_but_every_thread_for_itself(folder: Path) -> None:
    checkpoint, tally = open_checkpoint(str(folder), "m"), Tally()
    with LocalSource(folder) as source, ThreadPoolExecutor(8) as pool:
        readers = [BlockReader(source, checkpoint, None, tally) for _ in range(2)]

        def read(i: int) -> int:
            before = tally.nbytes
            for reader in readers[: 1 + i % 2]:
                reader.read(checkpoint.by_name["abc"[i % 3]], 0, 6)
            return tally.nbytes - before

        assert list(pool.map(read, range(300))) == [24, 48] * 150
    assert tally.nbytes == 0


@pytest.mark.parametrize("change", ["touch", "grow", "replace"])
def test_a_file_that_changed_after_opening_is_named(tmp_path: Path, change: str) -> None:
    folder = sharded(tmp_path / "m")
    checkpoint = open_checkpoint(str(folder), "m")
    shard = folder / checkpoint.files[1].path
    with LocalSource(folder) as source:
        reader = BlockReader(source, checkpoint, None)
        reader.verify_unchanged()
        if change == "touch":
            os.utime(shard, ns=(1, 1))
        elif change == "grow":
            shard.write_bytes(shard.read_bytes() + b"x")
        else:
            (folder / "new").write_bytes(shard.read_bytes())
            os.utime(folder / "new", ns=(2, 2))
            os.replace(folder / "new", shard)
        with pytest.raises(CheckpointChangedError, match=shard.name):
            reader.verify_unchanged()


def test_a_file_that_ends_early_is_a_changed_file_not_zeros(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    with LocalSource(tmp_path) as source:
        assert source.read_range("f", 1, 4) == b"2345"
        with pytest.raises(CheckpointChangedError, match="10 bytes from byte 2, found 3 bytes"):
            source.read_range("f", 2, 10)


def test_short_reads_of_the_kernel_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(100))
    (tmp_path / "f").write_bytes(data)
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: whole(fd, [to[0][:7]], at))
    with LocalSource(tmp_path) as source:
        assert source.read_range("f", 0, 100) == data


def test_an_absent_file_is_named_by_every_question(tmp_path: Path) -> None:
    with LocalSource(tmp_path) as source:
        for ask in (source.size, source.mtime_ns, lambda p: source.read_range(p, 0, 1)):
            with pytest.raises(CheckpointError, match="gone"):
                ask("gone")


def test_closing_a_source_closes_its_files(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"1")
    before = len(os.listdir("/proc/self/fd"))
    with LocalSource(tmp_path) as source:
        source.read_range("f", 0, 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_the_disk_cannot_read_is_named_by_file_bytes_and_cause() -> None:
    with LocalSource("/proc/self") as files, pytest.raises(MergePipeError) as refused:
        files.read_into("mem", 0, memoryview(bytearray(100)))  # nothing is mapped there
    assert refused.value.where == "/proc/self/mem, bytes 0 to 100"
    assert refused.value.found == "Input/output error"
