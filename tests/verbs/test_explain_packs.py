"""Explanations, curves and comparisons of plans that read packs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.errors import NotFoundError
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.text import size
from mergepipe_pipeline.verbs.check import check
from mergepipe_pipeline.verbs.compare import full_plan_id
from mergepipe_pipeline.verbs.curve import curve, curve_of_plan
from mergepipe_pipeline.verbs.explain import explain, level_shares, read_shares
from mergepipe_pipeline.verbs.replay import replay
from mergepipe_pipeline.warehouse import Warehouse
from tests.planner.test_level_promises import UNPACKED, home, inputs_of, recipe

__all__ = ["home"]

RAW = recipe("task_arithmetic", [0, 1, UNPACKED], {}, weight=0.4)


@pytest.fixture(scope="module")
def plan(home: Warehouse) -> MergePlan:
    return make_plan(home, RAW, budget="20%")


def test_every_byte_of_a_plan_stands_at_its_level_and_its_expert(plan: MergePlan) -> None:
    levels = {x.level: x for x in level_shares(plan)}
    assert {"L1", "L2"} & set(levels)
    assert sum(x.nbytes for x in levels.values()) == plan.estimates.expert_bytes_planned
    stored = levels["stored"].nbytes if "stored" in levels else 0
    assert stored == plan.estimates.expert_bytes_planned - plan.estimates.expert_bytes_packed
    by_expert = {s.expert: s for s in read_shares(plan, "expert")}
    assert by_expert[f"e{UNPACKED}"].nbytes_packed == 0
    assert by_expert["e0"].nbytes_packed == by_expert["e0"].nbytes_read > 0
    assert sum(s.nbytes_packed for s in by_expert.values()) == plan.estimates.expert_bytes_packed


def test_a_snapshot_whose_plan_reads_other_bytes_by_now_is_told(home: Warehouse) -> None:
    merged = run_plan(home, make_plan(home, RAW, budget="80%"))
    packed, snapshot_id = merged.plan.estimates, merged.snapshot.snapshot_id
    assert packed.expert_bytes_packed > 0
    assert explain(home, snapshot_id).warnings == []
    again = make_plan(home, RAW, no_packs=True)
    assert again.plan_id == merged.plan.plan_id
    (told,) = explain(home, snapshot_id).warnings
    assert size(packed.expert_bytes_planned) in told
    assert size(packed.expert_bytes_packed) in told
    assert explain(home, again.plan_id).warnings == []


def test_the_curve_draws_packs_beside_blocks_and_below_them(home: Warehouse) -> None:
    raw = recipe("task_arithmetic", [0, 1, 2], {}, weight=0.4)
    plan = make_plan(home, raw, budget="20%")
    told = curve(home, raw, budget="20%").curve
    assert told.best == "packs"
    assert told.knee is not None
    assert told.knee.strategy == "packs"
    errors = {p.strategy: p.error for p in told.points if p.budget_bytes == told.nbytes_total // 10}
    assert errors.keys() == {"packs", "magnitude"}
    assert errors["packs"] < 0.8 * errors["magnitude"]
    assert told.chosen.nbytes == plan.estimates.expert_bytes_planned
    assert told.chosen.error == pytest.approx(plan.estimates.predicted_error)
    of_plan = curve_of_plan(home, plan)
    assert of_plan is not None
    assert [p.nbytes for p in of_plan.curve.points] == [p.nbytes for p in told.points]
    without = curve(home, raw, budget="20%", no_packs=True).curve
    assert {p.strategy for p in without.points} == {"magnitude"}


def test_check_says_what_an_exact_merge_reads_with_packs(home: Warehouse) -> None:
    (packed,) = check(home, RAW).packed
    assert packed is not None
    assert packed.experts == 2
    planned = make_plan(home, RAW).estimates.expert_bytes_planned
    assert packed.exact_nbytes == pytest.approx(planned, rel=0.01)
    assert check(home, RAW, no_packs=True).packed == (None,)


def test_a_plan_that_approximates_belongs_to_the_full_merge_that_it_approximates(
    home: Warehouse, plan: MergePlan
) -> None:
    assert any(e.packed and e.packed.approximate for e in inputs_of(plan))
    assert full_plan_id(plan) == make_plan(home, RAW).plan_id


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_a_merge_of_approximated_experts_is_made_again_from_packs_made_again(
    home: Warehouse, method: str
) -> None:
    own = {"weight": 0.4} | ({"density": 0.5} if method == "ties" else {})
    raw = recipe(method, [0, 2, UNPACKED], {}, **own)
    made = run_plan(home, make_plan(home, raw, budget="20%", block_elems=8192))
    assert made.plan.estimates.error_bound != 0
    assert replay(home, made.snapshot.snapshot_id).snapshot_id == made.snapshot.snapshot_id


def test_a_plan_whose_packs_are_gone_is_told_to_be_packed_again(
    home: Warehouse, plan: MergePlan, tmp_path: Path
) -> None:
    copy = Warehouse.at(shutil.copytree(home.root, tmp_path / "home"))
    shutil.rmtree(copy.packs_dir)
    with pytest.raises(NotFoundError, match="pack the experts again"):
        curve_of_plan(copy, plan)
