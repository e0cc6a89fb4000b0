"""The gate: experts are read inside the plan only, whatever the view, and bytes are counted."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.checkpoints.reader import BlockReader
from mergepipe_pipeline.domain.blocks import total_elems
from mergepipe_pipeline.domain.plan import ExpertInput, MergePlan
from mergepipe_pipeline.domain.view import LowRank
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.engine.sources import SourcePool, access_sets
from mergepipe_pipeline.errors import BudgetError, CheckpointChangedError
from tests.engine.plans import merged
from tests.support.kinds import KINDS, Kinds, make_kinds


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    return make_kinds(tmp_path_factory.mktemp("kinds"), rows=40, cols=25)


def expert_of(plan: MergePlan) -> ExpertInput:
    return plan.layers[0].tasks[0].experts[0]


def sources_of(plan: MergePlan) -> range:
    return range(1, len(plan.sources))


@pytest.mark.parametrize("name", KINDS)
@given(bounds=st.lists(st.integers(0, 250), min_size=4, max_size=4, unique=True).map(sorted))
def test_an_access_set_has_the_stored_elements_of_the_ranges_read(
    kinds: Kinds, name: str, bounds: list[int]
) -> None:
    a, b, c, d = bounds
    whole = kinds.experts[name].view.low_rank is not None
    plan = merged(kinds, [name], "task_arithmetic", reads=[None if whole else ((a, b), (c, d))])
    e = expert_of(plan)
    elems = {
        entry: set[int]().union(*(range(*r) for r in ranges))
        for source in sources_of(plan)
        for entry, ranges in access_sets(plan.layers).get(source, {}).items()
    }
    read = [i for start, stop in e.read for i in range(start, stop)]
    wanted: dict[str, set[int]] = {}
    for i in read if e.view.stored else ():
        run = next((r for r in e.view.runs if r.start_elem <= i < r.start_elem + r.n_elems), None)
        part = e.view.stored[run.part if run else 0]
        at = i - run.start_elem + run.at_elem if run else i
        wanted.setdefault(part.entry.name, set()).add(at)
    if low := e.view.low_rank:
        assert isinstance(low, LowRank)
        wanted |= {p.entry.name: set(range(p.entry.numel)) for p in (low.a, low.b)}
    assert {name: found for name, found in elems.items() if found} == wanted


@pytest.mark.parametrize("name", ["full", "delta", "cropped", "gathered", "short"])
def test_a_read_outside_the_ranges_of_the_plan_is_refused(kinds: Kinds, name: str) -> None:
    plan = merged(kinds, [name], "task_arithmetic", reads=[((100, 200),)])
    ((entry, ranges),) = [
        (part.entry, access_sets(plan.layers)[1][part.entry.name])
        for part in expert_of(plan).view.stored[:1]
    ]
    with SourcePool(plan) as pool:
        for start, stop in ranges:
            pool.expert(1).read(entry, start, stop)
            for outside in ((start - 1, stop), (start, stop + 1), (stop, stop + 1)):
                with pytest.raises(BudgetError, match=rf"{entry.name}.*found \[{outside[0]}"):
                    pool.expert(1).read(entry, *outside)
        allowed = total_elems(ranges) * itemsize(entry.dtype)
        read = pool.read_here()
        assert (read.expert_nbytes, read.base_nbytes) == (allowed, 0)


def test_factors_of_an_adapter_that_was_not_bought_are_refused(kinds: Kinds) -> None:
    plan = merged(kinds, ["low rank"], "task_arithmetic", reads=[()])
    low = expert_of(plan).view.low_rank
    assert isinstance(low, LowRank)
    with SourcePool(plan) as pool:
        for part in (low.a, low.b):
            with pytest.raises(BudgetError, match=r"leave the access set.*elements inside \[\]"):
                pool.expert(1).read(part.entry, 0, 1)


def test_a_tensor_that_no_task_names_is_refused(kinds: Kinds) -> None:
    plan = merged(kinds, ["gathered"], "task_arithmetic", reads=[((0, 25),)])
    run = expert_of(plan).view.runs[0]
    other = expert_of(plan).view.stored[1 - run.part].entry
    with SourcePool(plan) as pool, pytest.raises(BudgetError, match=f"tensor {other.name}"):
        pool.expert(1).read(other, 0, 1)


def test_a_checkpoint_that_is_base_and_expert_is_gated_as_an_expert_alone(kinds: Kinds) -> None:
    plan = merged(kinds, ["full"], "task_arithmetic", reads=[((0, 10),)])
    entry = expert_of(plan).view.stored[0].entry
    with SourcePool(plan) as pool:
        pool.base(1).read(entry, 0, 1000)
        pool.expert(1).read(entry, 0, 10)
        with pytest.raises(BudgetError, match="leave the access set"):
            pool.expert(1).read(entry, 0, 11)
        read = pool.read_here()
        assert (read.expert_nbytes, read.base_nbytes) == (20, 2000)


@pytest.fixture
def plan(tmp_path: Path) -> MergePlan:
    return merged(make_kinds(tmp_path), ["full"], "task_arithmetic")


def test_a_checkpoint_changed_after_planning_is_not_opened(plan: MergePlan) -> None:
    os.utime(plan.sources[1].root, ns=(1, 1))
    with SourcePool(plan) as pool, pytest.raises(CheckpointChangedError, match="after the plan"):
        pool.expert(1)


def test_a_checkpoint_changed_while_it_is_read_is_noticed(plan: MergePlan) -> None:
    with SourcePool(plan) as pool:
        pool.expert(1)
        pool.verify_unchanged()
        os.utime(plan.sources[1].root, ns=(1, 1))
        with pytest.raises(CheckpointChangedError, match="while it was read"):
            pool.verify_unchanged()


def test_a_worker_opens_a_checkpoint_while_others_are_looked_at(
    plan: MergePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SourcePool(plan) as pool:
        pool.expert(1)
        looked_at = BlockReader.verify_unchanged

        def slow(reader: BlockReader) -> None:
            worker = threading.Thread(target=pool.base, args=[0])
            worker.start()
            worker.join(10)
            assert not worker.is_alive()
            looked_at(reader)

        monkeypatch.setattr(BlockReader, "verify_unchanged", slow)
        pool.verify_unchanged()
