"""The door for projects of others: what it takes, names and refuses, without a run."""

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.execution.api import create_execution_plan
from dagster_shared.libraries import DagsterLibraryRegistry

from mergepipe_pipeline.dagster import (
    MergePipeProps,
    MergePipeResource,
    MergePipeTranslator,
    build_housekeeping,
    build_inbox_defs,
    build_recipe_defs,
    build_search_defs,
    build_window_defs,
    door,
)
from mergepipe_pipeline.deploy.instance import identity_of
from mergepipe_pipeline.errors import MergePipeError, RecipeError
from mergepipe_pipeline.resources import WAREHOUSE_TAG
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.warehouse import Warehouse

pytestmark = pytest.mark.filterwarnings("ignore::Warning")

ONE = "merge_method: linear\nmodels:\n  - {model: math, parameters: {weight: 1}}\n"
SEARCH = "recipe: no search yet\n"


def all_parts(home: Path, prefix: str | tuple[str, ...] = ()) -> dg.Definitions:
    """All that the door offers, of one warehouse."""
    return dg.Definitions.merge(
        build_inbox_defs(home=home, key_prefix=prefix),
        build_recipe_defs({"a": ONE, "b.c": ONE}, home=home, key_prefix=prefix),
        build_recipe_defs({"d": ONE}, home=home, key_prefix=prefix, experts={"math": "train"}),
        build_window_defs(home / "runs" / "sft", home=home, key_prefix=prefix),
        build_search_defs({"s": SEARCH}, home=home, key_prefix=prefix),
        build_housekeeping(home=home, key_prefix=prefix, reload=True),
    )


def test_a_window_may_be_started_by_its_condition(home: Warehouse, tmp_path: Path) -> None:
    defs = build_window_defs(tmp_path / "sft", home=home.root, automation="condition")
    nodes = defs.resolve_asset_graph().asset_nodes
    conditions = {n.key.path[-1]: n.automation_condition for n in nodes if n.automation_condition}
    assert {part: one.name for part, one in conditions.items()} == {"plan": "recipe_wants"}


def test_code_locations_show_the_version_that_is_installed() -> None:
    assert DagsterLibraryRegistry.get()["mergepipe-pipeline"] == version("mergepipe-pipeline")


@pytest.mark.parametrize("prefix", [(), "team", ("our", "team-2")])
def test_no_part_sets_an_executor_and_all_names_begin_as_their_place_says(
    home: Warehouse, prefix: str | tuple[str, ...]
) -> None:
    defs = all_parts(home.root, prefix)
    dg.Definitions.validate_loadable(defs)
    assert defs.executor is None
    path = (prefix,) if isinstance(prefix, str) else prefix
    scope = "_".join(path or ("mergepipe",)).replace("-", "_")
    repository = defs.get_repository_def()
    names = {
        *(sensor.name for sensor in repository.sensor_defs),
        *(schedule.name for schedule in repository.schedule_defs),
        *(job.name for job in repository.get_all_jobs() if job.name != "__ASSET_JOB"),
        *(defs.resources or {}),
    }
    assert {name for name in names if name != scope and not name.startswith(f"{scope}_")} == set()
    keys = defs.resolve_asset_graph().get_all_asset_keys() - {dg.AssetKey("train")}
    assert {tuple(key.path[: len(path)]) for key in keys} == {path}


def test_executor_pool_and_tags_are_those_of_a_recipes_jobs_and_of_its_heavy_steps_alone(
    home: Warehouse,
) -> None:
    gate = "evaluate: {command: [a]}\ngate: {x: {min: 0}, on_failure: bisect}\n"
    memory = {"container_config": {"resources": {"limits": {"memory": "8Gi"}}}}
    repository = dg.Definitions.merge(
        build_recipe_defs(
            {"a": ONE + gate},
            home=home.root,
            executor=dg.in_process_executor,
            pool="big_disk",
            op_tags={"dagster-k8s/config": memory},
        ),
        build_recipe_defs({"b": ONE}, home=home.root),
        dg.Definitions(executor=dg.multiprocess_executor),
    ).get_repository_def()
    jobs = {name: repository.get_job(f"mergepipe_{name}") for name in ("merge_a", "bisect_a")}
    assert {job.executor_def for job in jobs.values()} == {dg.in_process_executor}
    theirs = repository.get_job("mergepipe_merge_b")
    assert theirs.executor_def is dg.multiprocess_executor
    steps = [step for job in jobs.values() for step in create_execution_plan(job).steps]
    heavy = {step.key: step.tags or {} for step in steps if step.pool == "big_disk"}
    assert set(heavy) == {"a__merge.shard_001", "a__merge.gather", "a__snapshot", "a__bisect"}
    assert {step.key for step in steps if step.tags} == set(heavy)
    assert all(json.loads(tags["dagster-k8s/config"]) == memory for tags in heavy.values())
    usual = {step.key: step.pool for step in create_execution_plan(theirs).steps}
    assert usual["b__merge.shard_001"] == "disk_write"


def test_an_executor_that_no_run_of_a_condition_would_have_is_refused(home: Warehouse) -> None:
    with pytest.raises(MergePipeError, match="executor of the project"):
        build_recipe_defs(
            {"a": ONE}, home=home.root, automation="condition", executor=dg.in_process_executor
        )


def test_runs_of_a_guests_jobs_carry_the_tag_of_the_warehouse(home: Warehouse) -> None:
    repository = all_parts(home.root).get_repository_def()
    for name in ("merge_a", "merge_d", "index_experts"):
        tags = repository.get_job(f"mergepipe_{name}").tags
        assert tags[WAREHOUSE_TAG] == identity_of(home)


def test_a_sensor_tells_of_the_recipes_that_it_was_built_for_alone(
    home: Warehouse, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "spreading", lambda: lambda context: True)
    home.recipe_path("stray").write_text(ONE)
    repository = all_parts(home.root).get_repository_def()
    told = {"recipe": {"a", "b.c"}, "d_recipe": {"d"}, "window_recipe": {"window"}}
    for name, recipes in told.items():
        with dg.build_sensor_context(
            instance=instance,
            repository_def=repository,
            resources=repository.get_top_level_resources(),
        ) as context:
            found: Any = repository.get_sensor_def(f"mergepipe_{name}_sensor")(context)
        said = found.skip_reason.skip_message.replace("• ", "").splitlines()
        assert {line.partition(":")[0] for line in said} == recipes


def test_calls_with_several_recipes_are_told_apart_by_a_name_that_no_recipe_can_take(
    home: Warehouse,
) -> None:
    parts = [
        build_recipe_defs({"a": ONE, "b": ONE}, home=home.root),
        build_recipe_defs({"c": ONE, "d": ONE}, home=home.root, name="x"),
        build_recipe_defs({"x": ONE}, home=home.root),
    ]
    defs = dg.Definitions.merge(*parts)
    dg.Definitions.validate_loadable(defs)
    assert {sensor.name for sensor in defs.get_repository_def().sensor_defs} == {
        "mergepipe_recipe_sensor",
        "mergepipe_recipe_sensor_x",
        "mergepipe_x_recipe_sensor",
    }


def test_what_a_tick_and_a_job_say_names_jobs_and_sensors_as_they_are_here(
    home: Warehouse, family: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "spreading", lambda: lambda context: True)
    shutil.copytree(family / "expert_00", home.inbox / "math")
    index_arrival(home, "math")
    texts = {"a": ONE + "trigger: manual\n"}
    repository = build_recipe_defs(texts, home=home.root, key_prefix="team").get_repository_def()
    with dg.build_sensor_context(
        instance=instance,
        repository_def=repository,
        resources=repository.get_top_level_resources(),
    ) as context:
        found: Any = repository.get_sensor_def("team_a_recipe_sensor")(context)
    assert "Next: run the job team_merge_a, or wait" in found.skip_reason.skip_message
    job = repository.get_job("team_merge_a")
    assert " team_a_recipe_sensor starts it" in (job.description or "")


def test_two_warehouses_and_a_location_of_our_own_load_together(
    home: Warehouse, tmp_path: Path
) -> None:
    two = [all_parts(tmp_path / name, name) for name in ("one", "two")]
    dg.Definitions.validate_loadable(dg.Definitions.merge(*two, all_parts(home.root)))


def test_recipes_are_written_where_they_differ(home: Warehouse, tmp_path: Path) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "a.yaml").write_text(ONE)
    build_recipe_defs(folder, home=home.root)
    first = home.recipe_path("a").stat()
    build_recipe_defs(folder, home=home.root)
    assert home.recipe_path("a").stat().st_ino == first.st_ino
    (folder / "a.yaml").write_text(ONE + "dtype: bfloat16\n")
    build_recipe_defs(folder / "a.yaml", home=home.root)
    assert home.recipe_path("a").read_text() == ONE + "dtype: bfloat16\n"


def test_a_source_without_a_recipe_and_a_name_that_is_a_path_are_refused(home: Warehouse) -> None:
    for source in ({}, home.root / "nothing", {"../../up": ONE}):
        with pytest.raises(RecipeError, match="no recipe or search that could run"):
            build_recipe_defs(source, home=home.root)


def test_another_recipe_of_one_name_under_another_prefix_is_refused(home: Warehouse) -> None:
    build_recipe_defs({"a": ONE}, home=home.root)
    build_recipe_defs({"a": ONE}, home=home.root, key_prefix="team")
    with pytest.raises(RecipeError, match=r"two recipes.*a, under the prefixes '' and 'team'"):
        build_recipe_defs({"a": ONE + "seed: 1\n"}, home=home.root, key_prefix="team")
    build_recipe_defs({"b": ONE}, home=home.root)
    build_recipe_defs({"b": ONE + "seed: 1\n"}, home=home.root)  # it was edited


def test_a_window_of_another_run_of_the_same_name_is_refused(home: Warehouse) -> None:
    for _ in range(2):
        build_window_defs(home.root / "one" / "sft", home=home.root)
    with pytest.raises(MergePipeError, match="another run of this name"):
        build_window_defs(home.root / "two" / "sft", home=home.root)


def test_an_expert_that_no_recipe_uses_is_refused_with_those_that_it_uses(home: Warehouse) -> None:
    with pytest.raises(RecipeError, match=r"Expected of math, found maths\."):
        build_recipe_defs({"a": ONE}, home=home.root, experts={"maths": "training/math"})


class TwoKeys(MergePipeTranslator):
    """Makes a key of what runs do not know."""

    def get_asset_spec(self, props: MergePipeProps) -> dg.AssetSpec:
        return props.spec.replace_attributes(key=[props.part, *sorted(props.spec.tags)])


def test_what_starts_no_recipe_is_refused_with_what_does(home: Warehouse) -> None:
    with pytest.raises(MergePipeError, match="Expected sensor or condition, found eager"):
        build_recipe_defs({"a": ONE}, home=home.root, automation="eager")  # type: ignore[arg-type]


def test_a_translator_that_gives_one_asset_two_keys_is_refused(home: Warehouse) -> None:
    with pytest.raises(MergePipeError, match="gives one asset two keys"):
        build_inbox_defs(home=home.root, translator=TwoKeys())


def test_a_recipe_that_cannot_be_read_is_one_asset_that_says_why(home: Warehouse) -> None:
    defs = build_recipe_defs({"a": "merge_method: none\n", "b": ONE}, home=home.root)
    graph = dg.Definitions.merge(build_inbox_defs(home=home.root), defs).resolve_asset_graph()
    assert "merge_method" in (graph.get(dg.AssetKey(["a", "plan"])).description or "")
    assert graph.get(dg.AssetKey(["b", "release"])).is_executable


def test_the_resource_lands_registers_merges_and_measures(
    home: Warehouse, family: Path, tmp_path: Path
) -> None:
    resource = MergePipeResource(home=str(home.root))
    landed = resource.land(family / "expert_00", "math", tags=["new"])
    assert (landed.name, home.catalog.tags("math")) == ("math", frozenset({"new"}))
    assert resource.register(family / "expert_01", "code").version == 1
    recipe = tmp_path / "r.yml"
    evaluate = "evaluate: {command: [python, eval.py]}\n"
    recipe.write_text(ONE.replace("math", str(family / "expert_00")) + evaluate)
    (tmp_path / "eval.py").write_text("print('{\"size\": 2}')")
    merged = resource.merge(recipe, publish=True)
    assert merged.ref is not None
    assert merged.ref.name == "r"
    assert resource.evaluate("r", recipe).metrics == {"size": 2.0}
