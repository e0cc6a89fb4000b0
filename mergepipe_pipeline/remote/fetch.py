"""Gets a run of bytes however badly a server behaves: again, later, from the byte reached."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, TypeVar

from mergepipe_pipeline.errors import RemoteError
from mergepipe_pipeline.remote.listing import Listing, RemoteFile, RequestError, Site

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
    """Ask a server, and again while that may help. Raises RemoteError."""
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


#: Bytes without which an attempt is no progress, and seconds in which so many must come.
LEAST_NBYTES, PATIENCE_S = 64 << 10, 60.0
#: No answer that is not a file is longer.
_MOST_TEXT_NBYTES = 256 << 20


class Speed:
    """Watches the bytes of some requests; the time between them is not counted."""

    def __init__(self) -> None:
        self._nbytes, self._taken_s, self._since_s = 0, 0.0, time.monotonic()

    def begin(self) -> None:
        """A request begins."""
        self._since_s = time.monotonic()

    def refuse_none(self, nbytes: int) -> None:
        """Take bytes that came. Raises RequestError where they come too slowly for good."""
        now_s = time.monotonic()
        self._nbytes += nbytes
        self._taken_s, self._since_s = self._taken_s + now_s - self._since_s, now_s
        if self._nbytes >= LEAST_NBYTES:
            self._nbytes, self._taken_s = 0, 0.0
        elif self._taken_s > PATIENCE_S:
            told = f"it sent {self._nbytes} bytes in {self._taken_s:.0f} s"
            raise RequestError(told, "slow", retries=False)


def watched(stream: Any, library: Any) -> Any:
    """The body of an answer to a client of an HTTP library, which ends if it comes too slowly.

    Raises RequestError while it is read, also for JSON of absurd length.
    """
    return _watched_class(library.SyncByteStream)(stream)


@lru_cache(maxsize=4)
def _watched_class(base: type) -> type:
    """The class of watched bodies, which the library takes for one of its own."""

    class Watched(base):  # type: ignore[misc]
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def __iter__(self) -> Iterator[bytes]:
            speed, left = Speed(), _MOST_TEXT_NBYTES
            for chunk in self._stream:
                speed.refuse_none(len(chunk))
                left -= len(chunk)
                if left < 0:
                    raise RequestError("its answer has no end", "long", retries=False)
                yield chunk

        def close(self) -> None:
            self._stream.close()

    return Watched


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests sent and bytes of bodies that came, those of failed requests among them."""

    requests: int = 0
    nbytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.requests + other.requests, self.nbytes + other.nbytes)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.requests - other.requests, self.nbytes - other.nbytes)


class Meter:
    """Counts the traffic of a process. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_address: dict[str, Traffic] = {}
        self._listeners: list[Callable[[int], None]] = []

    def count(self, address: str, traffic: Traffic) -> None:
        """Add traffic of an address."""
        with self._lock:
            self._by_address[address] = self._by_address.get(address, Traffic()) + traffic
            listeners = tuple(self._listeners)
        for listener in listeners if traffic.nbytes else ():
            listener(traffic.nbytes)

    @property
    def total(self) -> dict[str, Traffic]:
        """All traffic so far, by address."""
        with self._lock:
            return dict(self._by_address)

    def since(self, before: Mapping[str, Traffic]) -> dict[str, dict[str, int]]:
        """The traffic after `before`, as `total` gave it, by address, as JSON."""
        moved = {a: t - before.get(a, Traffic()) for a, t in sorted(self.total.items())}
        return {a: asdict(traffic) for a, traffic in moved.items() if traffic != Traffic()}

    @contextmanager
    def told(self, listener: Callable[[int], None]) -> Iterator[None]:
        """Tell `listener` of the bytes that come meanwhile, in whichever thread they do."""
        with self._lock:
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(listener)


#: Of the whole process, as connections are.
METER = Meter()
