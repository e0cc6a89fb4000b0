"""What servers and their clients say when something fails, as an error with cause and next step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError

from mergepipe_pipeline.errors import MergePipeError, RemoteError
from mergepipe_pipeline.remote.listing import RequestError
from mergepipe_pipeline.secrets import discreet

_CODE = re.compile(r"<Code>(?P<code>[^<]*)</Code>(?:\s*<Message>(?P<message>[^<]*)</Message>)?")
_STATUS = re.compile(r"status code: (?P<status>\d{3}[^:<\n]*)")
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
    """What a server or a client says, in a line."""
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


def _is_of_client(error: BaseException) -> bool:
    return any(c.__module__.partition(".")[0] in _CLIENTS for c in type(error).__mro__)


def _kind(error: BaseException) -> tuple[str, str]:
    name, text = type(error).__name__, str(error)
    status = getattr(getattr(error, "response", None), "status_code", None)
    code = _CODE.search(text)
    if (
        name in ("PermissionDeniedError", "UnauthenticatedError")
        or status in (401, 403)
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
