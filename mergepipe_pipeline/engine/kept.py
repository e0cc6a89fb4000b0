"""Bytes that were looked at before the merge asks for them: read once, kept till then.

So that a look ahead costs no byte of a budget. Each kept byte stands for one read: what is given
out of memory is forgotten.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from mergepipe_pipeline.storage.source import RangedFiles


@dataclass
class _Piece:
    start_byte: int
    data: bytes
    left_nbytes: int

    @property
    def stop_byte(self) -> int:
        return self.start_byte + len(self.data)


class KeptFiles:
    """Files of one checkpoint, some of whose bytes may be kept. Safe for several threads."""

    def __init__(self, files: RangedFiles) -> None:
        self._files = files
        self._pieces: dict[str, list[_Piece]] = {}
        self._lock = threading.Lock()

    def size(self, path: str) -> int:
        """Size in bytes. Raises CheckpointError if the file is not there."""
        return self._files.size(path)

    def mtime_ns(self, path: str) -> int:
        """Time of last change in nanoseconds. Raises CheckpointError if the file is not there."""
        return self._files.mtime_ns(path)

    def will_need(self, path: str, start_byte: int, nbytes: int) -> None:
        """Say that these bytes will be read soon; a hint without effect on results."""
        self._files.will_need(path, start_byte, nbytes)

    def read_into(self, path: str, start_byte: int, buffer: memoryview) -> None:
        """Fill `buffer` from `start_byte`, from memory what is kept, which is then forgotten.

        Raises CheckpointChangedError past the end.
        """
        for at, part in self._not_kept(path, start_byte, buffer, forget=True):
            self._files.read_into(path, at, part)

    def look_into(self, path: str, start_byte: int, buffer: memoryview) -> None:
        """As `read_into`, but all of it is kept."""
        for at, part in self._not_kept(path, start_byte, buffer, forget=False):
            self._files.read_into(path, at, part)
            with self._lock:
                piece = _Piece(at, bytes(part), len(part))
                self._pieces.setdefault(path, []).append(piece)

    def _not_kept(
        self, path: str, start_byte: int, buffer: memoryview, *, forget: bool
    ) -> list[tuple[int, memoryview]]:
        """Fill in what is kept; gives where the rest begins in the file, and its place."""
        if path not in self._pieces:
            return [(start_byte, buffer)]
        rest, at, stop = [], start_byte, start_byte + len(buffer)
        with self._lock:
            for piece in sorted(self._pieces[path], key=lambda p: p.start_byte):
                a, b = max(at, piece.start_byte), min(stop, piece.stop_byte)
                if a >= b:
                    continue
                if at < a:
                    rest.append((at, buffer[at - start_byte : a - start_byte]))
                buffer[a - start_byte : b - start_byte] = piece.data[
                    a - piece.start_byte : b - piece.start_byte
                ]
                piece.left_nbytes -= (b - a) if forget else 0
                at = b
            self._pieces[path] = [p for p in self._pieces[path] if p.left_nbytes > 0]
        if at < stop:
            rest.append((at, buffer[at - start_byte :]))
        return rest


class Looking(KeptFiles):
    """The same files, to look at: whatever is read is kept for who reads them."""

    def __init__(self, files: KeptFiles) -> None:
        super().__init__(files)
        self._kept = files

    def read_into(self, path: str, start_byte: int, buffer: memoryview) -> None:
        """Fill `buffer` from `start_byte`. Raises CheckpointChangedError past the end."""
        self._kept.look_into(path, start_byte, buffer)
