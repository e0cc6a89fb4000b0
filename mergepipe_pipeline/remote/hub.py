"""The Hugging Face hub: `hf://org/model@revision`, through huggingface_hub.

Its token, endpoint, cache and offline mode hold. A revision becomes a commit when it is listed, and
commits never change.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from mergepipe_pipeline.errors import RemoteError
from mergepipe_pipeline.remote.address import Address
from mergepipe_pipeline.remote.clients import (
    TIMEOUT_S,
    http_library,
    hub_api,
    hub_endpoint,
    hub_origin,
    hub_session,
    need,
)
from mergepipe_pipeline.remote.fetch import METER, Traffic, tried
from mergepipe_pipeline.remote.listing import (
    Listing,
    RemoteFile,
    RequestError,
    changed,
    first_line,
    is_digest,
    no_hub,
)
from mergepipe_pipeline.remote.redirects import permitted
from mergepipe_pipeline.remote.web import TEMPORARY, asked_s, ranged

#: No file is longer, as the offsets of files are signed numbers of 64 bits.
_MOST_NBYTES = 1 << 63
#: What a signed link says when its time is over.
_EXPIRED = ("400", "401", "403", "410")


@dataclass(frozen=True, slots=True)
class _Link:
    """Where a file's bytes are served, and the headers to ask for them with."""

    url: str
    headers: dict[str, str]


class HubSite:
    """The files of a model at one revision."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._links: dict[str, _Link] = {}
        self._tags: dict[str, str] = {}
        self._lock = threading.Lock()

    def listing(self) -> Listing:
        """One question to the hub: the commit, and names, sizes and digests. Raises RemoteError."""
        where = self._address.text
        info = tried(lambda: self._ask(where), where)
        files = {}
        for s in info.siblings or ():
            digest = s.lfs.sha256 if s.lfs else s.blob_id
            size = s.lfs.size if s.lfs else s.size
            if not is_digest(digest) or type(size) is not int or not 0 <= size < _MOST_NBYTES:
                raise _no_size(where, s.rfilename)
            files[s.rfilename] = RemoteFile(s.rfilename, size, digest, content=digest)
        root = Address(self._address.scheme, self._address.place, info.sha).text
        METER.count(root, Traffic(requests=1))
        return Listing(self._address, root, files, hub_origin())

    @contextmanager
    def body(self, file: RemoteFile, start_byte: int, stop_byte: int) -> Iterator[Iterator[bytes]]:
        """The bytes [start, stop) by one request to where the hub sends readers of the file."""
        link = self._link(file)
        where = self._address.text
        try:
            plain = RemoteFile(file.path, file.nbytes, self._tags.get(file.path, ""))
            with ranged(
                hub_session(),
                link.url,
                link.headers,
                where,
                plain,
                start_byte,
                stop_byte,
                given=self._url(file.path),
            ) as (headers, chunks):
                self._refuse_other_tag(file, headers.get("etag") or "")
                yield chunks
        except RequestError as failed:
            if failed.status in _EXPIRED:
                self._forget(file, link)
                failed.retries = link.url != self._url(file.path)
            raise

    def _ask(self, where: str) -> Any:
        errors = need("huggingface_hub.errors")
        with _failures_named(where):
            try:
                return hub_api().model_info(
                    self._address.place,
                    revision=self._address.revision,
                    files_metadata=True,
                    timeout=TIMEOUT_S,
                )
            except errors.HFValidationError as error:
                raise RemoteError(
                    "An address cannot be read",
                    where=where,
                    expected="a name that the hub gives to models",
                    found=first_line(error),
                    next_step="correct the address",
                ) from error
            except errors.RevisionNotFoundError as error:
                raise RemoteError(
                    "A model of the hub has no such revision",
                    where=where,
                    expected="a branch, a tag or a commit",
                    found=repr(self._address.revision),
                    next_step="correct the revision, or leave it out for the newest",
                ) from error

    def _link(self, file: RemoteFile) -> _Link:
        with self._lock:
            link = self._links.get(file.path)
        if link is None:
            link = self._find(file)
            with self._lock:
                self._links[file.path] = link
        return link

    def _forget(self, file: RemoteFile, link: _Link) -> None:
        """Ask anew where a file is served, unless another request did so already."""
        with self._lock:
            if self._links.get(file.path) is link:
                del self._links[file.path]

    def _find(self, file: RemoteFile) -> _Link:
        """Ask where a file is served, which may be a signed link for an hour."""
        hub, errors = need("huggingface_hub"), need("huggingface_hub.errors")
        METER.count(self._address.text, Traffic(requests=1))
        url = self._url(file.path)
        with _failures_named(self._address.text):
            try:
                metadata = hub.get_hf_file_metadata(url, timeout=TIMEOUT_S, endpoint=hub_endpoint())
            except errors.EntryNotFoundError as error:
                raise changed(self._address.text, file, "no such file any more") from error
        if metadata.commit_hash not in (None, self._address.revision):
            raise changed(self._address.text, file, f"the commit {metadata.commit_hash}")
        if metadata.etag not in (None, file.tag):
            raise changed(self._address.text, file, f"the digest {metadata.etag}")
        location = permitted(url, url, metadata.location)
        headers = hub.utils.build_hf_headers() if gets_token(location, url) else {}
        return _Link(location, headers)

    def _url(self, path: str) -> str:
        url: str = need("huggingface_hub").hf_hub_url(
            self._address.place, path, revision=self._address.revision, endpoint=hub_endpoint()
        )
        return url

    def _refuse_other_tag(self, file: RemoteFile, tag: str) -> None:
        """Raise CheckpointChangedError if another answer had another tag before."""
        with self._lock:
            seen = self._tags.setdefault(file.path, tag)
        if tag != seen:
            raise changed(self._address.text, file, f"the tag {tag}")


def gets_token(location: str, url: str) -> bool:
    """Whether the token for `url` may go to `location`: to the same host, and never in the open."""
    place, asked = urlsplit(location), urlsplit(url)
    return place.netloc == asked.netloc and place.scheme in (asked.scheme, "https")


@contextmanager
def _failures_named(where: str) -> Iterator[None]:
    """Say of one question to the hub why it failed: for good, or so that it is asked again."""
    errors, http = need("huggingface_hub.errors"), http_library()
    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise RemoteError(
            "The hub is not asked in offline mode",
            where=where,
            expected="the model in the hub's cache on this machine",
            found="HF_HUB_OFFLINE is set, and the model is not there, or not whole",
            next_step="unset HF_HUB_OFFLINE, or download the model where the hub can be reached",
        ) from error
    except (errors.GatedRepoError, errors.RepositoryNotFoundError) as error:
        raise _refused(where, error) from error
    except (errors.HfHubHTTPError, http.HTTPError) as error:
        raise _failed(error, where) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise no_hub(where, error) from error


def _failed(error: Exception, where: str) -> RequestError | RemoteError:
    """The error of the hub's client for one question, with the time that the hub asks for."""
    answer = getattr(error, "response", None)
    if answer is None:
        return RequestError(first_line(error), type(error).__name__)
    if answer.status_code in (401, 403):
        return _refused(where, error)
    retries = answer.status_code in TEMPORARY
    after_s = asked_s(answer.headers)
    return RequestError(
        first_line(error), str(answer.status_code), retries=retries, after_s=after_s
    )


def _refused(where: str, error: Exception) -> RemoteError:
    reason = getattr(error, "server_message", None)
    return RemoteError(
        "The hub gives no such model to this user",
        where=where,
        expected="a public model, or one that the token may read",
        found=first_line(error) + (f" {reason}" if reason else ""),
        next_step="check the spelling, and the token: HF_TOKEN if it is set, else log in with "
        "`hf auth login`",
    )


def _no_size(where: str, name: str) -> RemoteError:
    return RemoteError(
        f"The hub does not tell the size and digest of {name}",
        where=where,
        expected="both of each file, as the hub itself tells them",
        found="a mirror that does not",
        next_step="unset HF_ENDPOINT, or download the model and give its folder",
    )
