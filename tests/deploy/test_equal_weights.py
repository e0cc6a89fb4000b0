"""Recipes with equal weights have their own base's config, whichever is planned last."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.execution.lookup import working_plans
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.verbs import deploy
from mergepipe_pipeline.verbs.deploy import (
    candidate,
    current_plan,
    merge_recipe,
    plan_recipe,
    snapshot_recipe,
)
from mergepipe_pipeline.verbs.gc import collect
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse


@pytest.fixture
def twins(home: Warehouse, family: Path) -> Warehouse:
    """Two standing recipes alike but for their bases, which have equal weights."""
    for name, source in (("one", "base"), ("two", "base"), ("expert", "expert_00")):
        shutil.copytree(family / source, home.inbox / name)
    config = home.inbox / "two" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_theta": 77777.0}))
    for name in ("one", "two", "expert"):
        index_arrival(home, name)
    for name in ("one", "two"):
        home.recipe_path(f"r-{name}").write_text(
            f"merge_method: task_arithmetic\nbase_model: {name}\n"
            "models: [{model: expert, parameters: {weight: 1}}]\n"
        )
    return home


def test_a_recipe_is_merged_with_its_own_bases_config(twins: Warehouse) -> None:
    one, two = recipe_files(twins)
    plans = [plan_recipe(twins, file) for file in (one, two)]
    assert plans[0].plan_id == plans[1].plan_id
    for file, is_changed in ((one, False), (two, True)):
        layers = [layer.name for layer in current_plan(twins, file.name).layers]
        list(merge_recipe(twins, file.name, layers, EngineOptions()))
        snapshot, _ = snapshot_recipe(twins, file.name)
        config = json.loads((Path(snapshot.path) / "config.json").read_text())
        assert (config.get("rope_theta") == 77777.0) == is_changed
        assert file.name.removeprefix("r-") in {i.name for i in snapshot.manifest.inputs}
        assert candidate(twins, file)[0].snapshot_id == snapshot.snapshot_id


def test_a_plan_by_hand_does_not_take_the_place_of_the_one_that_a_recipe_works_on(
    twins: Warehouse,
) -> None:
    one, _ = recipe_files(twins)
    plan_recipe(twins, one)
    make_plan(twins, one.recipe, relative_to=twins.recipes, budget="100%")
    assert current_plan(twins, one.name).request.budget is None


def test_a_damaged_plan_of_a_recipe_is_planned_anew_and_a_collection_says_what_it_keeps(
    twins: Warehouse,
) -> None:
    one, _ = recipe_files(twins)
    plan = plan_recipe(twins, one)
    (file,) = working_plans(twins)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CorruptionError, match=r"not the one that it works on.*r-one/plan"):
        current_plan(twins, one.name)
    assert [f.file for f in verify_all(twins, ["structure"]).findings] == [str(file)]
    assert any(file.name in note for note in collect(twins, older_than_s=0).notes)
    assert plan_recipe(twins, one) == plan
    assert current_plan(twins, one.name) == plan


def test_a_kill_before_a_plan_is_current_leaves_the_one_before(
    twins: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = recipe_files(twins)
    before = plan_recipe(twins, one)

    def killed(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(deploy, "keep_record", killed)
        with pytest.raises(KeyboardInterrupt):
            plan_recipe(twins, one, budget="50%")
    assert current_plan(twins, one.name) == before
    after = plan_recipe(twins, one, budget="40%")
    assert current_plan(twins, one.name) == after
    assert len(working_plans(twins)) == 1
