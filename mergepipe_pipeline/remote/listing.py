"""What lies at an address at one moment, and what a server of it must be able to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.errors import CheckpointChangedError, CheckpointError
from mergepipe_pipeline.remote.address import Address


@dataclass(frozen=True)
class RemoteFile:
    """One file as it was listed: `tag` changes with its content.

    `tag` is an ETag, the digest of a blob, or, where a server has neither, the time of the last
    change. `content` says what the bytes are wherever they lie; "" if only place and tag tell.
    """

    path: str
    nbytes: int
    tag: str
    content: str = ""

    @cached_property
    def stamp_ns(self) -> int:
        """What stands for the time of the last change: 62 bits of the tag's digest."""
        return int(digest_json(self.content or self.tag)[:16], 16) >> 2


@dataclass(frozen=True)
class Listing:
    """The files at an address; `root` is the address that gives the same ones again.

    `warnings` say what the server does not tell.
    """

    address: Address
    root: str
    files: Mapping[str, RemoteFile]
    warnings: tuple[str, ...] = ()

    def file(self, path: str) -> RemoteFile:
        """A file by its path below the address. Raises CheckpointError if there is none."""
        if path not in self.files:
            raise CheckpointError(
                "A file of a checkpoint is not there",
                where=f"{self.root}, {path}",
                found="no such file at the address",
                next_step="check the address, or upload the checkpoint again",
            )
        return self.files[path]

    def key(self, file: RemoteFile) -> str:
        """What names a file's bytes in the cache: its content, or its place and tag."""
        if file.content:
            return digest_json(["content", file.content, file.nbytes])[:32]
        place = [self.address.folder.text, file.path]
        return digest_json([*place, file.nbytes, file.tag])[:32]


class Site(Protocol):
    """The server of one address. Safe for several threads."""

    def listing(self) -> Listing:
        """What is there at this moment. Raises RemoteError."""
        ...

    def body(
        self, file: RemoteFile, start_byte: int, stop_byte: int
    ) -> AbstractContextManager[Iterator[bytes | memoryview]]:
        """The bytes [start, stop) by one request, as they come.

        Raises RequestError for what one request did not give, CheckpointChangedError if the file
        is not the one that was listed.
        """
        ...


class RequestError(Exception):
    """One request failed; `retries`: whether another may do better, `after_s` as servers ask.

    `status` is that of HTTP, or a word.
    """

    def __init__(
        self, reason: str, status: str, *, retries: bool = True, after_s: float | None = None
    ) -> None:
        super().__init__(reason)
        self.reason, self.status = reason, status
        self.retries, self.after_s = retries, after_s


def changed(root: str, file: RemoteFile, found: str) -> CheckpointChangedError:
    """The error for a file that is not the one that was listed."""
    return CheckpointChangedError(
        "A file at an address changed while it was read",
        where=f"{root}, {file.path}",
        expected=f"the file of {file.nbytes} bytes with the tag {file.tag}",
        found=found,
        next_step="run the same command again: it starts from the files as they are",
    )
