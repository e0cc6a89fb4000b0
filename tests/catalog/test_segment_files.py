"""The digests of segments in files: had as they were put, whatever the number of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mergepipe_pipeline.catalog.contents import ContentFiles
from mergepipe_pipeline.domain.segments import COARSE_ELEMS, FINE_ELEMS, Segments
from mergepipe_pipeline.errors import CorruptionError

OWNER = "0" * 24


def put(folder: Path, count: int) -> dict[str, bytes]:
    """As an analysis that saves `count` times puts them: a file each time."""
    tensors = {f"t{i}": bytes([i]) * 16 for i in range(count)}
    for name, digests in tensors.items():
        files(folder).put({name: (Segments(COARSE_ELEMS, digests),)})
    return tensors


def files(folder: Path) -> ContentFiles:
    return ContentFiles(folder, OWNER)


def test_digests_of_many_files_are_had_without_a_file_open_for_each(tmp_path: Path) -> None:
    tensors = put(tmp_path, 40)
    before = len(os.listdir("/proc/self/fd"))
    segments = files(tmp_path).segments(COARSE_ELEMS)
    assert {name: segments[name] for name in tensors} == tensors
    assert len(os.listdir("/proc/self/fd")) <= before


def test_digests_that_went_or_changed_while_they_were_in_use_are_said(tmp_path: Path) -> None:
    put(tmp_path, 2)
    segments = files(tmp_path).segments(COARSE_ELEMS)
    first, second = sorted(tmp_path.rglob("*.parquet"))
    first.unlink()
    data = bytearray(second.read_bytes())
    data[4 : len(data) // 3] = bytes(len(data) // 3 - 4)
    second.write_bytes(data)
    for name in ("t0", "t1"):
        with pytest.raises(CorruptionError, match="catalog file"):
            segments[name]


def test_the_whole_is_written_once_every_tensor_is_known_and_outlives_damaged_parts(
    tmp_path: Path,
) -> None:
    put(tmp_path, 2)
    names = ["t2", "t0", "t1"]
    assert files(tmp_path).all_known() is None
    assert files(tmp_path).known().keys() == {"t0", "t1"}
    last = Segments(COARSE_ELEMS, b"x" * 16), Segments(FINE_ELEMS, b"y" * 32)
    files(tmp_path).put({"t2": last}, names)
    for part in tmp_path.rglob("*.part.*"):
        part.write_bytes(b"")
    digests = files(tmp_path).all_known()
    assert digests is not None
    assert list(digests) == names
    assert digests["t2"] == last[0].content
    fine = files(tmp_path).segments(FINE_ELEMS)
    assert [name for name in names if name in fine] == ["t2"]
    assert fine["t2"] == last[1].digests


def test_a_damaged_whole_is_put_together_again_from_parts(tmp_path: Path) -> None:
    tensors = put(tmp_path, 2)
    files(tmp_path).put({}, list(tensors))
    whole = next(p for p in tmp_path.rglob("*.parquet") if ".part." not in p.name)
    data = whole.read_bytes()
    whole.write_bytes(data[:-9])
    assert files(tmp_path).all_known() is None
    files(tmp_path).put({}, list(tensors))
    assert whole.read_bytes() == data
