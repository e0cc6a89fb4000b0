"""Buckets (`s3://`, `gs://`, `az://`) through obstore: checkpoints, and folders of objects.

An object is there whole or not at all; a new name is won by one writer. What this program puts
carries the SHA-256 of its content, by which it is known again: what is there with the same digest
is not sent a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergepipe_pipeline.concurrency.workers import Workers
from mergepipe_pipeline.digest import new_hash
from mergepipe_pipeline.errors import CorruptionError, RemoteError, StorageFullError
from mergepipe_pipeline.progress import Advance
from mergepipe_pipeline.remote.address import Address
from mergepipe_pipeline.remote.clients import TIMEOUT_S, bucket_origin, bucket_store, need
from mergepipe_pipeline.remote.fetch import METER, Traffic
from mergepipe_pipeline.remote.listing import (
    Listing,
    RemoteFile,
    RequestError,
    changed,
    failures_named,
    first_line,
    listed_tag,
    saved,
    status_in,
    tag_of,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_DIGEST = "sha256"
#: What is smaller is sent by one request; what is not, in parts of at least so many bytes.
_PART_NBYTES = 8 << 20
_PARTS_AT_ONCE = 4
#: S3 takes at most 10000 parts.
_MOST_PARTS = 9000
#: What servers say when they take no more: Ceph, MinIO, HTTP 507.
_FULL = ("QuotaExceeded", "StorageFull", "507 Insufficient Storage")


@dataclass(frozen=True, slots=True)
class Entry:
    """An object of a bucket: its key below the address, size, ETag, and time in seconds (Unix).

    `sha256` is empty where nobody asked for it, or where it was put by another program.
    """

    key: str
    nbytes: int
    etag: str
    modified_s: float
    sha256: str = ""
    version: str | None = None


@dataclass(frozen=True)
class Bucket:
    """The objects below one address. Methods raise RemoteError, and those that write
    StorageFullError. What fails for the moment is tried again `max_retries` times.
    """

    address: Address
    max_retries: int = 10

    @cached_property
    def _store(self) -> ObjectStore:
        store: ObjectStore = bucket_store(self.address, max_retries=self.max_retries, writing=True)
        return store

    @cached_property
    def _obstore(self) -> Any:
        return need("obstore")

    def where(self, key: str) -> str:
        """The address of an object, for people."""
        return f"{self.address.text}/{key}"

    def find(self, key: str) -> Entry | None:
        """The entry of an object without its content, with its digest; None without an object."""
        with failures_named(self.where(key)):
            try:
                answer = self._obstore.get(self._store, key, options={"head": True})
            except FileNotFoundError:
                return None
            return _entry(answer.meta, answer.attributes.get(_DIGEST, ""))

    def entries(self, below: str = "") -> Iterator[Entry]:
        """All objects whose keys begin with the folder `below`, without their digests."""
        with failures_named(self.where(below)):
            for chunk in self._obstore.list(self._store, prefix=below or None):
                yield from map(_entry, chunk)

    def read(self, key: str, most_nbytes: int) -> bytes | None:
        """The content of a small object; None without one.

        Raises CorruptionError for one of more bytes.
        """
        with failures_named(self.where(key)):
            try:
                answer = self._obstore.get(self._store, key)
            except FileNotFoundError:
                return None
            if (nbytes := answer.meta["size"]) > most_nbytes:
                raise self._other(key, f"at most {most_nbytes} bytes", f"{nbytes} bytes")
            return bytes(answer.bytes())

    def names(self, below: str) -> list[str]:
        """The keys of all objects below a folder, sorted."""
        return sorted(e.key for e in self.entries(below))

    def download(
        self,
        key: str,
        path: Path,
        sha256: str,
        nbytes: int,
        advance: Advance = lambda nbytes: None,
    ) -> bool:
        """Write an object's content to the file `path`; False if there is none.

        A request lasts no longer than its time-out, so that a large object comes by several.
        Raises CorruptionError if it has not `nbytes` bytes, or its digest is not `sha256`.
        """
        if (entry := self.find(key)) is None:
            return False
        if entry.nbytes != nbytes:
            raise self._other(key, f"{nbytes} bytes", f"{entry.nbytes} bytes")

        def piece(start: int) -> memoryview:
            stop = min(start + _PART_NBYTES, nbytes)
            got = self._obstore.get_range(self._store, key, start=start, end=stop)
            return memoryview(got)

        starts = range(0, nbytes, _PART_NBYTES)
        with failures_named(self.where(key)), Workers(_PARTS_AT_ONCE) as workers:
            found = saved(path, workers.map(piece, starts, depth=_PARTS_AT_ONCE), advance)
        if found != sha256:
            raise self._other(key, f"sha256 {sha256[:16]}", f"sha256 {found[:16]}")
        return True

    def _other(self, key: str, expected: str, found: str) -> CorruptionError:
        return CorruptionError(
            "An object of a bucket is not what is expected there",
            where=self.where(key),
            expected=expected,
            found=found,
            next_step="remove it from the bucket; a warehouse that has it puts it again",
        )

    def put(self, key: str, data: bytes, sha256: str = "") -> str:
        """Make an object hold `data`, in place of what it held; gives its ETag."""
        with self._writing(key):
            done = self._obstore.put(
                self._store, key, data, attributes={_DIGEST: sha256}, use_multipart=False
            )
            return str(done["e_tag"] or "")

    def put_file(
        self, key: str, path: Path, sha256: str, advance: Callable[[int], None] | None = None
    ) -> str:
        """Make an object hold a file's bytes; gives its ETag.

        Raises CorruptionError, and puts nothing, if these are not of the digest `sha256`.
        """
        nbytes = path.stat().st_size
        pieces = _pieces(path, sha256, max(_PART_NBYTES, nbytes // _MOST_PARTS), advance)
        if nbytes <= _PART_NBYTES:
            return self.put(key, b"".join(pieces), sha256)
        with self._writing(key):
            done = self._obstore.put(
                self._store,
                key,
                pieces,
                attributes={_DIGEST: sha256},
                chunk_size=max(_PART_NBYTES, nbytes // _MOST_PARTS),
                max_concurrency=_PARTS_AT_ONCE,
            )
            return str(done["e_tag"] or "")

    def create(self, key: str, data: bytes) -> bool:
        """Make an object that is not there yet; False if there is one, which stays as it is."""
        return self.put_if(key, data, "", None)

    def put_if(self, key: str, data: bytes, sha256: str, seen: Entry | None) -> bool:
        """Put an object unless another writer did so since it was `seen` (None: not there).

        False if one did; then nothing is changed.
        """
        known = {"e_tag": seen.etag, "version": seen.version} if seen else {}
        mode = {name: value for name, value in known.items() if value} or "create"
        refused = self._exceptions.AlreadyExistsError, self._exceptions.PreconditionError
        with self._writing(key):
            try:
                self._obstore.put(self._store, key, data, attributes={_DIGEST: sha256}, mode=mode)
            except (*refused, FileNotFoundError):
                return False
            return True

    def remove(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are not there are fine."""
        with self._writing(""):
            for key in keys:
                try:
                    self._obstore.delete(self._store, key)
                except FileNotFoundError:
                    continue

    @cached_property
    def _exceptions(self) -> Any:
        return need("obstore.exceptions")

    @contextmanager
    def _writing(self, key: str) -> Iterator[None]:
        try:
            with failures_named(self.where(key)):
                yield
        except RemoteError as error:
            if not any(word in str(error.__cause__) for word in _FULL):
                raise
            raise StorageFullError(
                "The bucket is full",
                where=self.where(key),
                found=error.found,
                next_step="free space or raise its quota, and run the same command again; what is "
                "there already is not sent again, and nothing here was touched",
            ) from error


def _pieces(
    path: Path, sha256: str, piece_nbytes: int, advance: Callable[[int], None] | None
) -> Iterator[bytes]:
    running = new_hash()
    with path.open("rb") as file:
        piece = file.read(piece_nbytes)
        while piece:
            running.update(piece)
            following = file.read(piece_nbytes)
            if not following and running.hexdigest() != sha256:  # before its last piece is sent
                raise CorruptionError(
                    "A file changed after it was checked",
                    where=str(path),
                    expected=f"sha256 {sha256[:16]}",
                    found=f"sha256 {running.hexdigest()[:16]}",
                    next_step="run `mergepipe verify` to see where, and merge its recipe again",
                )
            yield piece
            if advance:
                advance(len(piece))
            piece = following


def _entry(meta: Any, sha256: str = "") -> Entry:
    return Entry(
        meta["path"],
        meta["size"],
        meta["e_tag"] or "",
        meta["last_modified"].timestamp(),
        sha256,
        meta["version"],
    )


#: Chunks are handed on as they come: what waits for more would be lost with the connection.
_CHUNK_NBYTES = 1


class BucketSite:
    """The files below a prefix, or one file. Objects are immutable, so ETags pin them."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def listing(self) -> Listing:
        """One listing of the prefix gives names, sizes and ETags. Raises RemoteError."""
        METER.count(self._address.text, Traffic(requests=1))
        store = bucket_store(self._address.folder, timeout_s=TIMEOUT_S)
        with failures_named(self._address.text):
            objects: list[Any] = list(need("obstore").list_with_delimiter(store)["objects"])
        only = self._address.only
        files = {
            o["path"]: RemoteFile(
                o["path"], int(o["size"]), listed_tag(*_told(o), self._address.text)
            )
            for o in objects
            if only in (None, o["path"])
        }
        if not files:
            raise RemoteError(
                "Nothing lies at an address",
                where=self._address.text,
                expected="the files of a checkpoint",
                found="no object below this prefix",
                next_step="check the address",
            )
        return Listing(self._address, self._address.text, files, bucket_origin(self._address))

    @contextmanager
    def body(
        self, file: RemoteFile, start_byte: int, stop_byte: int
    ) -> Iterator[Iterator[memoryview]]:
        """The bytes [start, stop) by one request, if the ETag still matches."""
        # `fetch` repeats what fails: it knows which bytes came already.
        store = bucket_store(self._address.folder, max_retries=0, timeout_s=TIMEOUT_S)
        options: dict[str, Any] = {"range": (start_byte, stop_byte)}
        if file.tag.endswith('"'):
            options["if_match"] = file.tag
        try:
            got = need("obstore").get(store, file.path, options=options)
            tag = tag_of(*_told(got.meta))
            if tag != file.tag or got.meta["size"] != file.nbytes:
                raise changed(self._address.text, file, f"the tag {tag}, {got.meta['size']} bytes")
            yield (memoryview(chunk) for chunk in got.stream(min_chunk_size=_CHUNK_NBYTES))
        except FileNotFoundError as error:
            raise changed(self._address.text, file, "no such object any more") from error
        except need("obstore.exceptions").PreconditionError as error:
            raise changed(self._address.text, file, "another tag") from error
        except need("obstore.exceptions").BaseError as error:
            raise _failed(error) from error


def _failed(error: Exception) -> RequestError:
    status, kind = status_in(error), type(error).__name__
    is_final = kind in ("PermissionDeniedError", "UnauthenticatedError", "NotSupportedError")
    if status[:1] == "4" and status not in ("408", "425", "429"):
        is_final = True
    return RequestError(first_line(error), status or kind, retries=not is_final)


def _told(meta: Any) -> tuple[str | None, datetime]:
    return meta["e_tag"], meta["last_modified"]
