"""What selectors take of a real warehouse, what they leave out, and that ids do not tell."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mergepipe_pipeline.api import Catalog, Planner
from mergepipe_pipeline.errors import CorruptionError, MergePipeError, RecipeError
from mergepipe_pipeline.resolution.recipe_text import load_recipe
from mergepipe_pipeline.verbs.check import check
from mergepipe_pipeline.verbs.curve import curve_of_plan
from mergepipe_pipeline.verbs.ls import query
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.register import quarantine, register, tag
from mergepipe_pipeline.verbs.replay import replay
from mergepipe_pipeline.warehouse import Warehouse

HEAD = "merge_method: {}\nbase_model: base\nparameters: {{weight: 0.3, density: 0.5}}\nmodels:\n"
Write = Callable[..., Path]


@pytest.fixture
def known(home: Warehouse, family: Path) -> Warehouse:
    """A warehouse that knows the family: `base`, and chat-0 to chat-3 against it."""
    register(home, family / "base", "base")
    for i in range(4):
        register(home, family / f"expert_{i:02d}", f"chat-{i}", "base")
    return home


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a recipe of some entries."""

    def file(*entries: str, method: str = "dare_ties", name: str = "r") -> Path:
        path = tmp_path / f"{name}.yml"
        text = HEAD if method != "linear" else HEAD.replace(", density: 0.5", "")
        path.write_text(text.format(method) + "".join(f"- {{{entry}}}\n" for entry in entries))
        return path

    return file


def taken(home: Warehouse, path: Path) -> list[str]:
    return [ref.model for ref in load_recipe(path, home).references if ref.model != "base"]


def left(home: Warehouse, path: Path) -> dict[str, str]:
    return {name: why for s in load_recipe(path, home).selected for name, why in s.left}


def refusal(home: Warehouse, path: Path) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, home)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("method", ["dare_ties", "linear"])
def test_a_recipe_with_a_selector_has_the_ids_of_the_recipe_with_its_models_written_out(
    known: Warehouse, write: Write, method: str
) -> None:
    entries = [f"model: chat-{i}" for i in range(4)]
    named = merge(known, write(*entries, method=method), fresh=True).outcome
    selecting = merge(known, write("match: chat-*", method=method), fresh=True).outcome
    assert selecting.plan.plan_id == named.plan.plan_id
    assert [x.layer_key for x in selecting.plan.layers] == [x.layer_key for x in named.plan.layers]
    assert selecting.snapshot.snapshot_id == named.snapshot.snapshot_id
    assert not named.plan.request.selected
    (selected,) = selecting.plan.request.selected
    assert selected.taken == ("chat-0", "chat-1", "chat-2", "chat-3")


def test_a_merge_says_by_which_selector_each_expert_came_and_is_made_again_by_that(
    known: Warehouse, write: Write, family: Path
) -> None:
    path = write("model: chat-3", "match: chat-*")
    made = merge(known, path).outcome
    register(known, family / "expert_01", "chat-9", "base")
    rows = query(known, "SELECT name, selector FROM snapshot_inputs ORDER BY name")[1]
    by = "models[1]: match chat-*"
    assert rows == [("base", None), *((f"chat-{i}", by) for i in range(3)), ("chat-3", None)]
    assert replay(known, made.snapshot.snapshot_id).snapshot_id == made.snapshot.snapshot_id
    stored = json.loads(made.plan.to_json())["request"]["selected"]
    assert stored[0]["taken"] == ["chat-0", "chat-1", "chat-2"]
    of_plan = curve_of_plan(known, made.plan)
    assert of_plan is not None
    assert of_plan.curve.nbytes_total == made.plan.estimates.expert_bytes_total
    assert taken(known, path)[-1] == "chat-9"


def test_experts_join_and_leave_by_name_tag_base_and_version(
    known: Warehouse, write: Write, family: Path, tmp_path: Path
) -> None:
    register(known, family / "expert_00", "code-0")
    assert taken(known, write("match: chat-*")) == ["chat-0", "chat-1", "chat-2", "chat-3"]
    tag(known, "chat-2", add=["prod"])
    tag(known, "code-0", add=["prod", "old"])
    assert taken(known, write("tag: prod")) == ["chat-2", "code-0"]
    assert taken(known, write("tag: prod, match: chat-*")) == ["chat-2"]
    tag(known, "code-0", remove=["prod"])
    assert taken(known, write("tag: prod")) == ["chat-2"]
    assert taken(known, write("match: '*', base: base, exclude: [chat-1, '*-3']")) == [
        "chat-0",
        "chat-2",
    ]
    assert left(known, write(f"match: '*', base: {family / 'base'}")) == {
        "base": "its base is not registered",
        "code-0": "its base is not registered",
    }
    newer = shutil.copytree(family / "expert_03", tmp_path / "newer")
    register(known, newer, "chat-0")
    path = write("match: chat-*, min_version: 2")
    assert taken(known, path) == ["chat-0"]
    assert left(known, path)["chat-1"] == "it is at version 1"
    assert left(known, write("match: '*', exclude: [chat-*]"))["chat-1"] == "it fits exclude chat-*"


def test_bases_results_and_what_is_gone_never_join(
    known: Warehouse, write: Write, family: Path, tmp_path: Path
) -> None:
    path = write("match: '*'")
    assert left(known, path) == {"base": "it is the recipe's base"}
    by_path = path.read_text().replace("base_model: base", f"base_model: {family / 'base'}")
    path.write_text(by_path)
    assert left(known, path) == {"base": "it is the recipe's base"}
    made = merge(known, write("model: chat-0"), out=tmp_path / "out").outcome.snapshot
    register(known, made.path, "result")
    register(known, tmp_path / "out", "export")
    shutil.copytree(family / "base", tmp_path / "other")
    register(known, tmp_path / "other", "other")
    known.recipe_path("x").write_text("merge_method: ties\nbase_model: other\nmodels: []\n")
    gone = shutil.copytree(family / "expert_02", tmp_path / "gone")
    register(known, gone, "gone")
    shutil.rmtree(gone)
    result = f"it is a result of this warehouse, snapshot {made.snapshot_id[:16]}"
    assert left(known, write("match: '*'")) == {
        "base": "it is the recipe's base",
        "export": result,
        "gone": f"it is gone: nothing lies at {gone}",
        "other": "it is the base of recipe x",
        "result": result,
    }


def test_an_expert_on_a_disk_that_may_not_be_mounted_stays(
    known: Warehouse, write: Write, family: Path, tmp_path: Path
) -> None:
    for name in ("chat-8", "chat-9"):
        register(known, shutil.copytree(family / "expert_00", tmp_path / "disk" / name), name)
    shutil.rmtree(tmp_path / "disk" / "chat-8")
    path = write("match: chat-*")
    assert taken(known, path)[-1] == "chat-9"
    assert "it is gone" in left(known, path)["chat-8"]
    (tmp_path / "disk").rename(tmp_path / "unplugged")
    assert taken(known, path)[-2:] == ["chat-8", "chat-9"]
    (tmp_path / "disk").mkdir()
    assert taken(known, path)[-2:] == ["chat-8", "chat-9"]
    assert left(known, path) == {}


def test_what_a_recipe_names_is_not_taken_again_however_it_is_named(
    known: Warehouse, write: Write, family: Path
) -> None:
    path = write(f"model: {family / 'expert_00'}", "model: chat-1@1", "match: chat-*")
    assert taken(known, path) == [str(family / "expert_00"), "chat-1", "chat-2", "chat-3"]
    assert left(known, path) == dict.fromkeys(("chat-0", "chat-1"), "the recipe names it")


def test_a_selector_that_takes_nothing_says_what_is_near_or_why_all_are_left_out(
    known: Warehouse, write: Write
) -> None:
    near = refusal(known, write("match: chta-1"))
    assert "no registered name fits 'chta-1'; did you mean `chat-1`?; registered are base" in near
    assert "(match base) takes nothing: all that it fits are left out: base (it is the " in refusal(
        known, write("match: base")
    )
    assert "none of these has the tag 'prod'; tags are none" in refusal(known, write("tag: prod"))
    tag(known, "chat-0", add=["prod"])
    assert "did you mean `prod`?" in refusal(known, write("tag: prdo"))
    assert left(known, write("match: chat-*, tag: prod")) == {}


def test_one_of_another_shape_is_an_ordinary_error_that_names_it(
    known: Warehouse, write: Write, tmp_path: Path
) -> None:
    from tests.support.family import tensors_of, write_model

    other = tensors_of(0, 1, hidden=32)
    register(known, write_model(tmp_path / "odd", other, hidden=32), "chat-odd")
    with pytest.raises(MergePipeError, match="chat-odd"):
        check(known, load_recipe(write("match: chat-*"), known))


def test_python_selects_as_recipes_do(known: Warehouse, write: Write) -> None:
    planner = Planner(Catalog(known.root))
    asked = {"base_model": "base", "operator": "ties", "parameters": {"density": 0.5}}
    selecting = planner.plan(experts=[{"match": "chat-*"}], weights=[0.3], **asked)  # type: ignore[arg-type]
    named = planner.plan(experts=[f"chat-{i}" for i in range(4)], weights=[0.3] * 4, **asked)  # type: ignore[arg-type]
    assert selecting.plan_id == named.plan_id


def test_damaged_tags_stop_what_asks_for_them_and_nothing_else(
    known: Warehouse, write: Write
) -> None:
    tag(known, "chat-0", add=["prod"])
    file = known.catalog_dir / "tags" / "chat-0" / "00000001.json"
    file.write_bytes(file.read_bytes().replace(b"prod", b"odd!"))
    with pytest.raises(CorruptionError, match="chat-0"):
        load_recipe(write("tag: prod"), known)
    assert len(taken(known, write("match: chat-*"))) == 4


def test_a_selector_leaves_a_quarantined_content_out_until_it_changes(
    known: Warehouse, write: Write, family: Path
) -> None:
    path = write("match: chat-*")
    made = merge(known, path).outcome  # contents are known from then on
    quarantine(known, "chat-1", reason="it forgot how to sort")
    assert taken(known, path) == ["chat-0", "chat-2", "chat-3"]
    assert "it forgot how to sort" in left(known, path)["chat-1"]
    assert merge(known, path).outcome.plan.plan_id != made.plan.plan_id
    register(known, family / "expert_02", "chat-1", "base")
    assert taken(known, path) == ["chat-0", "chat-1", "chat-2", "chat-3"]
