"""The Sequencer's laws: the ordered step happens in order, and a cancelled one holds nobody."""

from __future__ import annotations

from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.concurrency.workers import Sequencer


@given(order=st.permutations(range(6)))
def test_the_step_is_done_in_the_order_of_the_parts_whoever_comes_first(order: list[int]) -> None:
    sequencer, done = Sequencer(), []

    def work(part: int) -> None:
        sequencer.wait(10 * part)
        done.append(part)
        sequencer.advance(10 * part + 10)

    with ThreadPoolExecutor(len(order)) as pool:
        list(pool.map(work, order))
    assert done == sorted(order)


def test_whoever_waits_is_let_go_when_the_range_is_cancelled() -> None:
    sequencer = Sequencer(5)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(sequencer.wait, part) for part in (6, 7)]
        sequencer.wait(5)
        sequencer.cancel()
        for future in waiting:
            with pytest.raises(CancelledError):
                future.result(timeout=10)
