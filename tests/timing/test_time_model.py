"""Predicted time: exact where it can be said by hand, never less for more work."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.packs.pace import DECODE_EXACT_ELEM_S, DECODE_NEAR_ELEM_S
from mergepipe_pipeline.timing.time_model import Seconds, Work, seconds, total
from tests.support.profiles import ENGINE, GB, PROFILE

NOTHING = Work("ties", 0, 0, 0, 0, 0, 0, 0, has_first_pass=False)


def test_no_work_takes_as_long_as_the_start() -> None:
    assert seconds(NOTHING, PROFILE).total_s == 3


@pytest.mark.parametrize(
    ("work", "part", "expected_s"),
    [
        (replace(NOTHING, cold_nbytes=6 * GB), "reading_s", 6),
        (replace(NOTHING, out_elems=GB, expert_elems=20 * GB), "computing_s", 11),  # on 2 cores
        (replace(NOTHING, exact_elems=10 * GB), "computing_s", 5 * DECODE_EXACT_ELEM_S * GB),
        (replace(NOTHING, near_elems=10 * GB), "computing_s", 5 * DECODE_NEAR_ELEM_S * GB),
        (replace(NOTHING, output_nbytes=4 * GB), "writing_s", 8),
    ],
)
def test_a_merge_takes_what_its_slowest_part_takes(
    work: Work, part: str, expected_s: float
) -> None:
    found = seconds(work, PROFILE)
    assert getattr(found, part) == found.merging_s == pytest.approx(expected_s)
    assert found.total_s == pytest.approx(3 + expected_s)


def test_a_first_pass_reads_before_anything_is_computed() -> None:
    work = replace(NOTHING, cold_nbytes=6 * GB, out_elems=2 * GB, has_first_pass=True)
    assert seconds(work, PROFILE).merging_s == 6 + 2


def test_a_budget_is_planned_by_tensor_and_expert() -> None:
    assert seconds(replace(NOTHING, plan_inputs=1000), PROFILE).planning_s == 2


def test_an_analysis_is_bound_by_disk_or_cores() -> None:
    by_cores = replace(NOTHING, learn_nbytes=4 * GB)
    assert seconds(by_cores, PROFILE).analysis_s == 8
    by_disk = replace(NOTHING, learn_nbytes=4 * GB, learn_cold_nbytes=9 * GB)
    assert seconds(by_disk, PROFILE).analysis_s == 9


def test_stages_follow_each_other_in_one_process() -> None:
    one = seconds(replace(NOTHING, output_nbytes=GB), PROFILE)
    both = total([one, one])
    assert both.start_s == 3
    assert both.total_s == pytest.approx(2 * one.total_s - 3)


def test_the_figures_as_json_have_their_sum_and_every_part() -> None:
    told = seconds(replace(NOTHING, cold_nbytes=GB), PROFILE).to_json()
    assert set(told) == {"total_s", *(f.name for f in fields(Seconds))}
    assert told["total_s"] == 4


AMOUNT = st.integers(0, 10**12)
AMOUNTS = [f.name for f in fields(Work) if f.name not in ("method", "has_first_pass")]
WORK = st.fixed_dictionaries(dict.fromkeys(AMOUNTS, AMOUNT))


@settings(max_examples=50, deadline=None)
@given(WORK, st.sampled_from(AMOUNTS), AMOUNT)
def test_more_work_never_takes_less_time(amounts: dict[str, Any], name: str, more: int) -> None:
    work = replace(NOTHING, **amounts)
    grown = replace(work, **{name: amounts[name] + more})
    assert seconds(grown, PROFILE).total_s >= seconds(work, PROFILE).total_s


@settings(max_examples=50, deadline=None)
@given(WORK, st.integers(2, 64))
def test_more_cores_never_take_longer(amounts: dict[str, Any], cores: int) -> None:
    work, more = replace(NOTHING, **amounts), replace(ENGINE, cores=cores)
    faster = seconds(work, replace(PROFILE, engine=more))
    assert faster.total_s <= seconds(work, PROFILE).total_s


def test_a_method_with_the_kernels_of_another_is_predicted_by_its_figures() -> None:
    engine = replace(ENGINE, methods={"dare_ties": ENGINE.methods["ties"]})
    work = replace(NOTHING, out_elems=GB)
    alike = seconds(replace(work, method="dare_linear"), replace(PROFILE, engine=engine))
    assert alike == seconds(work, PROFILE)


def test_a_method_that_was_not_measured_is_not_guessed() -> None:
    with pytest.raises(KeyError, match="karcher"):
        seconds(replace(NOTHING, method="karcher"), PROFILE)
