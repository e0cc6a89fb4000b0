"""Predicted time: exact where it can be said by hand, never less for more work."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.pipeline.duration import Seconds, Work, overlapped_s, seconds, total
from mergepipe_pipeline.spec.engine_pace import Flow
from tests.paces import ENGINE, GB, PROFILE

NOTHING = Work("ties", 0, 0, False, 0, 0, 0, False, False, 0, 0, 0, 0, 1)

#: A machine whose reads cost its cores nothing.
CPU_FREE = replace(PROFILE, engine=replace(ENGINE, cold=Flow(GB, 0), past_cache=Flow(2 * GB, 0)))


def test_no_work_takes_as_long_as_start_plan_and_commit() -> None:
    found = seconds(NOTHING, PROFILE)
    assert found.total_s == 3.75
    assert found.merging_s == 0


def test_a_merge_bound_by_the_disk_takes_as_long_as_its_cold_reads() -> None:
    found = seconds(replace(NOTHING, cold_bytes=6 * GB), CPU_FREE)
    assert found.merging_s == pytest.approx(6)
    past_cache = seconds(replace(NOTHING, cold_bytes=6 * GB, passes_cache=True), CPU_FREE)
    assert past_cache.merging_s == pytest.approx(3)


def test_what_is_read_while_planning_goes_on_is_not_waited_for_again() -> None:
    work = replace(NOTHING, cold_bytes=6 * GB, inputs=1000, has_budget=True)
    assert seconds(replace(work, early_bytes=GB), CPU_FREE).merging_s == pytest.approx(5)
    planning_s = seconds(work, CPU_FREE).planning_s
    most = seconds(replace(work, early_bytes=5 * GB), CPU_FREE).merging_s
    assert most == pytest.approx(6 - planning_s)


def test_a_merge_bound_by_the_cores_shares_arithmetic_between_them() -> None:
    found = seconds(replace(NOTHING, elems=GB, expert_elems=20 * GB), PROFILE)
    assert found.merging_s == found.arithmetic_s == 11  # 2 s of output, 20 s of experts


def test_reading_costs_cores_what_it_takes_more_than_from_memory() -> None:
    work = replace(NOTHING, cold_bytes=8 * GB)
    assert seconds(work, PROFILE).arithmetic_s == pytest.approx(1.5)
    assert seconds(replace(work, passes_cache=True), PROFILE).arithmetic_s == 0.5


def test_a_first_pass_reads_and_the_second_computes() -> None:
    work = replace(NOTHING, expert_elems=4 * GB, cold_bytes=8 * GB, has_first_pass=True)
    assert seconds(work, PROFILE).merging_s == 8 + 2 + 1.5


def test_one_worker_does_one_thing_after_the_other() -> None:
    assert overlapped_s(3, 4, cores=2, threads=1) == 7


def test_workers_without_one_of_both_are_as_fast_as_the_other() -> None:
    assert overlapped_s(3, 0, cores=2, threads=3) == pytest.approx(3)
    assert overlapped_s(0, 4, cores=2, threads=3) == pytest.approx(2)
    assert overlapped_s(0, 0, cores=2, threads=3) == 0


def test_two_workers_at_one_disk_and_one_core_of_equal_speed_lose_a_third() -> None:
    # n workers at two equal stations make n / (n + 1) of what one station can.
    assert overlapped_s(2, 2, cores=1, threads=2) == pytest.approx(3)
    assert overlapped_s(2, 2, cores=1, threads=4) == pytest.approx(2.5)


DEMAND = st.just(0.0) | st.floats(1e-6, 1e4)


@settings(max_examples=50, deadline=None)
@given(DEMAND, DEMAND, DEMAND, st.integers(1, 8), st.integers(1, 9))
def test_workers_are_no_faster_for_more_work_and_no_slower_for_more_of_them(
    disk_s: float, cpu_s: float, more_s: float, cores: int, threads: int
) -> None:
    found = overlapped_s(disk_s, cpu_s, cores, threads)
    slack = 1 + 1e-9
    assert max(disk_s, cpu_s / cores) <= found * slack
    assert found <= (disk_s + cpu_s) * slack
    assert found <= overlapped_s(disk_s + more_s, cpu_s, cores, threads) * slack
    assert found <= overlapped_s(disk_s, cpu_s + more_s, cores, threads) * slack
    assert overlapped_s(disk_s, cpu_s, cores, threads + 1) <= found * slack


def test_a_merge_bound_by_its_output_waits_for_the_last_layer_too() -> None:
    found = seconds(replace(NOTHING, output_bytes=4 * GB, layers=4), PROFILE)
    assert (found.hashing_s, found.writing_s, found.merging_s) == (2, 8, 8)
    assert found.commit_s == 2.25


def test_a_budget_adds_to_planning() -> None:
    assert seconds(replace(NOTHING, inputs=1000), PROFILE).planning_s == 1.5
    assert seconds(replace(NOTHING, inputs=1000, has_budget=True), PROFILE).planning_s == 3.5


def test_an_analysis_is_bound_by_disk_or_cores_and_its_facts_come_after() -> None:
    by_cores = replace(NOTHING, analysis_elems=4 * GB, analysis_cold_bytes=0)
    assert seconds(by_cores, PROFILE).analysis_s == 8 + 4
    by_disk = replace(NOTHING, analysis_elems=0, analysis_cold_bytes=5 * GB)
    assert seconds(by_disk, PROFILE).analysis_s == 5
    digests_only = replace(NOTHING, analysis_bytes=8 * GB)
    assert seconds(digests_only, PROFILE).analysis_s == 2


def test_stages_follow_each_other_in_one_process() -> None:
    one = seconds(replace(NOTHING, output_bytes=GB), PROFILE)
    both = total([one, one])
    assert both.start_s == 3
    assert both.total_s == pytest.approx(2 * one.total_s - 3)


def test_the_figures_as_json_have_their_sum_and_every_part() -> None:
    found = seconds(replace(NOTHING, cold_bytes=GB), CPU_FREE)
    told = found.to_json()
    assert set(told) == {"total_s", *(f.name for f in fields(Seconds))}
    assert told["total_s"] == 4.75


AMOUNT = st.integers(0, 10**12)
_FIXED = ("method", "early_bytes", "passes_cache", "has_first_pass", "layers", "analysis_bytes")
GROWING = [f.name for f in fields(Work) if f.name not in _FIXED]


@settings(max_examples=50, deadline=None)
@given(st.fixed_dictionaries(dict.fromkeys(GROWING, AMOUNT)), st.sampled_from(GROWING), AMOUNT)
def test_more_work_never_takes_less_time(amounts: dict[str, int], name: str, more: int) -> None:
    work = replace(NOTHING, **(amounts | {"has_budget": bool(amounts["has_budget"] % 2)}))
    grown = replace(work, **{name: True if name == "has_budget" else amounts[name] + more})
    assert seconds(grown, PROFILE).total_s >= seconds(work, PROFILE).total_s


@settings(max_examples=50, deadline=None)
@given(st.fixed_dictionaries({n: AMOUNT for n in GROWING if n != "has_budget"}))
def test_a_merge_takes_the_longest_of_its_stages_at_least_and_their_sum_at_most(
    amounts: dict[str, int],
) -> None:
    found = seconds(replace(NOTHING, **amounts), PROFILE)
    stages = (found.reading_s, found.arithmetic_s, found.hashing_s, found.writing_s)
    slack = 1 + 1e-9
    assert max(stages) <= found.merging_s * slack
    assert found.merging_s <= sum(stages) * slack


def test_a_method_that_was_not_timed_is_not_guessed() -> None:
    with pytest.raises(KeyError, match="karcher"):
        seconds(replace(NOTHING, method="karcher"), PROFILE)
