"""The files at an address at one moment, the protocol of its server, and its failures."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mergepipe_pipeline.digest import digest_json, new_hash
from mergepipe_pipeline.errors import (
    CheckpointChangedError,
    CheckpointError,
    MergePipeError,
    RemoteError,
)
from mergepipe_pipeline.progress import Advance
from mergepipe_pipeline.remote.address import Address
from mergepipe_pipeline.secrets import discreet

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


@dataclass(frozen=True, slots=True)
class OutgoingFile:
    """One file of a model folder: its name there, its digest and size, and its path or bytes."""

    name: str
    sha256: str
    nbytes: int
    content: Path | bytes


def saved(path: Path, pieces: Iterable[bytes | memoryview], advance: Advance) -> str:
    """The SHA-256 of the pieces of a file, which `path` gets as they come."""
    running = new_hash()
    with path.open("wb") as file:
        for piece in pieces:
            running.update(piece)
            file.write(piece)
            advance(len(piece))
    return running.hexdigest()


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
        """The name of a file's bytes, here and in no other server, by content or place and tag."""
        if file.content:
            return digest_json(["content", self.origin, file.content, file.nbytes])[:32]
        place = [self.origin, self.address.folder.text, file.path]
        return digest_json([*place, file.nbytes, file.tag])[:32]

    def stamp_ns(self, file: RemoteFile) -> int:
        """A number in place of the time of the last change: 62 bits of the key."""
        return int(self.key(file)[:16], 16) >> 2


class Site(Protocol):
    """The server of one address. Safe for several threads."""

    def listing(self) -> Listing:
        """List the files of this moment. Raises RemoteError."""
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
    """The tag that tells states of a file apart: its ETag, or else the time of its last change.

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


_CODE = re.compile(r"<Code>(?P<code>[^<]*)</Code>(?:\s*<Message>(?P<message>[^<]*)</Message>)?")
_STATUS = re.compile(r"status code: (?P<status>\d{3}[^:<\n]*)")
_ANY_STATUS = re.compile(r"\b([1-5][0-9][0-9]) [A-Z]|status(?: code)?:? ([1-5][0-9][0-9])")
_LONGEST = 300
#: The packages whose exceptions are failures of servers, or of the way to them.
_CLIENTS = frozenset({"obstore", "huggingface_hub", "httpx", "httpx2", "httpcore", "hf_xet"})
#: What S3 says of credentials for a time, with status 400.
_OUTDATED = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired"})
#: Statuses of requests that may be sent again as they are.
_MOMENTARY = (408, 425, 429)
_NEXT = {
    "refused": "check the credentials, and that they may write and read there",
    "unable": "choose a bucket of a server that knows conditional writes (`If-None-Match: *`)",
    "rejected": "mend what it names, and run the same command again; what was done is kept",
    "missing": "check the address; a bucket must be there before anything is put into it",
    "failed": "check the network and the address, and run the same command again; what was done "
    "is kept",
}


@contextmanager
def failures_named(where: str) -> Iterator[None]:
    """Raise RemoteError, saying `where`, for what clients of buckets and of the hub raise."""
    try:
        yield
    except MergePipeError:
        raise
    except RequestError as error:  # of what watches the hub's client
        found = f"{error.reason} ({error.status})"
        raise RemoteError(
            "A server cannot be reached, or fails",
            where=where,
            found=found,
            next_step=_NEXT["failed"],
        ) from error
    except JSONDecodeError as error:
        raise no_hub(where, error) from error
    except Exception as error:
        if not (_is_of_client(error) or isinstance(error, OSError)):
            raise
        kind, what = _kind(error)
        raise RemoteError(what, where=where, found=said(error), next_step=_NEXT[kind]) from error


def said(error: BaseException) -> str:
    """The words of a server or a client, in a line."""
    first_line(error)  # takes secrets out of it
    text, reason = str(error), getattr(error, "server_message", None)  # of the hub's client
    if reason:
        line = first_line(error)
        return line if reason in line else f"{line} {' '.join(reason.split())}"[:_LONGEST]
    status, code = _STATUS.search(text), _CODE.search(text)
    parts = [status["status"].strip()] if status else []
    parts += [": ".join(filter(None, (code["code"], code["message"])))] if code else []
    return ", ".join(parts)[:_LONGEST] or first_line(error)


def no_hub(where: str, error: Exception) -> RemoteError:
    """The error for an answer that is not what the hub's client expects."""
    return RemoteError(
        "The answers of a server are not those of the hub",
        where=where,
        expected="the hub, or a mirror of it",
        found=f"{type(error).__name__}: {first_line(error)}",
        next_step="check HF_ENDPOINT, and whether a proxy or a page to log in answers instead",
    )


def first_line(error: BaseException) -> str:
    """The first line of what a client says: further ones repeat it for its developers.

    What it says loses the secrets of addresses, also for those to whom the error itself is told.
    """
    error.args = tuple(discreet(a) if isinstance(a, str) else a for a in error.args)
    lines = (line.strip() for line in str(error).splitlines() if line.strip())
    return next(lines, type(error).__name__)[:_LONGEST]


def status_in(error: BaseException) -> str:
    """The HTTP status in the words of a client of buckets; "" without one."""
    match = _ANY_STATUS.search(str(error))
    return (match[1] or match[2]) if match else ""


def _is_of_client(error: BaseException) -> bool:
    return any(c.__module__.partition(".")[0] in _CLIENTS for c in type(error).__mro__)


def _kind(error: BaseException) -> tuple[str, str]:
    name, text = type(error).__name__, str(error)
    status = getattr(getattr(error, "response", None), "status_code", None)
    code = _CODE.search(text)
    if (
        name in ("PermissionDeniedError", "UnauthenticatedError")
        or status in (401, 403)
        or status_in(error) in ("401", "403")
        or (code and code["code"] in _OUTDATED)
    ):
        return "refused", "A server refuses"
    if "501 Not Implemented" in text:
        return "unable", "A server cannot do what writing needs"
    # Of the hub's client, and of obstore.
    if status == 404 or (isinstance(error, FileNotFoundError) and "status code" in text):
        return "missing", "There is no such place on a server"
    if status is not None and 400 <= status < 500 and status not in _MOMENTARY:
        return "rejected", "A server refuses what it is sent"
    return "failed", "A server cannot be reached, or fails"
