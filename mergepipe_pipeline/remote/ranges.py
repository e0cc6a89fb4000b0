"""Runs of bytes of files at addresses, kept on disk: the least recently used go first.

A piece is one immutable file with checksums behind its bytes; its name says which bytes. It appears
whole, so that processes may share the folder and be killed at any moment, and what is damaged
counts as not there. The folder holds nothing that cannot be downloaded again.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from mergepipe_pipeline.digest import CHECKSUM_NBYTES, segment_checksums
from mergepipe_pipeline.errors import MergePipeError, StorageFullError
from mergepipe_pipeline.storage.atomic import READ_ONLY, remove_tree, remove_unnamed, write_fleeting

FOLDER, LIMIT = "MERGEPIPE_DOWNLOADS", "MERGEPIPE_CACHE_LIMIT"
DEFAULT_LIMIT = "20GB"
#: What is kept however small the limit: reads that run ahead need room.
LEAST_NBYTES = 512 << 20
#: Bytes that a checksum is of.
_CHUNK_NBYTES = 64 << 10
#: What the system says where files cannot be made for good.
_NO_FOLDER = READ_ONLY | {errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG}
_NAME = re.compile(r"([0-9a-f]{12})-([0-9a-f]{12})")
_PROOF = "proved"


class Run(NamedTuple):
    """Bytes [start, stop) of a file."""

    start_byte: int
    stop_byte: int


class Pieces:
    """The folder of pieces. Safe for several threads and processes."""

    def __init__(self, folder: Path, limit_nbytes: int) -> None:
        self._folder, self._limit = folder, max(limit_nbytes, LEAST_NBYTES)
        self._lock = threading.Lock()
        self._nbytes: int | None = None
        self._used: set[Path] = set()

    def runs(self, key: str) -> list[Run]:
        """Which bytes of a file are there, in ascending order; some may be there twice."""
        names: list[str] = []
        with suppress(OSError):
            names = os.listdir(self._folder / key[:2] / key)
        matches = (_NAME.fullmatch(name) for name in names)
        return sorted(Run(int(m[1], 16), int(m[2], 16)) for m in matches if m)

    def read(self, key: str, run: Run, start_byte: int, out: memoryview) -> bool:
        """Fill `out` with bytes from `start_byte` on, which lie in a run.

        False, and the run is not there any more, if its piece is gone or damaged.
        """
        path = self._path(key, run)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            is_whole = _read_verified(handle, run, start_byte, out)
        finally:
            os.close(handle)
        if not is_whole:
            path.unlink(missing_ok=True)
        elif path not in self._used:
            self._used.add(path)
            with suppress(OSError):
                os.utime(path)
        return is_whole

    def put(self, key: str, start_byte: int, data: bytearray) -> None:
        """Keep the bytes of a file from `start_byte` on; collects if that is too much.

        Raises StorageFullError, and MergePipeError if the folder cannot be written.
        """
        run = Run(start_byte, start_byte + len(data))
        sums = segment_checksums(memoryview(data), _CHUNK_NBYTES)
        path, proof = self._path(key, run), self._proof(key)
        with refusals_named():
            proof.unlink(missing_ok=True)
            write_fleeting(path, (data, sums))
            proof.unlink(missing_ok=True)  # another process may have proved what was here before
        self._used.add(path)
        with self._lock:
            if self._nbytes is None:
                self._nbytes = sum(size for *_, size in self._all())
            else:
                self._nbytes += len(data) + len(sums)
            if self._nbytes > self._limit:
                self._nbytes = self._collect()

    def is_proved(self, key: str) -> bool:
        """Whether all pieces that are there are of the digest that the server states."""
        return self._proof(key).exists()

    def prove(self, key: str) -> None:
        """Remember that a whole file is of its digest, until another piece of it comes."""
        with suppress(OSError):  # then it is compared again
            self._proof(key).touch()

    def drop(self, key: str) -> None:
        """Remove all pieces of a file."""
        remove_tree(self._proof(key).parent)

    def _collect(self) -> int:
        """Remove the least recently used until a tenth of the limit is free; bytes that are left.

        What killed processes left unfinished goes, too.
        """
        files = sorted(self._all())
        left = sum(size for *_, size in files)
        for _, path, size in files:
            if left <= self._limit * 9 // 10:
                break
            with suppress(OSError):
                os.unlink(path)
            left -= size
        remove_unnamed(self._folder)
        return left

    def _all(self) -> Iterator[tuple[int, str, int]]:
        """When each piece was used, its path and its size."""
        for folder, _, names in os.walk(self._folder):
            for name in filter(_NAME.fullmatch, names):
                with suppress(OSError):
                    path = os.path.join(folder, name)
                    stat = os.stat(path)
                    yield stat.st_mtime_ns, path, stat.st_size

    def _proof(self, key: str) -> Path:
        return self._folder / key[:2] / key / _PROOF

    def _path(self, key: str, run: Run) -> Path:
        return self._folder / key[:2] / key / f"{run.start_byte:012x}-{run.stop_byte:012x}"


def _read_verified(handle: int, run: Run, start_byte: int, out: memoryview) -> bool:
    """Read bytes of a piece and compare every chunk that they touch with its checksum."""
    length = run.stop_byte - run.start_byte
    sums_at = length
    n_chunks = -(-length // _CHUNK_NBYTES)
    if os.fstat(handle).st_size != length + n_chunks * CHECKSUM_NBYTES:
        return False
    at = start_byte - run.start_byte
    first, last = at // _CHUNK_NBYTES, -(-(at + len(out)) // _CHUNK_NBYTES)
    begin, end = first * _CHUNK_NBYTES, min(length, last * _CHUNK_NBYTES)
    sums = os.pread(handle, (last - first) * CHECKSUM_NBYTES, sums_at + first * CHECKSUM_NBYTES)
    is_same = (begin, end) == (at, at + len(out))
    raw = out if is_same else memoryview(bytearray(end - begin))
    done = 0
    while done < len(raw):
        n = os.preadv(handle, [raw[done:]], begin + done)
        if n == 0:
            return False
        done += n
    if segment_checksums(raw, _CHUNK_NBYTES) != sums:
        return False
    if not is_same:
        out[:] = raw[at - begin : at - begin + len(out)]
    return True


def downloads() -> Pieces:
    """The pieces of this user, where and as many as the environment says."""
    folder, limit = downloads_folder(), downloads_limit_nbytes()
    key = (folder, limit)
    with _LOCK:
        if key not in _KNOWN:
            _KNOWN[key] = Pieces(folder, limit)
        return _KNOWN[key]


def downloads_folder() -> Path:
    """Where pieces are kept."""
    named = os.environ.get(FOLDER)
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(named or f"{home}/mergepipe/downloads").expanduser().absolute()


@contextmanager
def refusals_named() -> Iterator[None]:
    """Say what names another folder where that of downloads cannot be written, or is full.

    Raises MergePipeError, StorageFullError.
    """
    try:
        yield
    except StorageFullError as error:
        error.next_step = (
            "free space there and run the same command again: what came is kept. Another folder: "
            f"{FOLDER}, less of it: {LIMIT}"
        )
        raise
    except OSError as error:
        if error.errno not in _NO_FOLDER:
            raise
        raise MergePipeError(
            "The folder of downloads cannot be written",
            where=str(downloads_folder()),
            found=error.strerror,
            next_step=f"make it writable, or give the downloads another folder: {FOLDER}",
        ) from error


def downloads_limit_nbytes() -> int:
    """The most bytes of pieces that are kept. Raises MergePipeError."""
    return parse_size(os.environ.get(LIMIT) or DEFAULT_LIMIT, LIMIT)


def parse_size(text: str, where: str) -> int:
    """Bytes of a text like `20GB` or `512MiB`. Raises MergePipeError naming `where`."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?) ?([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise MergePipeError(
            "A size cannot be read",
            where=where,
            expected="a number with a unit, as 20GB or 512MiB",
            found=repr(text),
            next_step="correct it, or leave it out for the default",
        )
    step: float = 1024 if match[3] else 1000
    return round(float(match[1]) * pow(step, " KMGT".index(match[2].upper() or " ")))


_LOCK = threading.Lock()
_KNOWN: dict[tuple[Path, int], Pieces] = {}
