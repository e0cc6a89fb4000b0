"""Frames come as they were written from warm and cold files, or are refused by name."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.domain.pack import TIERS, PackedTensor
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.packs.frame_files import FrameFiles
from mergepipe_pipeline.packs.index import frames_path
from mergepipe_pipeline.packs.store import Pack
from mergepipe_pipeline.storage import source
from mergepipe_pipeline.storage.page_buffer import PageBuffer
from mergepipe_pipeline.storage.source import Reading
from mergepipe_pipeline.verbs.pack import pack
from tests.packs.models import warehouse_of
from tests.support.laws import examples

NAME = "model.layers.0.b.weight"


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    warehouse = warehouse_of(tmp_path_factory.mktemp("models"))
    (made,) = pack(warehouse, ["e0"])
    return warehouse.packs.open(made.pack_id)


def drop(path: Path) -> None:
    """Take a file out of the page cache."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def written(root: Path, tensor: PackedTensor, tier: int, chunk: int) -> bytes:
    """A frame, as it lies in its file."""
    start, stop = tensor.frame_starts[tier, chunk : chunk + 2].tolist()
    return frames_path(root, TIERS[tier]).read_bytes()[start:stop]


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(get_args(Reading)), st.booleans(), st.booleans())
def test_any_frames_of_any_chunks_come_as_they_were_written(
    known: Pack, seed: int, reading: Reading, is_cold: bool, room_is_used: bool
) -> None:
    tensor, rng = known.tensors[NAME], np.random.default_rng(seed)
    wanted = rng.random(tensor.nbytes.shape) < 0.6
    n_chunks = wanted.shape[1]
    first = int(rng.integers(n_chunks))
    stop = int(rng.integers(first, n_chunks)) + 1
    buffer = PageBuffer()
    if room_is_used:
        buffer.take(1 << 20)
    for tier in TIERS if is_cold else ():
        drop(frames_path(known.root, tier))
    with FrameFiles(known.root, reading) as files:
        frames = files.read_wanted(tensor, wanted, first, stop, buffer)
    for i, tier in enumerate(TIERS):
        for chunk in range(first, stop):
            found = bytes(frames.frame(tier, chunk - first))
            expected = written(known.root, tensor, i, chunk) if wanted[i, chunk] else b""
            assert found == expected


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EACCES])
def test_where_files_cannot_be_read_past_the_page_cache_they_are_read_through_it(
    known: Pack, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = os.open

    def refused(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *rest)

    tensor = known.tensors[NAME]
    drop(frames_path(known.root, "X"))
    monkeypatch.setattr(os, "open", refused)
    with FrameFiles(known.root, "once") as files:
        frames = files.read(tensor, ["X"], 0, 1)
    assert bytes(frames.frame("X", 0)) == written(known.root, tensor, TIERS.index("X"), 0)


def test_where_reads_past_the_page_cache_fail_once_they_are_not_tried_again(
    known: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, opened = known.tensors[NAME], []

    def of_no_use(descriptor: int) -> int:
        opened.append(descriptor)
        return os.open(f"/proc/self/fd/{descriptor}", os.O_PATH)

    drop(frames_path(known.root, "X"))
    monkeypatch.setattr(source, "open_direct", of_no_use)
    with FrameFiles(known.root, "once") as files:
        for _ in range(3):
            frames = files.read(tensor, ["X"], 0, 1)
            assert bytes(frames.frame("X", 0)) == written(known.root, tensor, TIERS.index("X"), 0)
            with files._source.lent(frames_path(known.root, "X").name) as (_, is_direct):
                assert not is_direct
    assert len(opened) == 1


@pytest.mark.parametrize("damage", ["cut", "gone", "flipped"])
@pytest.mark.parametrize("reading", ["exact", "once"])
def test_a_file_that_is_cut_gone_or_flipped_is_named_with_tensor_and_chunk(
    tmp_path: Path, damage: str, reading: Reading
) -> None:
    warehouse = warehouse_of(tmp_path)
    (made,) = pack(warehouse, ["e0"])
    known = warehouse.packs.open(made.pack_id)
    path, tensor = frames_path(known.root, "X"), known.tensors[NAME]
    data = bytearray(path.read_bytes())
    start = int(tensor.frame_starts[TIERS.index("X"), 0])
    data[start] ^= 1
    with FrameFiles(known.root, reading) as files:
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(data if damage == "flipped" else data[: start + 1])
        drop(path) if damage != "gone" else None
        with pytest.raises(CorruptionError, match=rf"X\.frames, tensor {NAME}, chunk 0"):
            files.read(tensor, ("X20", "X"), 0, 1)
