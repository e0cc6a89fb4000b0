"""Prefetching: the next load runs in a thread while the caller uses the result of this one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from mergepipe_pipeline.concurrency.workers import TaskQueue, Workers

T = TypeVar("T")


def prefetch(loads: Iterable[Callable[[], T]]) -> Iterator[Callable[[], T]]:
    """The same loads in order; while one is used, the next one runs.

    Calling one waits for its result and raises what it raised.
    """
    with Workers(1) as workers:
        queue: TaskQueue[T] = workers.queue()
        for load in loads:
            queue.put(load)
            if len(queue) > 1:
                yield queue.pop()
        while queue:
            yield queue.pop()
