"""Bytes that are looked at are given out later and stand for one read each."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.engine.kept import KeptFiles, Looking

SIZE = 100
DATA = {name: np.random.default_rng(i).bytes(SIZE) for i, name in enumerate("ab")}


class Counted:
    """Two files of random bytes; counts what is read."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.hints: list[tuple[str, int, int]] = []

    def size(self, path: str) -> int:
        return len(DATA[path])

    def mtime_ns(self, path: str) -> int:
        return ord(path)

    def read_into(self, path: str, start_byte: int, buffer: memoryview) -> None:
        self.nbytes += len(buffer)
        buffer[:] = DATA[path][start_byte : start_byte + len(buffer)]

    def will_need(self, path: str, start_byte: int, nbytes: int) -> None:
        self.hints.append((path, start_byte, nbytes))


def read(files: KeptFiles, path: str, start: int, stop: int) -> None:
    buffer = bytearray(stop - start)
    files.read_into(path, start, memoryview(buffer))
    assert bytes(buffer) == DATA[path][start:stop]


@given(
    looks=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, SIZE), st.integers(0, SIZE))),
    cuts=st.lists(st.integers(0, SIZE), max_size=6),
)
def test_whatever_is_looked_at_no_byte_is_read_twice(
    looks: list[tuple[str, int, int]], cuts: list[int]
) -> None:
    files = Counted()
    kept = KeptFiles(files)
    looking = Looking(kept)
    for path, a, b in looks:
        read(looking, path, min(a, b), max(a, b))
    edges = [0, *sorted(cuts), SIZE]
    for path in "ab":
        for a, b in pairwise(edges):
            read(kept, path, a, b)
    assert files.nbytes == 2 * SIZE
    # All was given out: from now on every read is one.
    read(kept, "a", 0, SIZE)
    assert files.nbytes == 3 * SIZE


def test_looks_see_what_other_looks_kept() -> None:
    files = Counted()
    looking = Looking(KeptFiles(files))
    read(looking, "a", 10, 30)
    read(looking, "a", 0, 50)
    assert files.nbytes == 50


@pytest.mark.parametrize("wrap", [lambda f: f, Looking])
def test_all_else_is_the_files_own(wrap: type[KeptFiles]) -> None:
    files = Counted()
    kept = wrap(KeptFiles(files))
    assert (kept.size("a"), kept.mtime_ns("b")) == (SIZE, ord("b"))
    kept.will_need("a", 3, 4)
    assert files.hints == [("a", 3, 4)]
