"""The digests of segments in files: had as they were put, whatever the number of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mergepipe_pipeline.catalog.segment_files import SegmentFiles, put_segments
from mergepipe_pipeline.domain.segments import COARSE_ELEMS
from mergepipe_pipeline.errors import CorruptionError

OWNER = "0" * 24


def put(folder: Path, count: int) -> dict[str, bytes]:
    """As an analysis that saves `count` times puts them: a file each time."""
    tensors = {f"t{i}": bytes([i]) * 16 for i in range(count)}
    for name, digests in tensors.items():
        put_segments(folder, OWNER, COARSE_ELEMS, {name: digests})
    return tensors


def test_digests_of_many_files_are_had_without_a_file_open_for_each(tmp_path: Path) -> None:
    tensors = put(tmp_path, 40)
    before = len(os.listdir("/proc/self/fd"))
    files = SegmentFiles(tmp_path, OWNER, COARSE_ELEMS)
    assert {name: files[name] for name in tensors} == tensors
    assert len(os.listdir("/proc/self/fd")) <= before


def test_digests_that_went_or_changed_while_they_were_in_use_are_said(tmp_path: Path) -> None:
    put(tmp_path, 2)
    files = SegmentFiles(tmp_path, OWNER, COARSE_ELEMS)
    first, second = sorted(tmp_path.rglob("*.parquet"))
    first.unlink()
    data = bytearray(second.read_bytes())
    data[len(data) // 8] ^= 1
    second.write_bytes(data)
    for name in ("t0", "t1"):
        with pytest.raises(CorruptionError, match="catalog file"):
            files[name]
