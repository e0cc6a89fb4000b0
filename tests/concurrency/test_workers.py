"""The laws of bounded work ahead: order, depth, the first error, and nothing left behind."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from time import sleep

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.concurrency.workers import (
    FreeList,
    Sequencer,
    TaskQueue,
    Workers,
    lookahead,
)
from tests.support.laws import examples

#: How long each item of a map takes, in units too short to matter and long enough to reorder.
PACES = st.lists(st.integers(0, 3), max_size=12)
QUICK = settings(max_examples=examples(40), deadline=None)


def pause(pace: int) -> None:
    if pace:
        sleep(pace * 2e-4)


@QUICK
@given(paces=PACES, threads=st.integers(1, 4), depth=st.none() | st.integers(1, 6))
def test_results_come_in_order_and_at_most_depth_items_are_under_way(
    paces: list[int], threads: int, depth: int | None
) -> None:
    drawn: list[int] = []

    def items() -> Iterator[int]:
        for n in range(len(paces)):
            drawn.append(n)
            yield n

    def work(n: int) -> int:
        pause(paces[n])
        return n * n

    taken = []
    with Workers(threads) as workers:
        for result in workers.map(work, items(), depth=depth):
            taken.append(result)
            assert depth is None or len(drawn) - len(taken) < depth
    assert taken == [n * n for n in range(len(paces))]


@QUICK
@given(paces=PACES, failing=st.sets(st.integers(0, 11)), depth=st.integers(1, 6))
def test_the_first_error_in_order_is_raised_and_every_later_item_is_cancelled(
    paces: list[int], failing: set[int], depth: int
) -> None:
    failing = {n for n in failing if n < len(paces)}
    drawn: list[int] = []
    taken: list[int] = []
    cancelled: list[int] = []

    def items() -> Iterator[int]:
        for n in range(len(paces)):
            drawn.append(n)
            yield n

    def work(n: int) -> int:
        pause(paces[n])
        if n in failing:
            raise OSError(f"item {n}")
        return n

    def take_all() -> None:
        with Workers(3) as workers:
            found = workers.map(work, items(), depth=depth, on_cancel=cancelled.append)
            taken.extend(iter(lambda: next(found, -1), -1))

    if not failing:
        take_all()
        assert (taken, cancelled) == (list(range(len(paces))), [])
        return
    with pytest.raises(OSError, match=f"item {min(failing)}$"):
        take_all()
    assert taken == list(range(min(failing)))
    assert cancelled == drawn[min(failing) + 1 :]


def test_an_error_of_the_items_comes_after_the_results_before_it() -> None:
    def items() -> Iterator[int]:
        yield from (1, 2)
        raise OSError("no third item")

    with Workers(1) as workers:
        found = workers.map(abs, items(), depth=5)
        assert [next(found), next(found)] == [1, 2]
        with pytest.raises(OSError, match="no third item"):
            next(found)


def test_a_caller_that_stops_early_leaves_no_thread_and_no_work_that_has_not_started() -> None:
    before, started, let_go = set(threading.enumerate()), [], threading.Event()

    def work(n: int) -> int:
        started.append(n)
        if n:
            let_go.wait(10)
        return n

    with Workers(1) as workers:
        found = workers.map(work, range(100), depth=10)
        assert next(found) == 0
        found.close()
        let_go.set()
    assert set(started) <= {0, 1}
    assert set(threading.enumerate()) == before


def test_an_item_that_waits_for_a_failed_one_is_let_go() -> None:
    sequencer = Sequencer()

    def work(n: int) -> None:
        if n == 0:
            raise OSError("first")
        sequencer.wait(n)  # item 0 never advances

    with Workers(3) as workers:
        found = workers.map(work, range(3), depth=3, on_cancel=lambda _: sequencer.cancel())
        with pytest.raises(OSError, match="first"):
            next(found)
    with pytest.raises(CancelledError):
        sequencer.wait(1)


def test_a_taken_result_is_held_by_nobody_else() -> None:
    class Result:
        pass

    with Workers(1) as workers:
        found = workers.map(lambda _: Result(), range(3), depth=1)
        result = weakref.ref(next(found))
        next(found)
        gc.collect()
        assert result() is None


def test_a_queue_gives_what_is_ready_and_keeps_its_order() -> None:
    let_go = threading.Event()
    with Workers(1) as workers:
        queue: TaskQueue[int] = workers.queue()
        queue.put_result(0)
        queue.put(lambda: 1 if let_go.wait(10) else -1)
        queue.put_result(2)
        assert list(queue.ready(max_waiting=2)) == [0]
        let_go.set()
        assert list(queue.ready(max_waiting=1)) == [1, 2]
        assert len(queue) == 0


@pytest.mark.parametrize("finish_all", [False, True])
def test_what_is_queued_runs_after_the_end_only_where_all_must_finish(finish_all: bool) -> None:
    started, let_go, done = threading.Event(), threading.Event(), list[bool]()

    def first() -> None:
        started.set()
        done.append(let_go.wait(10))

    with Workers(1, finish_all=finish_all) as workers:
        queue: TaskQueue[None] = workers.queue()
        queue.put(first)
        queue.put(lambda: done.append(True))
        started.wait(10)
        threading.Timer(0.02, let_go.set).start()
    assert len(done) == 1 + finish_all


@given(count=st.integers(0, 20), ahead=st.integers(0, 5))
def test_each_item_is_seen_once_and_as_far_ahead_as_asked(count: int, ahead: int) -> None:
    seen: list[int] = []
    for item, new in lookahead(range(count), ahead):
        seen += new
        assert seen == list(range(min(count, item + ahead + 1)))
    assert len(seen) == count


def test_a_free_list_lends_each_thing_once_at_a_time_and_keeps_no_more_than_told() -> None:
    free: FreeList[list[int]] = FreeList(list, max_free=1)
    with free.lent() as first, free.lent() as second:
        assert first is not second
    assert len(free) == 1
    assert free.take() is first
