"""Shards are written front to back, hashed on the way, and never left half written."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.checkpoints.header import header_nbytes, parse_header
from mergepipe_pipeline.checkpoints.writer import ShardWriter
from mergepipe_pipeline.errors import CorruptionError, StorageFullError
from tests.support.laws import examples

TENSORS = [("b", "F32", (3,)), ("a", "F32", (2, 2)), ("e", "F32", (0,)), ("z", "I8", (5,))]
NBYTES = 12 + 16 + 5


@settings(max_examples=examples(40), deadline=None)
@given(st.binary(min_size=NBYTES, max_size=NBYTES), st.lists(st.integers(0, NBYTES)))
def test_prefix_digests_are_those_of_the_file_however_it_was_cut(
    data: bytes, cuts: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as tmp:
        path = Path(tmp, "x.safetensors")
        with ShardWriter(path, TENSORS, {"format": "pt"}) as writer:
            marks = [0, *sorted(cuts), NBYTES]
            for a, b in pairwise(marks):
                writer.write(memoryview(data[a:b]))
            sha256, nbytes = writer.finish()
        file = path.read_bytes()
    length = header_nbytes(file[:8], len(file), "x")
    entries = parse_header(file[8 : 8 + length], len(file), "x")[0]
    assert file[8 + length :] == data
    assert (sha256, nbytes) == (hashlib.sha256(file).hexdigest(), len(file))
    assert writer.prefix_digests == tuple(
        (e.name, hashlib.sha256(file[: e.start_byte + e.nbytes]).hexdigest()) for e in entries
    )
    assert writer.order == ("a", "b", "e", "z")


def test_an_unfinished_shard_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with ShardWriter(path, TENSORS, {}) as writer:
        writer.write(memoryview(bytes(4)))
        assert path.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_shard_is_removed_when_its_writer_fails(tmp_path: Path) -> None:
    def write_and_fail() -> None:
        with ShardWriter(tmp_path / "x", TENSORS, {}) as writer:
            writer.write(memoryview(bytes(NBYTES)))
            raise RuntimeError("power")

    with pytest.raises(RuntimeError, match="power"):
        write_and_fail()
    assert list(tmp_path.iterdir()) == []


def write_zeros(path: Path) -> None:
    with ShardWriter(path, TENSORS, {}) as writer:
        writer.write(memoryview(bytes(NBYTES)))
        writer.finish()


def test_finishing_early_and_writing_too_much_are_refused(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x", TENSORS, {}) as writer:
        writer.write(memoryview(bytes(NBYTES - 1)))
        with pytest.raises(CorruptionError, match="not written to its end"):
            writer.finish()
        with pytest.raises(ValueError, match="more bytes than the header says"):
            writer.write(memoryview(bytes(2)))
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="x"), ShardWriter(tmp_path / "x", TENSORS, {}):
        pass
    assert (tmp_path / "x").read_bytes() == b"mine"


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def full(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(StorageFullError, match=r"disk is full.*x\.safetensors"):
        write_zeros(tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_another_failure_of_the_disk_keeps_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(OSError, match="broken"):
        write_zeros(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_short_writes_of_the_kernel_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: whole(fd, data[:3], at))
    with ShardWriter(tmp_path / "x", TENSORS, {}) as writer:
        writer.write(memoryview(bytes(range(NBYTES))))
        sha256, _ = writer.finish()
    data = (tmp_path / "x").read_bytes()
    assert data.endswith(bytes(range(NBYTES)))
    assert hashlib.sha256(data).hexdigest() == sha256
