"""Worker threads: bounded work ahead, results in order, and the first error in order is raised."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Condition
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class TaskQueue(Generic[R]):
    """Tasks that run in worker threads; their results are taken in the order they were put."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._futures: deque[Future[R]] = deque()

    def __len__(self) -> int:
        """Tasks whose results are not taken, whether they run, wait or are done."""
        return len(self._futures)

    def put(self, task: Callable[[], R]) -> None:
        """Give a task to the workers."""
        self._futures.append(self._pool.submit(task))

    def put_result(self, result: R) -> None:
        """Put a result that needs no work, in its place in the order."""
        future: Future[R] = Future()
        future.set_result(result)
        self._futures.append(future)

    def take(self) -> R:
        """Take the first task and wait for it; returns its result or raises its error."""
        return self._futures.popleft().result()

    def ready(self, max_waiting: int) -> Iterator[R]:
        """Take results until at most `max_waiting` tasks are left and the first one still runs."""
        while self._futures and (len(self._futures) > max_waiting or self._futures[0].done()):
            yield self.take()

    def rest(self, max_waiting: int = 0) -> Iterator[R]:
        """Take results until at most `max_waiting` tasks are left."""
        while len(self._futures) > max_waiting:
            yield self.take()

    def cancel(self) -> None:
        """Forget all tasks; those that have not started never run."""
        while self._futures:
            self._futures.popleft().cancel()


class Workers:
    """Threads for one kind of work; a context manager that ends them.

    Leaving it waits for the tasks that run and cancels those that have not started; with
    `finish_all` it runs them too.
    """

    def __init__(self, threads: int, *, finish_all: bool = False) -> None:
        self._threads, self._finish_all = threads, finish_all
        self._pool = ThreadPoolExecutor(threads)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads, as leaving does."""
        self._pool.shutdown(cancel_futures=not self._finish_all)

    def queue(self) -> TaskQueue[R]:
        """A queue of tasks for these threads."""
        return TaskQueue(self._pool)

    def map(
        self,
        function: Callable[[T], R],
        items: Iterable[T],
        *,
        depth: int | None = None,
        on_cancel: Callable[[T], None] | None = None,
    ) -> Generator[R]:
        """`function(item)` of each item, in order; the next ones are worked on meanwhile.

        Args:
            depth: items under way at most, counting results that are not taken (None: all).
            on_cancel: called with each item whose result will not be taken, so that one which
                waits for another can end.

        Raises the first error in the order of items, one of `items` itself in its place. Then, and
        when the caller stops early, items that have not started are cancelled.
        """
        source, failure = iter(items), None
        queue: TaskQueue[R] = self.queue()
        under_way: deque[T] = deque()
        try:
            while failure is None:
                try:
                    item = next(source)
                except StopIteration:
                    break
                except Exception as error:
                    failure = error
                    break
                under_way.append(item)
                queue.put(partial(function, item))
                if len(queue) == depth:
                    under_way.popleft()
                    yield queue.take()
            while queue:
                under_way.popleft()
                yield queue.take()
            if failure is not None:
                raise failure
        finally:
            queue.cancel()
            if on_cancel:
                for item in under_way:
                    on_cancel(item)


def lookahead(items: Iterable[T], count: int) -> Iterator[tuple[T, list[T]]]:
    """Items in order, each with the items first seen since the one before it.

    `count` items after the one that is given have been seen. Every item is seen once, so that a
    caller can announce it to the disk before its own turn.
    """
    waiting: deque[T] = deque()
    seen: list[T] = []
    for item in items:
        waiting.append(item)
        seen.append(item)
        if len(waiting) > count:
            yield waiting.popleft(), seen
            seen = []
    for item in waiting:
        yield item, seen
        seen = []


class Sequencer:
    """The progress in one range of elements, of which only the next part may do the ordered step.

    What threads touch between `wait` and `advance` needs no lock. Whoever starts the threads must
    call `cancel` when one of them fails, because the threads behind it would wait forever.
    """

    def __init__(self, start_elem: int = 0) -> None:
        self._changed = Condition()
        self._done_elem, self._is_cancelled = start_elem, False

    def wait(self, start_elem: int) -> None:
        """Return when every element before `start_elem` is done. Raises CancelledError."""
        with self._changed:
            self._changed.wait_for(lambda: self._done_elem == start_elem or self._is_cancelled)
            if self._is_cancelled:
                raise CancelledError

    def advance(self, stop_elem: int) -> None:
        """Say that every element before `stop_elem` is done."""
        with self._changed:
            self._done_elem = stop_elem
            self._changed.notify_all()

    def cancel(self) -> None:
        """End the waiting of all threads with CancelledError."""
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()


class FreeList(Generic[T]):
    """Gives out a free thing or makes one; safe for several threads.

    It makes as many as are in use at once. `max_free` of those given back are kept (None: all).
    """

    def __init__(self, make: Callable[[], T], max_free: int | None = None) -> None:
        self._make = make
        self._free: deque[T] = deque(maxlen=max_free)  # its ends are safe without a lock

    def __len__(self) -> int:
        """The number that is free."""
        return len(self._free)

    def take(self) -> T:
        """A thing that nobody else has until it is given back."""
        try:
            return self._free.pop()
        except IndexError:
            return self._make()

    def give_back(self, thing: T) -> None:
        """Make a thing free for the next caller."""
        self._free.append(thing)

    @contextmanager
    def lent(self) -> Iterator[T]:
        """One thing for the time of a `with` block."""
        thing = self.take()
        try:
            yield thing
        finally:
            self.give_back(thing)
