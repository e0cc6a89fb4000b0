"""A pass compares what it reads with what was analysed, and holds little of it."""

from __future__ import annotations

import os
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mergepipe_pipeline.analysis.digests import digest_checkpoint, digest_view
from mergepipe_pipeline.analysis.stream import WindowReader
from mergepipe_pipeline.checkpoints.reader import BlockReader
from mergepipe_pipeline.domain.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.domain.segments import Segments
from mergepipe_pipeline.domain.view import Part, Run, TensorView, view_of
from mergepipe_pipeline.errors import CorruptionError
from tests.analysis.conftest import SEGMENT_ELEMS
from tests.analysis.pairs import windows_of
from tests.support.stored import encode, write

#: Not whole segments, so that windows of such rows leave parts of segments.
ROW_ELEMS = 1000


@dataclass(frozen=True)
class Analysed:
    """The segments of one checkpoint's tensors."""

    segments: dict[str, tuple[Segments, ...]]

    def of_view(self, view: TensorView) -> Segments:
        return self.of_part(view.stored[0])

    def of_part(self, part: Part) -> Segments:
        return self.segments[part.entry.name][0]


def analysed(folder: Path, names: list[str], numel: int) -> tuple[Checkpoint, Analysed]:
    checkpoint = write(folder, "model", {n: encode(np.arange(numel), "BF16") for n in names})
    return checkpoint, Analysed(digest_checkpoint(checkpoint, levels=(SEGMENT_ELEMS,)))


def test_parts_of_segments_are_verified_with_their_tensor_and_do_not_pile_up(
    tmp_path: Path,
) -> None:
    names = [f"t{i}" for i in range(60)]
    checkpoint, known = analysed(tmp_path, names, 9 * ROW_ELEMS)
    held = []
    with windows_of(2 * SEGMENT_ELEMS), WindowReader([checkpoint], known) as reader:
        tracemalloc.start()
        for name in names:
            view = view_of(checkpoint.by_name[name])
            groups = reader.groups(
                [view],
                None,
                view.numel,
                lambda w: w.nbytes,
                row_elems=ROW_ELEMS,
                as_delta=False,
                only=0,
            )
            list(groups)
            held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        reader.verify_unchanged()
    assert held[-1] - held[5] < 10 * SEGMENT_ELEMS


def test_a_byte_that_changes_once_it_was_verified_gives_no_digests_of_rows_in_another_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, known = analysed(tmp_path, ["w"], 2 * SEGMENT_ELEMS)
    entry = checkpoint.by_name["w"]
    halves = (
        Run(0, 0, SEGMENT_ELEMS, SEGMENT_ELEMS),
        Run(SEGMENT_ELEMS, 0, 0, SEGMENT_ELEMS),
    )
    view = TensorView("w", "BF16", entry.shape, (Part(0, entry),), halves)
    reads = BlockReader.read_into
    done: list[int] = []

    def then_flip(reader: BlockReader, *where: Any) -> None:
        reads(reader, *where)
        done.append(1)
        if len(done) == 1:  # between the two readings of a file, by whoever else has it
            flip(Path(checkpoint.root), entry)

    monkeypatch.setattr(BlockReader, "read_into", then_flip)
    with pytest.raises(CorruptionError, match="not those that were analysed"):
        digest_view(view, {0: checkpoint}, SEGMENT_ELEMS, known)


def flip(path: Path, entry: TensorEntry) -> None:
    """Turn a bit of a tensor's first and last byte; size and time stay."""
    stat = path.stat()
    data = bytearray(path.read_bytes())
    for at in (entry.start_byte, entry.start_byte + entry.nbytes - 1):
        data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
