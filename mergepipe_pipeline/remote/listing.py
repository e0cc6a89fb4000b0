"""What lies at an address at one moment, and what a server of it must be able to do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Protocol

from mergepipe_pipeline.digest import digest_json, new_hash
from mergepipe_pipeline.errors import CheckpointChangedError, CheckpointError, RemoteError
from mergepipe_pipeline.remote.address import Address

if TYPE_CHECKING:
    from hashlib import _Hash

_SHA256_HEX, _BLOB_HEX = 64, 40
#: A time of the last change tells states apart once it is so long ago (RFC 9110, 8.8.2.2).
_SETTLED = timedelta(seconds=60)


@dataclass(frozen=True)
class RemoteFile:
    """One file as it was listed: `tag` changes with its content.

    `tag` is a strong ETag, the digest of a blob, or, where a server has neither, the time of the
    last change. `content` is the digest that the server states of the whole file: SHA-256, or that
    of a git blob; "" if only place and tag tell what the bytes are.
    """

    path: str
    nbytes: int
    tag: str
    content: str = ""

    def new_hash(self) -> _Hash:
        """A fresh hash whose digest over the whole file is `content` if the server is honest."""
        if len(self.content) == _SHA256_HEX:
            return new_hash()
        return hashlib.sha1(b"blob %d\0" % self.nbytes, usedforsecurity=False)


def is_digest(content: object) -> bool:
    """Whether a server states a digest that a file can be compared with."""
    return (
        isinstance(content, str)
        and len(content) in (_SHA256_HEX, _BLOB_HEX)
        and set(content) <= set("0123456789abcdef")
    )


@dataclass(frozen=True)
class Listing:
    """The files at an address; `root` is the address that gives the same ones again.

    `origin` is the server that tells so: what another one tells of the same address is not
    believed for it. Raises RemoteError for names that lead out of the address.
    """

    address: Address
    root: str
    files: Mapping[str, RemoteFile]
    origin: str = ""

    def __post_init__(self) -> None:
        for path in self.files:
            if not _is_plain(path):
                raise RemoteError(
                    "A server names a file that lies in no folder of the address",
                    where=f"{self.root}, {path!r}",
                    expected="a path below the address",
                    found=repr(path),
                    next_step="read the model from another server",
                )

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
        """What names a file's bytes, here and in no other server: its content, or place and tag."""
        if file.content:
            return digest_json(["content", self.origin, file.content, file.nbytes])[:32]
        place = [self.origin, self.address.folder.text, file.path]
        return digest_json([*place, file.nbytes, file.tag])[:32]

    def stamp_ns(self, file: RemoteFile) -> int:
        """What stands for the time of the last change: 62 bits of the key."""
        return int(self.key(file)[:16], 16) >> 2


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


def tag_of(etag: str | None, modified: datetime | None) -> str:
    """What tells the states of a file apart: its ETag, or else the time of its last change.

    A weak ETag (`W/"…"`) promises nothing about bytes and counts as none; "" without both.
    """
    if etag and not etag.upper().startswith("W/"):
        return etag
    return modified.isoformat() if modified else ""


def listed_tag(etag: str | None, modified: datetime | None, where: str) -> str:
    """The tag of a file that is pinned from here on.

    Raises RemoteError without one, and for a change so young that another could have its time.
    """
    tag = tag_of(etag, modified)
    if tag and tag == etag:
        return tag
    if modified is None:
        raise RemoteError(
            "A server tells nothing by which a change of a file could be seen",
            where=where,
            expected="a strong ETag, or Last-Modified",
            found=f"the weak ETag {etag}" if etag else "neither",
            next_step="download the checkpoint and give its folder",
        )
    if datetime.now(UTC) - modified < _SETTLED:
        raise RemoteError(
            "A file changed a moment ago, and its server gives no strong ETag",
            where=where,
            expected=f"a last change at least {_SETTLED.seconds} s ago, by which others are seen",
            found=f"one at {modified:%Y-%m-%d %H:%M:%S} UTC",
            next_step="run the same command again in a minute",
        )
    return tag


def _is_plain(path: str) -> bool:
    return path.isprintable() and not {"", ".", ".."}.intersection(path.split("/"))


def changed(root: str, file: RemoteFile, found: str) -> CheckpointChangedError:
    """The error for a file that is not the one that was listed."""
    return CheckpointChangedError(
        "A file at an address changed while it was read",
        where=f"{root}, {file.path}",
        expected=f"the file of {file.nbytes} bytes with the tag {file.tag}",
        found=found,
        next_step="run the same command again: it starts from the files as they are",
    )
