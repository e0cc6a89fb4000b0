"""Work begun while the work before it is made use of: in one thread, a step ahead or more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def begun(loads: Iterable[Callable[[], T]], steps: int = 1) -> Iterator[Callable[[], T]]:
    """The same loads in order, one after the other begun so many steps before they are given.

    Whoever calls one waits for its result, or gets what it raised.
    """
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(1) as pool:
        try:
            for load in loads:
                waiting.append(pool.submit(load))
                if len(waiting) > steps:
                    yield waiting.popleft().result
            while waiting:
                yield waiting.popleft().result
        finally:
            for future in waiting:
                future.cancel()
