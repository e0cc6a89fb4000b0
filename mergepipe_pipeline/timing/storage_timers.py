"""Times reads of a cold file, and durable writes: the I/O of `calibrate`, without what it means.

Cold is what is not in this system's page cache; caches below it (of a host, of a disk) are part of
what is measured.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from mergepipe_pipeline.concurrency.workers import Workers
from mergepipe_pipeline.digest import new_hash
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.storage.atomic import adopt_file
from mergepipe_pipeline.storage.source import ANNOUNCED, LocalSource
from mergepipe_pipeline.storage.uncached import DirectFile

CHUNK_NBYTES = 8 << 20
#: What the engine asks for at once.
_PIECE_NBYTES = 1 << 20
#: A stray page or two does no harm; a file in memory does.
_RESIDENT_AT_MOST = 0.01
_TRIES, _PAUSE_S = 20, 0.02

Clock = Callable[[], float]


class ColdFile:
    """A file whose pages are dropped from the cache before every timing; a context manager."""

    def __init__(self, path: Path, clock: Clock = time.perf_counter) -> None:
        self._path, self._clock = path, clock
        self._handle = os.open(path, os.O_RDONLY)
        self.nbytes = os.fstat(self._handle).st_size
        self._buffer = memoryview(bytearray(CHUNK_NBYTES))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def read_s(self, starts: Sequence[int], nbytes: int) -> float:
        """Seconds to read `nbytes` from each of `starts`, in that order, by ranged reads.

        Raises MergePipeError if the file cannot be dropped from the page cache.
        """
        self.drop()
        began = self._clock()
        for start in starts:
            for at in range(start, start + nbytes, CHUNK_NBYTES):
                part = self._buffer[: min(CHUNK_NBYTES, start + nbytes - at)]
                os.preadv(self._handle, [part], at)
        return self._clock() - began

    def drop(self) -> None:
        """Take the file out of the page cache. Raises MergePipeError if it stays."""
        if not hasattr(os, "posix_fadvise"):
            raise self._still_cached("a system without posix_fadvise")
        share = 1.0
        for _ in range(_TRIES):
            os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_DONTNEED)
            share = resident_share(self._handle, self.nbytes)
            if share <= _RESIDENT_AT_MOST:
                return
            # What the system still reads ahead can be dropped only when it is there.
            time.sleep(_PAUSE_S)
        raise self._still_cached(f"{100 * share:.0f} % of it in memory")

    def _still_cached(self, found: str) -> MergePipeError:
        return MergePipeError(
            "Storage cannot be measured: the file stays in the page cache",
            where=str(self._path),
            expected="a file of your own on a disk, that the system lets go of",
            found=found,
            next_step="end what else uses the file, or name another file or folder: "
            "`mergepipe calibrate PATH`",
        )


def is_stored(path: Path) -> bool:
    """Whether a file has at least half its bytes on a disk; the rest are holes, read as zeros."""
    stat = path.stat()
    return stat.st_blocks * 512 >= stat.st_size // 2


def resident_share(handle: int, nbytes: int) -> float:
    """The share of a file's pages that are in memory, by mincore(2).

    A system tells it only of files that one may write, and says 1 of others.
    """
    if not nbytes:
        return 0.0
    with mmap.mmap(handle, nbytes, prot=mmap.PROT_READ) as mapped:
        pages = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapped, np.uint8)
        address, flags = view.ctypes.data, pages.ctypes.data
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_void_p(flags)
        )
        del view
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return float((pages & 1).mean())


def write_s(path: Path, nbytes: int, clock: Clock = time.perf_counter) -> float:
    """Seconds to hash `nbytes` of noise, write them and make them durable; the file stays."""
    noise = memoryview(np.random.default_rng(0).bytes(CHUNK_NBYTES))
    temp = path.with_name(f"{path.name}.tmp")
    began, state = clock(), new_hash()
    file = DirectFile(temp, nbytes)
    for at in range(0, nbytes, CHUNK_NBYTES):
        piece = noise[: min(CHUNK_NBYTES, nbytes - at)]
        state.update(piece)
        file.append(piece)
    file.close()
    adopt_file(temp, path)
    return clock() - began


def stream_s(path: Path, *, streams: int, threads: int, nbytes: int) -> tuple[int, float]:
    """Bytes and seconds of about `nbytes` of a cold file, read as the engine reads experts.

    `threads` each read the next 1 MiB of `streams` places in turn. Raises MergePipeError if the
    file cannot be dropped from the page cache.
    """
    with ColdFile(path) as file:
        each = file.nbytes // streams
        file.drop()
    piece = min(_PIECE_NBYTES, each)
    rounds = max(1, min(nbytes // streams, each) // piece)
    places = [s * each + n * piece for n in range(rounds) for s in range(streams)]
    numbers, lock = iter(range(len(places))), threading.Lock()
    ahead = ANNOUNCED * streams

    def work(source: LocalSource) -> None:
        buffer = memoryview(bytearray(piece))
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            for later in places[number + ahead : number + ahead + 1]:
                source.will_need(path.name, later, piece)
            source.read_into(path.name, places[number], buffer)

    with LocalSource(path, "exact") as source, Workers(threads) as workers:
        began = time.perf_counter()
        for _ in workers.map(work, [source] * threads):
            pass
        return rounds * streams * piece, time.perf_counter() - began
