"""Side files are those of known names, of sane sizes, and are copied in little memory."""

from __future__ import annotations

import hashlib
import os
import tracemalloc
from pathlib import Path

import pytest

from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.storage.atomic import write_atomic
from mergepipe_pipeline.storage.side_files import pieces, side_files
from mergepipe_pipeline.storage.source import LocalSource
from tests.hostile.corpus import CONFIG, SIDE, write_full


def names(folder: Path) -> list[str]:
    with LocalSource(folder) as source:
        return list(side_files(source, str(folder)))


def test_side_files_are_what_a_model_needs_beside_weights(tmp_path: Path) -> None:
    folder = write_full(tmp_path / "m")
    for name in (
        "README.md",
        "training_args.bin",
        "tokenizer.json.bak",
        "tokenizer.json~",
        "vocab-secret",
        "merges.txt.orig",
        "chat_template.sh",
        "tokenizer",
        ".tokenizer.json",
    ):
        (folder / name).write_text("private")
    (folder / os.fsdecode(b"tokenizer.json\xff")).write_text("private")
    assert names(folder) == sorted([CONFIG, *SIDE])


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json", "generation_config.json"])
def test_a_sparse_side_file_is_refused_by_its_size_before_a_byte_is_read(
    tmp_path: Path, name: str
) -> None:
    folder = write_full(tmp_path / "m")
    os.truncate(folder / name, 3 << 29)
    tracemalloc.start()
    try:
        with pytest.raises(
            CheckpointError, match=rf"absurdly large.*{name}.*found {3 << 29} bytes"
        ):
            names(folder)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_side_file_is_copied_and_hashed_a_piece_at_a_time(tmp_path: Path) -> None:
    nbytes = (16 << 20) + 5
    data, digest = os.urandom(5) + bytes(nbytes - 5), hashlib.sha256()
    (tmp_path / "tokenizer.model").write_bytes(data)
    expected = hashlib.sha256(data).hexdigest()
    with LocalSource(tmp_path) as source:
        tracemalloc.start()
        try:
            copied = pieces(source, "tokenizer.model", nbytes, digest.update)
            write_atomic(tmp_path / "copy", copied)
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()
    assert (tmp_path / "copy").read_bytes() == data
    assert digest.hexdigest() == expected
