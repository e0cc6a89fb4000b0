"""Whether bytes come at all: a server that gives one now and then never ends by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from mergepipe_pipeline.remote.listing import RequestError

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


def watched(stream: Any) -> Any:
    """The body of an answer to a client of the hub's library, which ends if it comes too slowly.

    Raises RequestError while it is read, also for JSON of absurd length.
    """
    base = next(c for c in type(stream).__mro__ if c.__name__ == "SyncByteStream")
    return _watched_class(base)(stream)


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
