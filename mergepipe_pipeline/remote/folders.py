"""The files at an address, in whatever depth, each taken whole: of a bucket, or of the hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from mergepipe_pipeline.digest import new_hash
from mergepipe_pipeline.errors import CorruptionError, RemoteError
from mergepipe_pipeline.remote.address import BUCKETS, HUB, Address
from mergepipe_pipeline.remote.bucket import Bucket
from mergepipe_pipeline.remote.failures import failures_named
from mergepipe_pipeline.remote.sites import PINS
from mergepipe_pipeline.remote.source import RemoteSource
from mergepipe_pipeline.storage.side_files import pieces
from mergepipe_pipeline.storage.source import FileRange


class Folder(Protocol):
    """Files by path below an address. Methods raise RemoteError."""

    def names(self, below: str) -> list[str]:
        """The paths of all files below a folder, sorted."""
        ...

    def read(self, name: str, most_nbytes: int) -> bytes | None:
        """The content of a small file; None without one. Raises CorruptionError for more bytes."""
        ...

    def download(
        self, name: str, path: Path, sha256: str, nbytes: int, advance: Callable[[int], None]
    ) -> bool:
        """Write a file to `path`; False if it is not there.

        Raises CorruptionError for one of another size or digest.
        """
        ...


def folder_at(address: Address) -> Folder:
    """The files at the address of a bucket or of the hub. Raises RemoteError for another."""
    if address.scheme == HUB:
        return _HubFolder(address)
    if address.scheme in BUCKETS:
        return _BucketFolder(address)
    raise RemoteError(
        "Files cannot be listed there",
        where=address.text,
        expected=f"hf://org/model, or a bucket: {', '.join(f'{s}://' for s in BUCKETS)}",
        found=f"{address.scheme}://",
        next_step="choose another address",
    )


class _BucketFolder:
    def __init__(self, address: Address) -> None:
        self._bucket = Bucket(address)

    def names(self, below: str) -> list[str]:
        return sorted(e.key for e in self._bucket.entries(below))

    def read(self, name: str, most_nbytes: int) -> bytes | None:
        return self._bucket.read(name, most_nbytes)

    def download(
        self, name: str, path: Path, sha256: str, nbytes: int, advance: Callable[[int], None]
    ) -> bool:
        return self._bucket.download(name, path, sha256, advance, nbytes=nbytes)


class _HubFolder:
    """The files of a repository at the commit that its revision was when they were listed.

    They come as those of models do, compared with what the hub states of them.
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
        running = new_hash()
        self._source.expect([FileRange(name, 0, nbytes)])
        with path.open("wb") as file:
            for piece in pieces(self._source, name, nbytes, running.update):
                file.write(piece)
                advance(len(piece))
        if (found := running.hexdigest()) != sha256:
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
