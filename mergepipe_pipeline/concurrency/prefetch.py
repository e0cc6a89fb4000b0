"""Prefetching: the next loads run in one thread while the caller uses the result of this one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def prefetch(loads: Iterable[Callable[[], T]], depth: int = 1) -> Iterator[Callable[[], T]]:
    """The same loads in order; while one is used, up to `depth` of the next ones run.

    Calling one waits for its result and raises what it raised. The loads run one at a time.
    """
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(1) as pool:
        try:
            for load in loads:
                waiting.append(pool.submit(load))
                if len(waiting) > depth:
                    yield waiting.popleft().result
            while waiting:
                yield waiting.popleft().result
        finally:
            for future in waiting:
                future.cancel()
