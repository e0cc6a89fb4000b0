"""Bytes that are read now and once more soon, kept in memory as far as there is room.

Bytes that do not fit into the page cache would come from the disk again the second time, and
filling the page cache takes more of a core than reading past it.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter

from mergepipe_pipeline.storage.read_batch import ReadBatch
from mergepipe_pipeline.storage.source import LocalSource, RangedFiles, Use
from mergepipe_pipeline.storage.uncached import PAGE_NBYTES, page_aligned

#: Buffers are given away in pieces of this length, used again and again, as fresh pages are slow.
PIECE_NBYTES = 1 << 20
_START = attrgetter("start_byte")


@dataclass(slots=True, eq=False)
class _Piece:
    """Bytes [start, stop) of a file, of which `left` were not read again yet."""

    start_byte: int
    stop_byte: int
    buffer: memoryview
    unread_nbytes: int


class HeldBytes:
    """Buffers for `nbytes` of files that are read twice. Safe for several threads.

    Each has a page more than a piece, so that a piece can lie in its pages as it does in its file.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._n_unused = nbytes // PIECE_NBYTES
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    def buffer(self) -> memoryview | None:
        """A buffer for a piece; None where none is free."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if not self._n_unused:
                return None
            self._n_unused -= 1
        return memoryview(page_aligned(PIECE_NBYTES + PAGE_NBYTES))

    def give_back(self, buffer: memoryview) -> None:
        """Make a buffer free for other pieces."""
        with self._lock:
            self._free.append(buffer)


class HeldFiles:
    """Pieces of one source's files between a `FirstReading` and a `SecondReading`."""

    def __init__(self, held: HeldBytes) -> None:
        self._held = held
        self._pieces: dict[str, list[_Piece]] = {}
        self._lock = threading.Lock()

    def keep(self, path: str, start_byte: int, buffer: memoryview, nbytes: int) -> None:
        """Hold `nbytes` in `buffer`, bytes of a file that are not held yet."""
        piece = _Piece(start_byte, start_byte + nbytes, buffer, nbytes)
        with self._lock:
            pieces = self._pieces.setdefault(path, [])
            pieces.insert(bisect_left(pieces, start_byte, key=_START), piece)

    def held(self, path: str, start_byte: int, stop_byte: int) -> list[_Piece]:
        """The pieces that have some of bytes [start, stop), in order."""
        with self._lock:
            pieces = self._pieces.get(path, [])
            first = bisect_left(pieces, start_byte, key=_START)
            first -= first > 0 and pieces[first - 1].stop_byte > start_byte
            return pieces[first : bisect_left(pieces, stop_byte, key=_START)]

    def forget(self, path: str, piece: _Piece, nbytes: int) -> bool:
        """Count `nbytes` as read again; a piece of which all were is let go.

        False if it was let go before: then the reader may have copied another piece's bytes.
        """
        with self._lock:
            if piece.unread_nbytes <= 0:
                return False
            piece.unread_nbytes -= nbytes
            if piece.unread_nbytes > 0:
                return True
            self._pieces[path].remove(piece)
        self._held.give_back(piece.buffer)
        return True


@dataclass(frozen=True, slots=True)
class _Reading(RangedFiles):
    """Files of which some bytes are held: others come from `source`, as from the files."""

    source: LocalSource
    files: HeldFiles

    def size(self, path: str) -> int:
        """The files' own."""
        return self.source.size(path)

    def mtime_ns(self, path: str) -> int:
        """The files' own."""
        return self.source.mtime_ns(path)

    def read_into(self, path: str, start_byte: int, buffer: memoryview) -> None:
        """Fill `buffer` from `start_byte`. Raises CheckpointChangedError past the end."""
        with ReadBatch() as batch:
            self.put(batch, path, start_byte, buffer)


@dataclass(frozen=True, slots=True)
class FirstReading(_Reading):
    """Holds bytes where there is room, and reads these `past` the page cache."""

    past: LocalSource
    held: HeldBytes

    def will_need(self, path: str, start_byte: int, nbytes: int) -> None:
        """Nothing: that would be through the page cache."""

    def put(self, batch: ReadBatch, path: str, start_byte: int, buffer: memoryview) -> None:
        """Do as `read_into` when the batch runs, and hold a copy if there is room."""
        piece = self._put_held(batch, path, start_byte, len(buffer))
        if piece is None:
            self.source.put(batch, path, start_byte, buffer)
        else:
            batch.copy(piece, buffer)

    def lend(self, batch: ReadBatch, path: str, start_byte: int, nbytes: int, use: Use) -> bool:
        """Let `use` have bytes when the batch has run, and hold them; False if there is no room."""
        return self._put_held(batch, path, start_byte, nbytes, use) is not None

    def _put_held(
        self,
        batch: ReadBatch,
        path: str,
        start_byte: int,
        nbytes: int,
        use: Use = lambda _: None,
    ) -> memoryview | None:
        """Where bytes will lie when the batch has run; held after their `use`, not before.

        Who reads held bytes again lets them go. None where there is no room.
        """
        room = self._room_for(path, start_byte, nbytes)
        if room is None:
            return None
        piece, is_kept = _inside(room, start_byte, nbytes), False

        def keep() -> None:
            nonlocal is_kept
            use(piece)
            self.files.keep(path, start_byte, room, nbytes)
            is_kept = True

        batch.if_it_fails(lambda: None if is_kept else self.held.give_back(room))
        self.past.put(batch, path, start_byte, piece, has_room=True)
        batch.then(keep)
        return piece

    def _room_for(self, path: str, start_byte: int, nbytes: int) -> memoryview | None:
        """A buffer to hold so many bytes in; None where they are held, or no buffer is free."""
        is_held = bool(self.files.held(path, start_byte, start_byte + nbytes))
        return None if is_held or not 0 < nbytes <= PIECE_NBYTES else self.held.buffer()


@dataclass(frozen=True, slots=True)
class SecondReading(_Reading):
    """Reads bytes that are held again, and lets them go."""

    def will_need(self, path: str, start_byte: int, nbytes: int) -> None:
        """Say which of these bytes will be read from the files."""
        for start, stop in self._gaps(path, start_byte, start_byte + nbytes)[1]:
            self.source.will_need(path, start, stop - start)

    def put(self, batch: ReadBatch, path: str, start_byte: int, buffer: memoryview) -> None:
        """Do as `read_into` when the batch runs."""
        stop_byte = start_byte + len(buffer)
        pieces, gaps = self._gaps(path, start_byte, stop_byte)
        for p in pieces:
            a, b = max(p.start_byte, start_byte), min(p.stop_byte, stop_byte)
            out = buffer[a - start_byte : b - start_byte]
            batch.copy(_part(p, a, b), out)
            batch.then(partial(self._let_go, path, p, a, out))
        for a, b in gaps:
            self.source.put(batch, path, a, buffer[a - start_byte : b - start_byte])

    def _let_go(self, path: str, piece: _Piece, start_byte: int, out: memoryview) -> None:
        """Let a piece go, from which `out` was copied; read that if it was let go meanwhile."""
        if not self.files.forget(path, piece, len(out)):
            self.source.read_into(path, start_byte, out)

    def _gaps(
        self, path: str, start_byte: int, stop_byte: int
    ) -> tuple[list[_Piece], list[tuple[int, int]]]:
        """The pieces that have some of bytes [start, stop), and the runs that none has."""
        pieces = self.files.held(path, start_byte, stop_byte)
        edges = [start_byte, *chain(*((p.start_byte, p.stop_byte) for p in pieces)), stop_byte]
        gaps = zip(edges[::2], edges[1::2], strict=True)
        return pieces, [(a, b) for a, b in gaps if a < b]


def _part(piece: _Piece, start_byte: int, stop_byte: int) -> memoryview:
    """Bytes [start, stop) of a file, which a piece has."""
    held = _inside(piece.buffer, piece.start_byte, piece.stop_byte - piece.start_byte)
    return held[start_byte - piece.start_byte : stop_byte - piece.start_byte]


def _inside(buffer: memoryview, start_byte: int, nbytes: int) -> memoryview:
    """Where in a buffer `nbytes` of a file from `start_byte` on lie."""
    lead = start_byte % PAGE_NBYTES
    return buffer[lead : lead + nbytes]
