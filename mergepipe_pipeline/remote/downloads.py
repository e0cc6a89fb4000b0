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
from typing import TYPE_CHECKING

from mergepipe_pipeline.digest import new_hash
from mergepipe_pipeline.errors import CorruptionError, RemoteError
from mergepipe_pipeline.remote.fetch import Abandoned
from mergepipe_pipeline.remote.listing import RemoteFile
from mergepipe_pipeline.remote.ranges import Pieces, Run

if TYPE_CHECKING:
    from hashlib import _Hash

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
    `came`: it was there at some time, whether or not it still is.
    """

    start_byte: int
    stop_byte: int
    stored: Run
    done: Future[None] | None = None
    on_read: Callable[[], None] | None = None
    came: bool = False

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.stop_byte - self.start_byte


class DownloadedFile:
    """Bytes of one remote file, from the pieces on disk or from its server. Safe for threads.

    Of a file of which its server states the digest, nobody gets the last bytes before the whole is
    compared with it: it is hashed from the start as it comes.
    """

    def __init__(
        self,
        where: str,
        key: str,
        fetch: Fetch,
        pieces: Pieces,
        pool: Executor,
        stated: RemoteFile | None = None,
        on_lie: Callable[[], None] = lambda: None,
    ) -> None:
        """`stated` is the file as its server states it, if that tells the digest of the whole;
        `on_lie` is called when the file is not that.
        """
        self._where, self._key, self._fetch = where, key, fetch
        self._pieces, self._pool = pieces, pool
        self._lock = threading.Lock()
        self._known: list[Piece] = []
        at = 0
        for run in pieces.runs(key):
            if run.stop_byte > at:
                start = max(at, run.start_byte)
                self._known.append(Piece(start, run.stop_byte, run, _there(), came=True))
                at = run.stop_byte
        self._stated, self._comparing = stated, threading.Lock()
        self._on_lie, self._had = on_lie, bool(self._known)
        self._hash: _Hash | None = None
        self._hashed_nbytes, self._drops = 0, 0
        self._came_nbytes = sum(p.nbytes for p in self._known)
        if stated and not pieces.is_proved(key):
            self._hash = stated.new_hash()

    def expect(self, start_byte: int, stop_byte: int) -> list[Piece]:
        """The pieces of a range that nobody has begun to fetch, each one request to come."""
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

        Raises RemoteError, CheckpointChangedError, StorageFullError, and CorruptionError if the
        file, now whole, is not what its server states; then nothing of it is kept.
        """
        stop = start_byte + len(out)
        pieces = self._covering(start_byte, stop)
        for piece in pieces[1:]:
            self.submit(piece)
        for piece in pieces:
            a, b = max(start_byte, piece.start_byte), min(stop, piece.stop_byte)
            self._read(piece, a, out[a - start_byte : b - start_byte])
            if self._hash is not None:
                self._compare()
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

    def _compare(self) -> None:
        """Hash on; compare the file with what its server states, once all of it came."""
        stated = self._stated
        assert stated is not None
        if not self._comparing.acquire(blocking=self._came_nbytes >= stated.nbytes):
            return  # another reader is at it
        try:
            while self._hash is not None and self._hashed_nbytes < stated.nbytes:
                data = self._next_to_hash()
                if data is None:
                    return
                self._hash.update(data)
                self._hashed_nbytes += len(data)
            if self._hash is not None:
                self._judge(stated, self._hash.hexdigest())
        finally:
            self._comparing.release()

    def _next_to_hash(self) -> bytearray | None:
        """The bytes behind those that are hashed; None if they did not come, or are gone again."""
        start_byte = self._hashed_nbytes
        with self._lock:
            number = bisect_left(self._known, start_byte + 1, key=lambda p: p.stop_byte)
            piece = self._known[number] if number < len(self._known) else None
        if piece is None or not piece.came or piece.start_byte > start_byte:
            return None
        data = bytearray(piece.stop_byte - start_byte)
        is_read = self._pieces.read(self._key, piece.stored, start_byte, memoryview(data))
        return data if is_read else None

    def _judge(self, stated: RemoteFile, found: str) -> None:
        """Believe a whole file, or let all of it go. Raises CorruptionError."""
        self._hash = None
        if found == stated.content:
            self._pieces.prove(self._key)
            return
        self._hash = stated.new_hash()
        self.drop_unproved()
        self._on_lie()
        kind = "sha256" if len(found) == len(new_hash().hexdigest()) else "git blob"
        raise CorruptionError(
            "A server sends another file than it states",
            where=self._where,
            expected=f"{kind} {stated.content}",
            found=f"{kind} {found}",
            next_step="run the same command again: a part was kept of what the server sent before, "
            "and is not any more"
            if self._had
            else "read the model from another server (HF_ENDPOINT, if it is set, names a mirror); "
            "nothing of the file is kept",
        )

    def drop_unproved(self) -> None:
        """Let all go that came and was not compared with what its server states."""
        with self._lock:
            if self._stated is not None and self._hash is not None:
                self._drop(self._stated)

    def _drop(self, stated: RemoteFile) -> None:
        """Begin anew, with the lock held."""
        self._pieces.drop(self._key)
        self._known.clear()
        self._hash, self._hashed_nbytes, self._came_nbytes = stated.new_hash(), 0, 0
        self._drops += 1

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
        drops = self._drops
        data = self._fetch(piece.start_byte, piece.stop_byte)
        self._pieces.put(self._key, piece.start_byte, data)
        with self._lock:
            if self._drops != drops and self._stated is not None:
                self._drop(self._stated)  # it was on its way when all else was let go
            elif not piece.came:
                piece.came = True
                self._came_nbytes += piece.nbytes

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
