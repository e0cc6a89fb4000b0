"""Prefetching: loads come in order, each once, and not earlier than asked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.concurrency.workers import prefetch


@given(count=st.integers(0, 20))
def test_results_come_in_order_and_only_the_next_load_runs_early(count: int) -> None:
    started: list[int] = []

    def load(n: int) -> int:
        started.append(n)
        return n

    found = []
    for load_it in prefetch(partial(load, n) for n in range(count)):
        found.append(load_it())
        assert len(started) <= len(found) + 1
    assert found == started == list(range(count))


def test_what_a_load_raises_reaches_who_calls_it() -> None:
    def fail() -> int:
        raise OSError("no such file")

    loads: list[Callable[[], int]] = [lambda: 1, fail, lambda: 3]
    known = prefetch(loads)
    assert next(known)() == 1
    with pytest.raises(OSError, match="no such file"):
        next(known)()
    assert next(known)() == 3


def test_what_nobody_asks_for_is_left() -> None:
    started: list[int] = []
    known = prefetch(partial(started.append, n) for n in range(10))
    next(known)
    known.close()  # type: ignore[attr-defined]
    assert len(started) <= 2
