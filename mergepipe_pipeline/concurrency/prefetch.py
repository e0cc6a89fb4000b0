"""Prefetching: the next loads run in one thread while the caller uses the result of this one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from mergepipe_pipeline.concurrency.workers import TaskQueue, Workers

T = TypeVar("T")


def prefetch(loads: Iterable[Callable[[], T]], depth: int = 1) -> Iterator[Callable[[], T]]:
    """The same loads in order; while one is used, up to `depth` of the next ones run.

    Calling one waits for its result and raises what it raised. The loads run one at a time.
    """
    with Workers(1) as workers:
        queue: TaskQueue[T] = workers.queue()
        for load in loads:
            queue.put(load)
            if len(queue) > depth:
                yield queue.pop()
        while queue:
            yield queue.pop()
