"""Explanations against the plans and files they are of."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.domain.plan_json import plan_from_json
from mergepipe_pipeline.errors import CorruptionError, NotFoundError
from mergepipe_pipeline.execution import lookup
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.report.explain_tables import (
    block_records,
    blocks_picture,
    bytes_picture,
    contribution_records,
    contributions_picture,
    expert_records,
    snapshot_records,
)
from mergepipe_pipeline.report.shares import shares
from mergepipe_pipeline.report.stories import explain_expert, explain_snapshot, explain_tensor
from mergepipe_pipeline.verbs.compare import compare
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run, tensors
from tests.lab.bench.baselines import BASELINES
from tests.support.reads import tensor_reads
from tests.verbs.test_curve import raw_of

pytestmark = pytest.mark.usefixtures("baselines")

Text = Callable[..., str]
UP = "model.layers.1.mlp.up_proj.weight"
EMBED = "model.embed_tokens.weight"
WEIGHTS = (1.0, 0.5, 0.25, 0.75)
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("strategy", ["conflict_aware", "magnitude", "hash", "drop-experts"])
def test_blocks_that_are_told_to_be_bought_are_those_the_plan_reads(
    home: Warehouse, recipe_text: Text, strategy: str
) -> None:
    plan = make_plan(home, raw_of(recipe_text()), budget="35%", strategy=strategy)
    for layer in plan.layers:
        for task in layer.tasks[::5]:
            story = explain_tensor(home, plan.plan_id, task.name)
            assert (story.layer, story.task, story.is_current) == (layer.name, task, True)
            for number, expert in enumerate(task.experts):
                mine = [b for b in story.blocks if b.expert == expert.position]
                assert sum(b.nbytes for b in mine) == expert.view.nbytes
                assert sum(b.nbytes for b in mine if b.is_read) == expert.read_nbytes
                assert story.experts[expert.position] == f"expert_{number:02d}"


def test_zero_blocks_and_wishes_are_told_as_such(home: Warehouse, recipe_text: Text) -> None:
    wishes = (
        "budget: {limit: 60%, pin: [{experts: ['*expert_03'], tensors: ['*up_proj*']}], "
        "exclude: [{experts: ['*expert_00']}], keep: ['*.norm.weight']}\nblock_size: 4096"
    )
    plan = make_plan(home, raw_of(recipe_text(extra=wishes)))
    story = explain_tensor(home, plan.plan_id, UP)
    reasons = {r["expert"]: r["reasons"] for r in expert_records(story)}
    assert reasons["expert_00"] == {"excluded": 2}
    assert reasons["expert_03"] == {"pinned": 2}
    kept = explain_tensor(home, plan.plan_id, "model.norm.weight")
    assert (kept.blocks, kept.task.reason) == ((), "kept by the recipe")


def test_a_block_changes_the_result_by_what_its_delta_weighs(
    home: Warehouse, family: Path, recipe_text: Text
) -> None:
    text = recipe_text("task_arithmetic", parameters="{normalize: false}", extra="block_size: 4096")
    story = explain_tensor(home, make_plan(home, raw_of(text)).plan_id, UP)
    base = tensors(family / "base")[UP].double().flatten().numpy()
    for b in story.blocks:
        theirs = tensors(family / f"expert_{b.expert:02d}")[UP].double().flatten().numpy()
        delta = (theirs - base)[b.block * 4096 : (b.block + 1) * 4096]
        wanted = WEIGHTS[b.expert] * np.linalg.norm(delta)
        assert b.change == pytest.approx(wanted, rel=1e-6)
    assert len(block_records(story)) == len(story.blocks) == 8


def test_a_recipe_file_can_be_asked_about_a_tensor(
    home: Warehouse, tmp_path: Path, recipe_text: Text
) -> None:
    (tmp_path / "r.yml").write_text(recipe_text(extra="budget: 30%"))
    story = explain_tensor(home, str(tmp_path / "r.yml"), EMBED)
    assert story.plan.estimates.budget_bytes is not None
    assert blocks_picture(story).startswith(PNG)


def test_unknown_tensors_are_told_with_the_nearest_names(
    home: Warehouse, recipe_text: Text
) -> None:
    plan = make_plan(home, raw_of(recipe_text()))
    with pytest.raises(NotFoundError, match=rf"No output tensor.*{UP}"):
        explain_tensor(home, plan.plan_id, UP.removesuffix(".weight"))


def test_a_plan_of_other_statistics_is_told_as_such(
    home: Warehouse, recipe_text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(home, raw_of(recipe_text()), budget="35%", strategy="magnitude")
    from mergepipe_pipeline.planner import strategies

    monkeypatch.setitem(strategies.STRATEGIES, "magnitude", BASELINES["hash"])
    assert not explain_tensor(home, plan.plan_id, UP).is_current


def test_what_an_expert_contributed_is_its_bytes_and_sq_norm_per_layer(
    home: Warehouse, family: Path, recipe_text: Text
) -> None:
    text = recipe_text("task_arithmetic", parameters="{normalize: false}", extra="block_size: 4096")
    done = run(home, text, budget="50%")
    story = explain_expert(home, "expert_02")
    assert story.plan == done.plan
    found = {c.layer: c for c in story.contributions}
    by_layer = {s.place: s for s in shares(done.plan, "layer") if s.expert == "expert_02"}
    base, mine = tensors(family / "base"), tensors(family / "expert_02")
    for layer in done.plan.layers:
        c = found[layer.name]
        share = by_layer[layer.name]
        assert (c.nbytes_total, c.nbytes_bought) == (share.nbytes_total, share.nbytes_read)
        sq_norm = bought = 0.0
        for task in layer.tasks:
            delta = 0.25 * (mine[task.name].double() - base[task.name].double()).flatten().numpy()
            sq_norm += float(np.square(delta).sum())
            ranges = task.experts[2].covered
            bought += sum(float(np.square(delta[a:b]).sum()) for a, b in ranges)
        assert c.sq_norm == pytest.approx(sq_norm, rel=1e-6)
        assert c.sq_norm_bought == pytest.approx(bought, rel=1e-6)
        assert c.change == pytest.approx(bought**0.5, rel=1e-6)
    parts = [r["part"] for r in contribution_records(story.contributions)]
    assert all(0 <= part <= 1 for part in parts)
    assert contributions_picture(story).startswith(PNG)


def test_every_plan_and_snapshot_with_an_expert_is_listed_with_its_version(
    home: Warehouse, tmp_path: Path, family: Path, recipe_text: Text
) -> None:
    shutil.copytree(family, tmp_path / "models")
    text = recipe_text().replace(str(family), str(tmp_path / "models"))
    first = run(home, text, budget="30%")
    file = tmp_path / "models" / "expert_00" / "model.safetensors"
    changed = tensors(file.parent)
    changed[UP] = changed[UP] + 0.5
    save_file(changed, file, metadata={"format": "pt"})
    second = make_plan(home, raw_of(text), budget="30%")
    found = {(a.kind, a.id): a for a in explain_expert(home, "expert_00").appearances}
    assert {key: a.version for key, a in found.items()} == {
        ("snapshot", first.snapshot.snapshot_id): 1,
        ("plan", first.plan.plan_id): 1,
        ("plan", second.plan_id): 2,
    }
    mine = [s for s in shares(second, "expert") if s.expert == "expert_00"]
    assert found["plan", second.plan_id].nbytes_read == sum(s.nbytes_read for s in mine)
    assert explain_expert(home, "expert_00", second.plan_id).plan == second


def test_a_plan_of_another_version_is_told_and_does_not_hide_the_others(
    home: Warehouse, recipe_text: Text
) -> None:
    old, new = (make_plan(home, raw_of(recipe_text()), budget=b) for b in ("20%", "40%"))
    home.plan_path(old.plan_id).write_text("{}")
    assert [a.id for a in explain_expert(home, "expert_00").appearances] == [new.plan_id]
    with pytest.raises(CorruptionError, match="another form than this version writes"):
        explain_tensor(home, old.plan_id, UP)


def test_only_plans_with_the_expert_are_built_whole(
    home: Warehouse, recipe_text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = {n: make_plan(home, raw_of(recipe_text(experts=n))) for n in (1, 2)}
    built = list[str]()

    def counted(value: dict[str, Any]) -> MergePlan:
        built.append(plan_from_json(value).plan_id)
        return plan_from_json(value)

    monkeypatch.setattr(lookup, "plan_from_json", counted)
    found = explain_expert(home, "expert_01").appearances
    assert [a.id for a in found] == [plans[2].plan_id]
    assert set(built) == {plans[2].plan_id}


def test_an_expert_of_no_plan_and_a_plan_without_the_expert_are_told(
    home: Warehouse, recipe_text: Text
) -> None:
    with pytest.raises(NotFoundError, match="No checkpoint of this name"):
        explain_expert(home, "expert_00")
    with_all = make_plan(home, raw_of(recipe_text()))
    with pytest.raises(NotFoundError, match="No plan or snapshot has this expert"):
        explain_expert(home, "base")
    alone = make_plan(home, raw_of(recipe_text(experts=1)))
    assert with_all != alone
    with pytest.raises(NotFoundError, match=r"does not have the expert.*Expected expert_00"):
        explain_expert(home, "expert_03", alone.plan_id)


def test_a_snapshot_is_held_against_what_was_expected_of_it(
    home: Warehouse, recipe_text: Text
) -> None:
    part, full = run(home, recipe_text(), budget="30%"), run(home, recipe_text())
    before = explain_snapshot(home, part.snapshot.snapshot_id)
    assert (before.comparison, before.is_full) == (None, False)
    assert explain_snapshot(home, full.snapshot.snapshot_id).is_full
    found = compare(home, part.snapshot.snapshot_id)
    story = explain_snapshot(home, part.snapshot.snapshot_id)
    assert story.comparison == found
    figures = {r["figure"]: (r["expected"], r["realised"]) for r in snapshot_records(story)}
    e, realised = part.plan.estimates, part.realised
    assert figures["expert_bytes"] == (e.expert_bytes_planned, realised.expert_bytes_read)
    assert figures["error"] == (e.predicted_error, found.whole.error)
    assert figures["error_bound"] == (e.error_bound, found.whole.error)
    assert figures["update_norm"] == (e.update_norm, found.whole.update)
    assert figures["seconds"] == (None, realised.layers_s)
    home.plan_path(part.plan.plan_id).unlink()
    assert explain_snapshot(home, part.snapshot.snapshot_id).is_full is None


def test_explaining_reads_no_weight(home: Warehouse, recipe_text: Text) -> None:
    done = run(home, recipe_text(), budget="30%")
    with tensor_reads() as reads:
        explain_tensor(home, done.plan.plan_id, UP)
        explain_expert(home, "expert_01")
        explain_snapshot(home, done.snapshot.snapshot_id)
        assert bytes_picture(done.plan).startswith(PNG)
    assert reads.total() == 0
