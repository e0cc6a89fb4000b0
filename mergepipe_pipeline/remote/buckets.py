"""Buckets: `s3://`, `gs://` and `az://`, through obstore."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from mergepipe_pipeline.errors import RemoteError
from mergepipe_pipeline.remote.address import Address
from mergepipe_pipeline.remote.clients import TIMEOUT_S, bucket_origin, bucket_store, need
from mergepipe_pipeline.remote.failures import first_line
from mergepipe_pipeline.remote.listing import (
    Listing,
    RemoteFile,
    RequestError,
    changed,
    listed_tag,
    tag_of,
)
from mergepipe_pipeline.remote.traffic import METER, Traffic

#: Chunks are handed on as they come: what waits for more would be lost with the connection.
_CHUNK_NBYTES = 1
_STATUS = re.compile(r"\b([1-5][0-9][0-9]) [A-Z]|status(?: code)?:? ([1-5][0-9][0-9])")


class BucketSite:
    """The files below a prefix, or one file. Objects are immutable, so ETags pin them."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def listing(self) -> Listing:
        """One listing of the prefix gives names, sizes and ETags. Raises RemoteError."""
        METER.count(self._address.text, Traffic(requests=1))
        store = bucket_store(self._address.folder, timeout_s=TIMEOUT_S)
        try:
            objects: list[Any] = list(need("obstore").list_with_delimiter(store)["objects"])
        except Exception as error:
            raise refused(error, self._address.text) from error
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


def refused(error: Exception, where: str) -> RemoteError:
    """What obstore raised, as an error for people."""
    status, kind = _status(error), type(error).__name__
    is_closed = status in ("401", "403") or kind in (
        "PermissionDeniedError",
        "UnauthenticatedError",
    )
    return RemoteError(
        "A bucket refuses access" if is_closed else "A bucket does not answer as it should",
        where=where,
        expected="a bucket that may be read",
        found=f"{kind}: {first_line(error)}",
        next_step="check the environment variables of its credentials"
        if is_closed
        else "check the address, the endpoint and the network, then run the same command again",
    )


def _failed(error: Exception) -> RequestError:
    status, kind = _status(error), type(error).__name__
    is_final = kind in ("PermissionDeniedError", "UnauthenticatedError", "NotSupportedError")
    if status[:1] == "4" and status not in ("408", "425", "429"):
        is_final = True
    return RequestError(first_line(error), status or kind, retries=not is_final)


def _status(error: Exception) -> str:
    match = _STATUS.search(str(error))
    return (match[1] or match[2]) if match else ""


def _told(meta: Any) -> tuple[str | None, datetime]:
    return meta["e_tag"], meta["last_modified"]
