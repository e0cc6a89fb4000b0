"""Recipes of several stages: each a merge whose result a later one takes as a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from mergepipe_pipeline.errors import CheckpointError, RecipeError
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.execution.stages import plan_in_stages
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import resolve
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run, tensors


def first(family: Path) -> str:
    return f"""\
merge_method: ties
base_model: {family / "base"}
models:
- {{model: {family / "expert_00"}, parameters: {{weight: 1.0, density: 0.4}}}}
- {{model: {family / "expert_01"}, parameters: {{weight: 0.5, density: 0.4}}}}
"""


def second(family: Path, made: str = "skills", method: str = "task_arithmetic") -> str:
    return f"""\
merge_method: {method}
base_model: {family / "base"}
models:
- {{model: {made}, parameters: {{weight: 0.7}}}}
- {{model: {family / "expert_02"}, parameters: {{weight: 0.3}}}}
"""


def both(family: Path, **given: str) -> str:
    return f"name: skills\n{first(family)}---\n{second(family, **given)}"


def files_under(folder: Path) -> set[Path]:
    return {p for p in folder.rglob("*") if p.is_file()}


def assert_equal(a: str, b: str) -> None:
    ours, theirs = tensors(a), tensors(b)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value.view(torch.int16), theirs[name].view(torch.int16)), name


@pytest.mark.parametrize("method", ["task_arithmetic", "linear", "ties"])
def test_two_stages_give_the_bits_of_two_merges_one_after_the_other(
    home: Warehouse, family: Path, tmp_path: Path, method: str
) -> None:
    at_once = run(home, both(family, method=method))
    others = [Warehouse.at(tmp_path / n).ensure() for n in ("one", "two")]
    skills = run(others[0], first(family))
    by_hand = run(others[1], second(family, made=skills.snapshot.path, method=method))
    assert_equal(at_once.snapshot.path, by_hand.snapshot.path)
    kept = [json.loads((p / "manifest.json").read_text()) for p in home.snapshots.iterdir()]
    assert skills.snapshot.snapshot_id in {p.name for p in home.snapshots.iterdir()}
    assert len(kept) == 2


def test_a_stage_may_be_the_base_of_the_next(home: Warehouse, family: Path, tmp_path: Path) -> None:
    text = second(family).replace(str(family / "base"), "skills")
    text = text.replace("{model: skills", f"{{model: {family / 'expert_03'}")
    outcome = run(home, f"name: skills\n{first(family)}---\n{text}")
    other = Warehouse.at(tmp_path / "other").ensure()
    skills = run(other, first(family)).snapshot.path
    by_hand = run(other, text.replace("base_model: skills", f"base_model: {skills}"))
    assert_equal(outcome.snapshot.path, by_hand.snapshot.path)


def test_three_stages_use_each_other_in_any_order_of_need(home: Warehouse, family: Path) -> None:
    text = f"""\
name: left
{first(family)}---
name: right
{second(family, made="left")}---
merge_method: slerp
base_model: left
models:
- {{model: right}}
parameters: {{t: 0.5}}
"""
    outcome = run(home, text)
    assert len(list(home.snapshots.iterdir())) == 3
    assert outcome.plan.method == "slerp"
    left, right = outcome.plan.sources
    assert str(home.snapshots) in left.root
    assert str(home.snapshots) in right.root


def test_a_second_run_merges_nothing_again(home: Warehouse, family: Path) -> None:
    once, again = run(home, both(family)), run(home, both(family))
    assert again.snapshot.snapshot_id == once.snapshot.snapshot_id
    assert again.plan.plan_id == once.plan.plan_id
    assert again.summary()["layers_executed"] == 0
    assert len(list(home.snapshots.iterdir())) == 2


def test_a_changed_last_stage_leaves_the_layers_of_the_first_as_they_are(
    home: Warehouse, family: Path
) -> None:
    run(home, both(family))
    objects = files_under(home.objects_dir)
    text = both(family).replace("weight: 0.3", "weight: 0.4")
    raw = parse(text, name="t", where="t")
    plan = plan_in_stages(home, raw)
    assert files_under(home.objects_dir) == objects
    run_plan(home, plan)
    assert len(list(home.snapshots.iterdir())) == 3


def test_a_stage_that_was_merged_alone_is_found_again(home: Warehouse, family: Path) -> None:
    alone = run(home, first(family))
    objects = files_under(home.objects_dir)
    plan_in_stages(home, parse(both(family), name="t", where="t"))
    assert files_under(home.objects_dir) == objects
    assert [p.name for p in home.snapshots.iterdir()] == [alone.snapshot.snapshot_id]


def test_check_tells_the_cost_before_any_stage_exists_and_writes_nothing(
    home: Warehouse, family: Path
) -> None:
    checked = resolve(home, parse(both(family), name="t", where="t"))
    assert not files_under(home.root)
    (stage,) = checked.before
    assert stage.cost.tensors == checked.cost.tensors == 20
    assert checked.cost.expert_bytes_total == stage.cost.expert_bytes_total
    outcome = run(home, both(family))
    assert outcome.plan.estimates.expert_bytes_total == checked.cost.expert_bytes_total
    again = resolve(home, parse(both(family), name="t", where="t"))
    assert again.cost.expert_bytes_total == checked.cost.expert_bytes_total


def test_stages_publish_nothing_and_register_no_name(home: Warehouse, family: Path) -> None:
    run(home, both(family))
    assert home.refs.names() == []
    assert set(home.catalog.names()) == {"base", "expert_00", "expert_01", "expert_02"}


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("expert_02", "lost", "neither a registered name nor a path"),
        ("expert_00", "lost", "neither a registered name nor a path"),
        ("density: 0.4", "density: many", "density"),
        ("{weight: 0.3}", "{weigth: 0.3}", "weight"),
        ("model: skills", "model: skill", "neither a registered name nor a path"),
    ],
)
def test_a_problem_in_any_stage_is_told_before_anything_is_written(
    home: Warehouse, family: Path, right: str, wrong: str, message: str
) -> None:
    text = both(family).replace(right, wrong, 1)
    with pytest.raises((CheckpointError, RecipeError), match=message):
        plan_in_stages(home, parse(text, name="t", where="t"))
    assert not files_under(home.root)


def test_problems_of_all_stages_are_told_at_once(home: Warehouse, family: Path) -> None:
    lost = {f"expert_0{i}": f"lost_{i}" for i in range(3)}
    text = f"name: other\n{second(family, made=str(family / 'expert_03'))}---\n{both(family)}"
    for name, other in lost.items():
        text = text.replace(name, other)
    with pytest.raises(RecipeError, match="A recipe has several problems") as caught:
        resolve(home, parse(text, name="t", where="t"))
    problems = caught.value.problems
    # One of them is named in two stages, and told at both lines.
    wrong = ((6, "lost_2"), (12, "lost_0"), (13, "lost_1"), (19, "lost_2"))
    for place, (line, other) in zip(problems, wrong, strict=True):
        assert f"line {line}, " in place
        assert str(family / other) in place


def test_a_stage_that_hides_a_model_is_warned_of(home: Warehouse, family: Path) -> None:
    shutil.copytree(family / "expert_03", home.recipes / "skills")
    raw = parse(both(family), name="t", where="t")
    found = resolve(home, raw, relative_to=home.recipes).recipe.warnings
    assert [w for w in found if w.startswith("the stage 'skills' hides what else is called so")]
    assert not [w for w in resolve(home, raw).recipe.warnings if "hides" in w]


def test_a_stage_has_no_revisions(home: Warehouse, family: Path) -> None:
    raw = parse(both(family, made="skills@1"), name="t", where="t")
    with pytest.raises(CheckpointError, match=r"result of a stage has no revisions.*skills@1"):
        resolve(home, raw)


def test_a_stage_without_a_name_or_used_before_it_is_made_is_refused(family: Path) -> None:
    with pytest.raises(RecipeError, match="needs a `name:`"):
        parse(f"{first(family)}---\n{second(family)}", name="t", where="t")
    turned = f"name: last\n{second(family)}---\nname: skills\n{first(family)}"
    with pytest.raises(RecipeError, match="a stage can use earlier stages only"):
        parse(turned, name="t", where="t")


def test_a_shape_that_does_not_fit_a_stages_result_is_told_before_it_is_made(
    home: Warehouse, family: Path, tmp_path: Path
) -> None:
    from tests.support.family import Size, tensors_of, write_model

    sizes: Size = {"layers": 2, "hidden": 32, "vocab": 512}
    narrow = write_model(tmp_path / "narrow", tensors_of(0, None, **sizes), **sizes)
    text = both(family).replace(str(family / "expert_02"), str(narrow))
    with pytest.raises(RecipeError, match="do not fit"):
        plan_in_stages(home, parse(text, name="t", where="t"))
    assert not files_under(home.root)


def test_slices_of_a_stages_result_are_planned_before_it_exists(
    home: Warehouse, family: Path
) -> None:
    text = f"""\
name: skills
{first(family)}---
merge_method: passthrough
slices:
- sources: [{{model: skills, layer_range: [0, 2]}}]
- sources: [{{model: skills, layer_range: [1, 2]}}]
"""
    checked = resolve(home, parse(text, name="t", where="t"))
    assert checked.cost.layers == 5
    outcome = run(home, text)
    config = json.loads((Path(outcome.snapshot.path) / "config.json").read_text())
    assert config["num_hidden_layers"] == 3
    merged = tensors(outcome.snapshot.path)
    for n in ("self_attn.q_proj", "mlp.up_proj"):
        assert torch.equal(
            merged[f"model.layers.1.{n}.weight"], merged[f"model.layers.2.{n}.weight"]
        )


def first_stages(family: Path, tmp_path: Path) -> dict[str, str]:
    """First stages that change a config, each called `skills`."""
    from tests.support.family import tensors_of, write_model

    wider = tensors_of(0, 5, vocab=520)
    wider["lm_head.weight"] = wider["model.embed_tokens.weight"] * 2
    write_model(tmp_path / "wider", wider, vocab=520)
    config = json.loads((tmp_path / "wider" / "config.json").read_text())
    config |= {"tie_word_embeddings": False, "layer_types": ["full", "sliding"]}
    (tmp_path / "wider" / "config.json").write_text(json.dumps(config))
    source = f"merge_method: passthrough\nslices:\n- sources: [{{model: {tmp_path / 'wider'}, "
    return {
        "layers": source + "layer_range: [1, 2]}]\n",
        "more layers": f"{source}layer_range: [0, 2]}}]\n"
        f"- sources: [{{model: {tmp_path / 'wider'}, layer_range: [1, 2]}}]\n",
        "vocabulary": "merge_method: passthrough\n"
        f"models: [{{model: {family / 'expert_00'}}}]\n"
        "tokenizer: {source: union, pad_to_multiple_of: 100}\n",
        "tied": f"merge_method: linear\nmodels: [{{model: {family / 'base'}}}, "
        f"{{model: {tmp_path / 'wider'}}}]\nparameters: {{weight: 1}}\n",
        "chat template": first(family) + "chat_template: chatml\n",
    }


@pytest.mark.parametrize("case", ["layers", "more layers", "vocabulary", "tied", "chat template"])
def test_later_stages_see_the_config_that_an_earlier_one_will_have(
    home: Warehouse, family: Path, tmp_path: Path, case: str
) -> None:
    text = first_stages(family, tmp_path)[case]
    second = "---\nmerge_method: passthrough\nmodels: [{model: skills}]\nchat_template: auto\n"
    raw = parse(f"name: skills\n{text}{second}", name="t", where="t")
    checked = resolve(home, raw)
    (stage,), (model,) = checked.before, checked.models
    assert stage.side.config or case == "chat template"
    seen = json.loads(model.checkpoint.config or "")
    made = Path(run(home, text).snapshot.path)
    config = json.loads((made / "config.json").read_text())
    assert seen == config | {"torch_dtype": seen["torch_dtype"]}
    files = model.checkpoint.tokenizer_files
    for name, data in (files or {}).items():
        assert (made / name).read_bytes() == data
    assert files is not None or case not in ("vocabulary", "chat template")


def test_a_budget_holds_for_every_stage(home: Warehouse, family: Path) -> None:
    outcome = run(home, both(family) + "budget: 25%\n")
    for path in home.plans.iterdir():
        estimates = json.loads(path.read_text().splitlines()[0])["estimates"]
        assert estimates["expert_bytes_planned"] <= estimates["budget_bytes"]
        assert estimates["budget_bytes"] == estimates["expert_bytes_total"] // 4
    assert outcome.summary()["expert_bytes_read"] <= outcome.summary()["budget_bytes"]


def test_the_budget_given_to_the_verb_holds_for_every_stage(home: Warehouse, family: Path) -> None:
    run(home, both(family), budget="25%")
    for path in home.plans.iterdir():
        estimates = json.loads(path.read_text().splitlines()[0])["estimates"]
        assert estimates["budget_bytes"] == estimates["expert_bytes_total"] // 4


def test_a_result_that_was_removed_is_made_again_from_its_objects(
    home: Warehouse, family: Path
) -> None:
    once = run(home, both(family))
    for path in home.snapshots.iterdir():
        path.chmod(0o755)
        shutil.rmtree(path)
    again = run(home, both(family))
    assert again.snapshot.snapshot_id == once.snapshot.snapshot_id
    assert again.summary()["layers_executed"] == 0
