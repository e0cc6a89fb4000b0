"""Plain web servers: `http(s)://host/folder`, asked for the names that files of models have."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote

from mergepipe_pipeline.checkpoints.adapter_config import CONFIG as ADAPTER_CONFIG
from mergepipe_pipeline.checkpoints.open_checkpoint import ADAPTER_WEIGHTS, INDEX
from mergepipe_pipeline.errors import RemoteError
from mergepipe_pipeline.remote.address import Address
from mergepipe_pipeline.remote.clients import IN_FLIGHT, TIMEOUT_S, http_library, web_client
from mergepipe_pipeline.remote.fetch import METER, WANTED, Traffic, fetch, tried
from mergepipe_pipeline.remote.listing import (
    Listing,
    RemoteFile,
    RequestError,
    changed,
    first_line,
    listed_tag,
    tag_of,
)
from mergepipe_pipeline.remote.redirects import answer_of
from mergepipe_pipeline.storage.side_files import MAX_JSON_NBYTES, SIDE_NAMES
from mergepipe_pipeline.text import listed, whole_number

_LOG = logging.getLogger("mergepipe")
_SINGLE = "model.safetensors"
#: A server has no list of files: these are asked for. The last two say what is wrong.
_NAMES = (
    INDEX,
    _SINGLE,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    *SIDE_NAMES,
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)")
_MOST_NBYTES = 1 << 63
#: What the hub says beside status 429: nothing is left of an allowance, which begins anew in `t`.
_RATE_LIMIT = re.compile(r"\br=0\s*;\s*t=([0-9]{1,6})\b")
#: Names that a warning tells.
_MOST_NAMED = 3
#: Codings of a body under which its bytes are not those of the file.
_COMPRESSED = frozenset({"gzip", "x-gzip", "deflate", "compress", "br", "zstd"})
#: Statuses after which the same request may succeed.
TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})


class WebSite:
    """A folder of a web server, or one file."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._refused = False
        self._pages: set[str] = set()

    def listing(self) -> Listing:
        """Asks for every name that a model may have, several at once. Raises RemoteError."""
        only = self._address.only
        first, *others = (only,) if only else _NAMES
        # One first: a server that is not there is asked for one file only.
        files = self._found([first]) | self._found(others)
        if INDEX in files and _SINGLE not in files:
            files |= self._found(self._shards(files[INDEX]))
        if not files:
            raise self._nothing()
        if self._pages:
            _LOG.warning(
                "%s gives web pages in place of %s: these files count as not there",
                self._address.text,
                listed(sorted(self._pages), _MOST_NAMED),
            )
        plain = sorted(f.path for f in files.values() if not f.tag.endswith('"'))
        if plain:
            _LOG.warning(
                "%s gives no strong ETag of %s: a change is seen by size and time alone",
                self._address.text,
                listed(plain, _MOST_NAMED),
            )
        return Listing(self._address, self._address.text, files)

    @contextmanager
    def body(self, file: RemoteFile, start_byte: int, stop_byte: int) -> Iterator[Iterator[bytes]]:
        """The bytes [start, stop) by one request."""
        with ranged(
            web_client(),
            self._url(file.path),
            {},
            self._address.text,
            file,
            start_byte,
            stop_byte,
            within_origin=not _is_weights(file.path),
        ) as (headers, chunks):
            _refuse_other_tag(self._address.text, file, headers)
            yield chunks

    def _nothing(self) -> RemoteError:
        found, hint = "none of them", ""
        if self._pages:
            found, hint = "web pages under these names", ". Servers also show a page to log in"
        elif self._refused:
            found, hint = f"{found}, and status 403 (refused)", ", and everybody may read them"
        return RemoteError(
            "Nothing lies at an address",
            where=self._address.text,
            expected=f"{INDEX}, {_SINGLE} or {ADAPTER_WEIGHTS} in this folder",
            found=found,
            next_step=f"check the address: it is that of the folder which holds these files{hint}",
        )

    def _url(self, path: str) -> str:
        folder = self._address.folder
        return f"{folder.scheme}://{folder.place}/{quote(path)}"

    def _found(self, names: Iterable[str]) -> dict[str, RemoteFile]:
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            files = list(pool.map(self._look, names))
        return {file.path: file for file in files if file is not None}

    def _look(self, name: str) -> RemoteFile | None:
        """A file by its head; None if it is not there, or not given. Raises RemoteError."""
        return tried(lambda: self._head(name), self._url(name))

    def _head(self, name: str) -> RemoteFile | None:
        METER.count(self._address.text, Traffic(requests=1))
        http = http_library()
        try:
            with answer_of(
                web_client(),
                "HEAD",
                self._url(name),
                {"Accept-Encoding": "identity"},
                TIMEOUT_S,
                within_origin=not _is_weights(name),
            ) as answer:
                pass
        except (http.HTTPError, http.InvalidURL) as error:
            raise RequestError(first_line(error), type(error).__name__) from error
        if answer.status_code in (403, 404, 410):
            self._refused |= answer.status_code == 403  # buckets say so of what is not there, too
            return None
        if answer.status_code in TEMPORARY:
            raise RequestError(
                answer.reason_phrase,
                str(answer.status_code),
                after_s=asked_s(answer.headers),
            )
        if answer.status_code == 200 and _is_page(answer.headers):
            self._pages.add(name)
            return None
        nbytes = whole_number(answer.headers.get("content-length", ""), _MOST_NBYTES)
        if answer.status_code != 200 or nbytes is None:
            raise RemoteError(
                "A server does not tell of a file what reading it needs",
                where=self._url(name),
                expected="status 200 and Content-Length to HEAD",
                found=f"status {answer.status_code}"
                + ("" if answer.status_code != 200 else " without Content-Length"),
                next_step="download the checkpoint and give its folder",
            )
        return RemoteFile(name, nbytes, listed_tag(*_told(answer.headers), self._url(name)))

    def _shards(self, index: RemoteFile) -> list[str]:
        """The files that an index names; it is judged where it is opened."""
        if index.nbytes > MAX_JSON_NBYTES:
            return []
        listing = Listing(self._address, self._address.text, {index.path: index})
        try:
            WANTED.open()
            weight_map = json.loads(fetch(self, listing, index, 0, index.nbytes))["weight_map"]
            names = {name for name in weight_map.values() if isinstance(name, str)}
        except (ValueError, KeyError, TypeError, AttributeError):
            return []
        finally:
            WANTED.close()
        return sorted(n for n in names if ".." not in n.split("/") and not n.startswith("/"))


def _is_weights(name: str) -> bool:
    """Whether a file may come from another place: what is no weights there is not read as such.

    Any text would be a tokenizer or a template, and end in the model that is made.
    """
    return name.endswith(".safetensors")


def _is_page(headers: Mapping[str, str]) -> bool:
    """Whether an answer is for people, as sites give it in place of what they do not have."""
    return headers.get("content-type", "").lower().startswith("text/html")


@contextmanager
def ranged(
    client: Any,
    url: str,
    headers: Mapping[str, str],
    root: str,
    file: RemoteFile,
    start_byte: int,
    stop_byte: int,
    *,
    given: str | None = None,
    within_origin: bool = False,
) -> Iterator[tuple[Mapping[str, str], Iterator[bytes]]]:
    """Headers and body of one ranged request, at the end of redirects as `answer_of` has them.

    A server that answers with the whole file is refused, unless the whole was asked for. Raises as
    `Site.body`.
    """
    http = http_library()
    asked = {
        **headers,
        "Range": f"bytes={start_byte}-{stop_byte - 1}",
        "Accept-Encoding": "identity",
        **({"If-Match": file.tag} if file.tag.startswith('"') else {}),
    }
    try:
        with answer_of(
            client, "GET", url, asked, TIMEOUT_S, given=given, within_origin=within_origin
        ) as answer:
            _refuse_status(root, file, answer, start_byte, stop_byte)
            yield answer.headers, answer.iter_raw()
    except http.HTTPError as error:
        raise RequestError(first_line(error), type(error).__name__) from error


def _refuse_status(
    root: str, file: RemoteFile, answer: Any, start_byte: int, stop_byte: int
) -> None:
    """Raise for an answer that is not exactly the range that was asked for."""
    status = answer.status_code
    if status == 412:
        raise changed(root, file, "another tag")
    if status in (404, 410):
        raise changed(root, file, "no such file any more")
    if status == 416:
        raise changed(root, file, "a shorter file")
    coding = answer.headers.get("content-encoding", "").lower()
    if status in (200, 206) and coding in _COMPRESSED:
        raise RequestError(
            f"it sends {coding} in place of the file's bytes: download the checkpoint and give "
            "its folder",
            str(status),
            retries=False,
        )
    if status == 206:
        match = _RANGE.fullmatch(answer.headers.get("content-range", ""))
        if match and match[3] not in ("*", str(file.nbytes)):
            raise changed(root, file, f"a file of {match[3]} bytes")
        if not match or (int(match[1]), int(match[2])) != (start_byte, stop_byte - 1):
            raise RequestError(
                f"asked for bytes {start_byte} to {stop_byte}, the server gives "
                + (answer.headers.get("content-range") or "an unknown range"),
                "206",
                retries=False,
            )
        return
    if status == 200:
        if (start_byte, stop_byte) == (0, file.nbytes):
            return
        raise RequestError(
            "it knows no ranges and would send the whole file for each part: download the "
            "checkpoint and give its folder",
            "200",
            retries=False,
        )
    after_s = asked_s(answer.headers)
    reason = f"{status} {answer.reason_phrase}".strip()
    raise RequestError(reason, str(status), retries=status in TEMPORARY, after_s=after_s)


def _refuse_other_tag(root: str, file: RemoteFile, headers: Mapping[str, str]) -> None:
    """Raise CheckpointChangedError if an answer is of another state of the file."""
    tag = tag_of(*_told(headers))
    if tag != file.tag:
        raise changed(root, file, f"the tag {tag}")


def _told(headers: Mapping[str, str]) -> tuple[str | None, datetime | None]:
    return headers.get("etag"), _time(headers.get("last-modified") or "")


def _time(text: str) -> datetime | None:
    """A date as HTTP has it; None for any other text."""
    try:
        found = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def asked_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait: `Retry-After`, a number or a date, or `RateLimit`."""
    text = headers.get("retry-after", "").strip()
    if not text:
        left = _RATE_LIMIT.search(headers.get("ratelimit", ""))
        return float(left[1]) if left else None
    if text.isascii() and text.isdigit():
        return float(text[:10])  # more is never waited for
    date = _time(text)
    return None if date is None else max(0.0, (date - datetime.now(UTC)).total_seconds())
