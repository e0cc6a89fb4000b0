"""One file at an address as a set of pieces: what is there, on its way, expected, or not asked for.

Pieces never overlap. A reader waits for those it needs and fetches itself what nobody began to.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass

from mergepipe_pipeline.errors import RemoteError
from mergepipe_pipeline.remote.fetch import Abandoned
from mergepipe_pipeline.remote.pieces import Pieces, Run

#: Bytes of the longest request.
REQUEST_NBYTES = 4 << 20
#: How often a piece is fetched that is damaged or taken away before it is read.
_TIMES = 3

#: Gets the bytes [start, stop) of a file.
Fetch = Callable[[int, int], bytearray]


@dataclass(eq=False, slots=True)
class Piece:
    """Bytes [start, stop) of a file; `stored` is the piece on disk that has them.

    `done` None: nobody has begun to fetch it. Who fetches it ahead is told when it is read first.
    """

    start_byte: int
    stop_byte: int
    stored: Run
    done: Future[None] | None = None
    on_read: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.stop_byte - self.start_byte


class DownloadedFile:
    """Bytes of one remote file, from the pieces on disk or from its server. Safe for threads."""

    def __init__(self, where: str, key: str, fetch: Fetch, pieces: Pieces, pool: Executor) -> None:
        self._where, self._key, self._fetch = where, key, fetch
        self._pieces, self._pool = pieces, pool
        self._lock = threading.Lock()
        self._known: list[Piece] = []
        at = 0
        for run in pieces.runs(key):
            if run.stop_byte > at:
                start = max(at, run.start_byte)
                self._known.append(Piece(start, run.stop_byte, run, _there()))
                at = run.stop_byte

    def expect(self, start_byte: int, stop_byte: int) -> list[Piece]:
        """What nobody has begun to fetch of a range, each piece one request to come."""
        return [p for p in self._covering(start_byte, stop_byte) if p.done is None]

    def lacking(self, start_byte: int, stop_byte: int) -> tuple[int, int]:
        """Requests and bytes by which a range would be fetched that is to be read."""
        with self._lock:
            first = bisect_left(self._known, start_byte + 1, key=lambda p: p.stop_byte)
            at, gaps = start_byte, list[int]()
            for piece in self._known[first:]:
                if piece.start_byte >= stop_byte:
                    break
                gaps += [piece.start_byte - at, 0 if piece.done else piece.nbytes]
                at = piece.stop_byte
            gaps.append(stop_byte - at)
        left = [gap for gap in gaps if gap > 0]
        return sum(-(-gap // REQUEST_NBYTES) for gap in left), sum(left)

    def begin(self, start_byte: int, stop_byte: int) -> None:
        """Start to fetch what of a range is not there; waits for nothing."""
        for piece in self._covering(start_byte, stop_byte):
            self.submit(piece)

    def submit(self, piece: Piece) -> None:
        """Start to fetch a piece, if nobody has."""
        with self._lock:
            if piece.done is None:
                piece.done = self._pool.submit(self._get, piece)

    def read_into(self, start_byte: int, out: memoryview) -> None:
        """Fill `out` from `start_byte` on.

        Raises RemoteError, CheckpointChangedError, StorageFullError.
        """
        stop = start_byte + len(out)
        pieces = self._covering(start_byte, stop)
        for piece in pieces[1:]:
            self.submit(piece)
        for piece in pieces:
            a, b = max(start_byte, piece.start_byte), min(stop, piece.stop_byte)
            self._read(piece, a, out[a - start_byte : b - start_byte])
            on_read, piece.on_read = piece.on_read, None
            if on_read:
                on_read()

    def _read(self, piece: Piece, start_byte: int, out: memoryview) -> None:
        for _ in range(_TIMES):
            is_read = False
            try:
                with suppress(Abandoned):  # by readers before, who are gone
                    self._wait(piece)
                    is_read = self._pieces.read(self._key, piece.stored, start_byte, out)
            finally:
                if not is_read:
                    self._forget(piece)
            if is_read:
                return
        raise RemoteError(
            "What was downloaded is gone or damaged whenever it is read",
            where=f"{self._where}, bytes {piece.start_byte} to {piece.stop_byte}",
            expected="a folder of downloads that keeps what is written",
            found=f"{_TIMES} pieces that were not as written",
            next_step="give the downloads another folder: MERGEPIPE_DOWNLOADS",
        )

    def _forget(self, piece: Piece) -> None:
        """Let who reads a piece next fetch it: it failed, is damaged, or somebody collected it."""
        with self._lock:
            piece.done, piece.stored = None, Run(piece.start_byte, piece.stop_byte)

    def _wait(self, piece: Piece) -> None:
        """Return when a piece is on disk; what waits in the queue is fetched here."""
        with self._lock:
            if piece.done is not None and piece.done.cancel():
                piece.done = None
            is_mine = piece.done is None
            done = piece.done = piece.done or _begun()
        if is_mine:
            try:
                self._get(piece)
            except BaseException as error:
                done.set_exception(error)
                raise
            done.set_result(None)
        done.result()

    def _get(self, piece: Piece) -> None:
        data = self._fetch(piece.start_byte, piece.stop_byte)
        self._pieces.put(self._key, piece.start_byte, data)

    def _covering(self, start_byte: int, stop_byte: int) -> list[Piece]:
        """The pieces that a range lies in, made where there are none."""
        with self._lock:
            self._fill(start_byte, stop_byte)
            first = bisect_left(self._known, start_byte + 1, key=lambda p: p.stop_byte)
            last = bisect_left(self._known, stop_byte, key=lambda p: p.start_byte)
            return self._known[first:last]

    def _fill(self, start_byte: int, stop_byte: int) -> None:
        """Make pieces for the gaps in a range."""
        at = start_byte
        number = bisect_left(self._known, start_byte + 1, key=lambda p: p.stop_byte)
        while at < stop_byte:
            after = self._known[number] if number < len(self._known) else None
            end = min(stop_byte, after.start_byte if after else stop_byte)
            while at < end:
                stop = min(end, at + REQUEST_NBYTES)
                self._known.insert(number, Piece(at, stop, Run(at, stop)))
                number, at = number + 1, stop
            if after is not None:
                at, number = max(at, after.stop_byte), number + 1


def _begun() -> Future[None]:
    """A future that nobody can cancel any more."""
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()
    return done


def _there() -> Future[None]:
    done = _begun()
    done.set_result(None)
    return done
