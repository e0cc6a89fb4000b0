"""Gets a run of bytes however badly a server behaves: again, later, and from the byte reached."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from mergepipe_pipeline.errors import RemoteError
from mergepipe_pipeline.remote.listing import Listing, RemoteFile, RequestError, Site
from mergepipe_pipeline.remote.speed import LEAST_NBYTES, Speed
from mergepipe_pipeline.remote.traffic import METER, Traffic

T = TypeVar("T")
#: Requests in a row without a byte of progress before a run is given up.
ATTEMPTS = 7
#: The same of questions what there is, which come before anything is done.
QUESTIONS = 4
#: Seconds before the second attempt; each further one waits about twice as long, up to the most.
PAUSE_S, MOST_PAUSE_S = 0.25, 20.0
_STEP_S = 0.2
#: The longest wait that a server may ask for.
MOST_ASKED_S = 120.0


class Abandoned(Exception):
    """Nobody waits for the bytes any more."""


class Wanted:
    """Whether any source is open, so that somebody may wait for bytes. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def open(self) -> None:
        """Say that a source is open."""
        with self._lock:
            self._count += 1

    def close(self) -> None:
        """Say that a source is closed."""
        with self._lock:
            self._count -= 1

    @property
    def is_any(self) -> bool:
        """Whether a source is open."""
        return self._count > 0


#: Of the whole process: requests under way end when nobody waits, as after Ctrl-C.
WANTED = Wanted()


def fetch(
    site: Site,
    listing: Listing,
    file: RemoteFile,
    start_byte: int,
    stop_byte: int,
) -> bytearray:
    """The bytes [start, stop) of a file.

    Raises RemoteError naming file, range, status and attempts when the last one fails,
    CheckpointChangedError for another file than was listed, Abandoned if all sources are closed.
    """
    buffer = bytearray(stop_byte - start_byte)
    done = tries = 0
    speed = Speed()
    while done < len(buffer):
        if not WANTED.is_any:
            raise Abandoned
        reached = done
        speed.begin()
        try:
            METER.count(listing.root, Traffic(requests=1))
            with site.body(file, start_byte + done, stop_byte) as chunks:
                for chunk in chunks:
                    METER.count(listing.root, Traffic(nbytes=len(chunk)))
                    if len(chunk) > len(buffer) - done:
                        raise RequestError("more bytes than were asked for", "206")
                    buffer[done : done + len(chunk)] = chunk
                    done += len(chunk)
                    speed.refuse_none(len(chunk))
                    if not WANTED.is_any:
                        raise Abandoned
            if done < len(buffer):
                raise RequestError("the answer ended early", "cut")
        except RequestError as failed:
            tries = 1 if done - reached >= LEAST_NBYTES else tries + 1
            left = f"bytes {start_byte + done} to {stop_byte}"
            where = f"{listing.root}, {file.path}, {left}"
            _wait_or_give_up(failed, tries, "A server did not give a part of a file", where)
    return buffer


def tried(ask: Callable[[], T], where: str) -> T:
    """What a question to a server gives, asked again while that may help. Raises RemoteError."""
    tries = 0
    while True:
        try:
            return ask()
        except RequestError as failed:
            tries += 1
            _wait_or_give_up(failed, tries, "A server does not answer", where, QUESTIONS)


def _wait_or_give_up(
    failed: RequestError, tries: int, what: str, where: str, most: int = ATTEMPTS
) -> None:
    """Wait before the next attempt. Raises RemoteError if there is to be none."""
    asked = failed.after_s or 0.0
    if failed.retries and tries < most and asked <= MOST_ASKED_S:
        # Jitter keeps many readers, whom one failure stopped, from coming back at once.
        pause = min(MOST_PAUSE_S, PAUSE_S * 2 ** (tries - 1)) * random.uniform(0.5, 1.5)
        _sleep(max(asked, pause), only_while_wanted=most == ATTEMPTS)
        return
    raise RemoteError(
        f"{what}: {failed.reason}",
        where=where,
        expected="an answer with what was asked for",
        found=f"status {failed.status} after {tries} {'attempt' if tries == 1 else 'attempts'}"
        + (f", and the wish to wait {asked:.0f} s" if asked > MOST_ASKED_S else ""),
        next_step="run the same command again: what came is kept"
        if failed.retries
        else "check the address, and that its server may be read",
    ) from failed


def _sleep(seconds: float, *, only_while_wanted: bool) -> None:
    """Wait, a little at a time: after Ctrl-C the process ends when its threads do."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0 and (WANTED.is_any or not only_while_wanted):
        time.sleep(min(_STEP_S, left))
