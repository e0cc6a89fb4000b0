"""The files of a checkpoint at an address, as everything above reads them.

What was told to be read (`expect`) is fetched ahead, in order, a few requests at once; anything
else is fetched when it is read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Set
from functools import partial
from pathlib import Path

from mergepipe_pipeline.errors import CheckpointChangedError, CorruptionError, RemoteError
from mergepipe_pipeline.remote.address import BUCKETS, HUB, Address
from mergepipe_pipeline.remote.bucket import Bucket
from mergepipe_pipeline.remote.downloads import DownloadedFile, Piece
from mergepipe_pipeline.remote.egress import coalesced
from mergepipe_pipeline.remote.fetch import WANTED
from mergepipe_pipeline.remote.listing import changed, failures_named, saved
from mergepipe_pipeline.remote.servers import PINS
from mergepipe_pipeline.storage.side_files import pieces
from mergepipe_pipeline.storage.source import CheckpointSource, FileRange, Reading

#: Bytes of a source that are fetched before they are read.
_AHEAD_NBYTES = 64 << 20


class RemoteSource(CheckpointSource):
    """A checkpoint at an address. Safe for several threads.

    Its files are those that were listed when somebody looked for the checkpoint: a read of another
    state of a file raises CheckpointChangedError.
    """

    is_far = True

    def __init__(self, root: str, reading: Reading = "ahead") -> None:
        """`root` is an address. Raises RemoteError."""
        self._root = root
        self._pinned = PINS.of(root)
        self._listing = self._pinned.listing
        self._lock = threading.Lock()
        self._expected: deque[tuple[DownloadedFile, Piece]] = deque()
        self._ahead_nbytes = 0
        WANTED.open()
        self._is_open = True

    @property
    def paths(self) -> Set[str]:
        """All files, in whatever folder."""
        return self._listing.files.keys()

    def list(self, folder: str = "") -> list[str]:
        """Names of what there is at the top, or in a folder there, sorted."""
        above = f"{folder}/" if folder else ""
        below = (p.removeprefix(above) for p in self._listing.files if p.startswith(above))
        return sorted({path.partition("/")[0] for path in below})

    def size(self, path: str) -> int:
        """Size in bytes. Raises CheckpointError if the file is not there."""
        return self._listing.file(path).nbytes

    def mtime_ns(self, path: str) -> int:
        """A number that changes with the file's tag. Raises CheckpointError if it is not there."""
        return self._listing.stamp_ns(self._listing.file(path))

    def read_into(self, path: str, start_byte: int, buffer: memoryview) -> None:
        """Fill `buffer` from `start_byte`.

        Raises CheckpointChangedError for another file than was listed, RemoteError naming file,
        range, status and attempts.
        """
        file = self._listing.file(path)
        if start_byte + len(buffer) > file.nbytes:
            raise changed(self._root, file, f"a wish for byte {start_byte + len(buffer)}")
        if not len(buffer):
            return
        try:
            self._pinned.file(path).read_into(start_byte, buffer)
        except CheckpointChangedError:
            PINS.forget(self._root)
            raise

    def will_need(self, path: str, start_byte: int, nbytes: int) -> None:
        """Begin to fetch these bytes."""
        if nbytes:
            self._pinned.file(path).begin(start_byte, start_byte + nbytes)

    def expect(self, ranges: Iterable[FileRange]) -> None:
        """Fetch these ranges ahead of their reading, in this order, neighbours in one request."""
        for path, start, stop in coalesced(ranges):
            file = self._pinned.file(path)
            pieces = file.expect(start, stop)
            with self._lock:
                self._expected.extend((file, piece) for piece in pieces)
        self._fetch_ahead()

    def close(self) -> None:
        """Let go what nobody will read; when all sources are closed, requests under way end."""
        with self._lock:
            self._expected.clear()
            was_open, self._is_open = self._is_open, False
        if was_open:
            WANTED.close()

    def _fetch_ahead(self, read_nbytes: int = 0) -> None:
        """Begin with what is expected next, as far as it may be ahead."""
        begun = []
        with self._lock:
            self._ahead_nbytes -= read_nbytes
            while self._expected and self._ahead_nbytes < _AHEAD_NBYTES:
                file, piece = self._expected.popleft()
                if piece.done is None:  # or a reader was there first
                    piece.on_read = partial(self._fetch_ahead, piece.nbytes)
                    self._ahead_nbytes += piece.nbytes
                    begun.append((file, piece))
        for file, piece in begun:
            file.submit(piece)


class _HubFolder:
    """The files of a repository at the commit that its revision was when they were listed.

    They come as those of models do, compared with what the hub states of them. Methods mean what
    those of `Bucket` do.
    """

    def __init__(self, address: Address) -> None:
        with failures_named(address.text):
            self._source = RemoteSource(PINS.renewed(address).listing.root)
        self._where, self._names = address.text, self._source.paths

    def names(self, below: str) -> list[str]:
        return sorted(name for name in self._names if name.startswith(f"{below}/"))

    def read(self, name: str, most_nbytes: int) -> bytes | None:
        if name not in self._names:
            return None
        nbytes = self._source.size(name)
        if nbytes > most_nbytes:
            raise self._other(name, f"at most {most_nbytes} bytes", f"{nbytes} bytes")
        return self._source.read_range(name, 0, nbytes)

    def download(
        self, name: str, path: Path, sha256: str, nbytes: int, advance: Callable[[int], None]
    ) -> bool:
        if name not in self._names:
            return False
        if (size := self._source.size(name)) != nbytes:
            raise self._other(name, f"{nbytes} bytes", f"{size} bytes")
        self._source.expect([FileRange(name, 0, nbytes)])
        found = saved(path, pieces(self._source, name, nbytes, lambda piece: None), advance)
        if found != sha256:
            raise self._other(name, f"sha256 {sha256[:16]}", f"sha256 {found[:16]}")
        return True

    def _other(self, name: str, expected: str, found: str) -> CorruptionError:
        return CorruptionError(
            "A file of the hub is not what was put there",
            where=f"{self._where}, {name}",
            expected=expected,
            found=found,
            next_step="push it again",
        )


#: Files by path below an address. Methods raise RemoteError.
Folder = Bucket | _HubFolder


def folder_at(address: Address) -> Folder:
    """The files at the address of a bucket or of the hub. Raises RemoteError for another."""
    if address.scheme == HUB:
        return _HubFolder(address)
    if address.scheme in BUCKETS:
        return Bucket(address)
    raise RemoteError(
        "Files cannot be listed there",
        where=address.text,
        expected=f"hf://org/model, or a bucket: {', '.join(f'{s}://' for s in BUCKETS)}",
        found=f"{address.scheme}://",
        next_step="choose another address",
    )
