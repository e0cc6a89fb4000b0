"""Reads past the page cache give the file's bytes, and leave the cache as it was."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.errors import CheckpointChangedError
from mergepipe_pipeline.storage import uncached
from mergepipe_pipeline.storage.source import LocalSource, Reading
from mergepipe_pipeline.storage.uncached import cached_nbytes, fits_page_cache, read_uncached
from tests.storage.files import drop
from tests.support.laws import examples

pytestmark = pytest.mark.usefixtures("durable_writes")

SIZE = (3 << 20) + 777


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cold") / "weights"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return path


def cached(path: Path) -> int:
    """Bytes of a file in the page cache; skips the test where nobody can tell."""
    handle = os.open(path, os.O_RDONLY)
    try:
        found = cached_nbytes(handle, 0, SIZE)
    finally:
        os.close(handle)
    if found is None:
        pytest.skip("this kernel does not say what is in the page cache")
    return found


def can_read_past_cache(path: Path) -> bool:
    drop(path)
    handle = os.open(path, os.O_RDONLY)
    try:
        return read_uncached(handle, 0, memoryview(bytearray(1 << 20))) > 0
    finally:
        os.close(handle)


@settings(max_examples=examples(50), deadline=None)
@given(
    start=st.integers(0, SIZE),
    nbytes=st.integers(0, SIZE),
    cold=st.booleans(),
    reading=st.sampled_from(["ahead", "exact", "once"]),
)
def test_every_way_of_reading_gives_the_bytes_of_the_file(
    file: Path, start: int, nbytes: int, cold: bool, reading: Reading
) -> None:
    if cold:
        drop(file)
    nbytes = min(nbytes, SIZE - start)
    with LocalSource(file.parent, reading) as source:
        found = source.read_range(file.name, start, nbytes)
    assert found == file.read_bytes()[start : start + nbytes]


def test_a_cold_read_that_happens_once_leaves_the_page_cache_alone(file: Path) -> None:
    if not can_read_past_cache(file):
        pytest.skip("this file system reads through the page cache only")
    drop(file)
    with LocalSource(file.parent, "once") as source:
        source.read_range(file.name, 12345, 1 << 20)
    assert cached(file) == 0


def test_an_exact_read_fetches_nothing_beside_what_is_asked_for(file: Path) -> None:
    drop(file)
    before = cached(file)
    with LocalSource(file.parent, "exact") as source:
        source.read_range(file.name, 1 << 20, 300_000)
    assert cached(file) - before <= 300_000 + 2 * 4096


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EACCES, errno.ENOENT])
def test_where_reads_past_the_cache_are_impossible_ordinary_ones_are_made(
    file: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = os.open

    def refused(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *rest)

    wanted = file.read_bytes()[5 : 5 + (1 << 20)]
    drop(file)
    monkeypatch.setattr(os, "open", refused)
    with LocalSource(file.parent, "once") as source:
        assert source.read_range(file.name, 5, 1 << 20) == wanted


@pytest.mark.parametrize("cold", [True, False])
def test_a_file_that_ends_early_is_named_however_it_is_read(tmp_path: Path, cold: bool) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(400_001))
    if cold:
        drop(path)
    with (
        LocalSource(tmp_path, "once") as source,
        pytest.raises(CheckpointChangedError, match=r"Expected 400000 bytes.*found 399999 bytes"),
    ):
        source.read_range("short", 2, 400_000)


def test_what_fits_the_page_cache_is_at_most_half_of_what_is_free() -> None:
    assert fits_page_cache(0)
    assert not fits_page_cache(1 << 60)


def test_what_a_forked_process_reads_does_not_reach_its_parent() -> None:
    buffer = uncached.page_aligned(4096)
    child = os.fork()
    if child == 0:
        buffer[:4] = b"read"
        os._exit(0)
    os.waitpid(child, 0)
    assert buffer[:4] == bytes(4)
