"""Components, in projects that Dagster's own commands make and check."""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from traceback import format_exception
from typing import Any

import dagster as dg
import numpy as np
import pytest
import yaml
from dagster._core.execution.api import create_execution_plan
from dagster.components.core.component_tree import ComponentTree
from dagster.components.testing import DefsFolderSandbox, create_defs_folder_sandbox
from safetensors.numpy import load_file

from mergepipe_pipeline.dagster import (
    HousekeepingComponent,
    InboxComponent,
    KeptRecipesComponent,
    MergePipeProps,
    MergeRecipeComponent,
    WindowComponent,
    door,
)
from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.verbs.deploy import last_release
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.test_existing_project import Project, all_done
from tests.docs.page import DOCS, blocks

pytestmark = pytest.mark.filterwarnings("ignore::Warning")

ROOT = Path(__file__).parents[2]
NAMES = (
    "HousekeepingComponent",
    "InboxComponent",
    "KeptRecipesComponent",
    "MergeRecipeComponent",
    "SearchComponent",
    "WindowComponent",
)
ONE = {"merge_method": "linear", "models": [{"model": "math", "parameters": {"weight": 1}}]}

TRAINING = '''
import json
from pathlib import Path

import dagster as dg
import numpy as np
from mergepipe_pipeline.dagster import MergePipeResource
from safetensors.numpy import save_file


def fit(slope: float, folder: Path) -> None:
    """Fit y = slope * x in each of 16 coordinates by gradient descent, and save the weights."""
    x = np.random.default_rng(0).normal(size=(256, 16)).astype(np.float32)
    weight = np.zeros((16, 16), np.float32)
    for _ in range(200):
        weight -= 0.1 * (x @ weight.T - slope * x).T @ x / len(x)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1}))
    save_file({"model.layers.0.mlp.up_proj.weight": weight}, folder / "model.safetensors")


@dg.asset(key=["training", "math"])
def math(mergepipe: MergePipeResource) -> None:
    fit(1.0, Path(__file__).parent / "trained" / "math")
    mergepipe.land(Path(__file__).parent / "trained" / "math", "math")


@dg.asset(key=["training", "code"])
def code(mergepipe: MergePipeResource) -> None:
    fit(3.0, Path(__file__).parent / "trained" / "code")
    mergepipe.land(Path(__file__).parent / "trained" / "code", "code")
'''
EVALUATOR = """import json, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import load_file
(file,) = Path(sys.argv[-1]).glob("*.safetensors")
(weight,) = load_file(file).values()
print(json.dumps({"loss": float(np.abs(weight - 2 * np.eye(16)).max())}))
"""
PAGE = blocks(DOCS / "components.md")


class DgProject:
    """A project that `create-dagster` made, in an environment that has our entry point."""

    def __init__(self, root: Path) -> None:
        self.root, self.defs = root, root / "src" / root.name / "defs"
        self._installed = root.with_name("installed")
        entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        ((group, names),) = entry_points["entry-points"].items()
        info = self._installed / "ours-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 0\n")
        lines = [f"[{group}]", *(f"{name} = {module}" for name, module in names.items())]
        (info / "entry_points.txt").write_text("\n".join(lines))
        create = Path(sys.executable).with_name("create-dagster")
        self._run(create, "project", "--no-uv-sync", str(root), cwd=root.parent)

    def dg(self, *commands: str) -> str:
        """Run commands of `dg` in the project, in one process; what they print."""
        code = "from dagster_dg_cli.cli import cli\n" + "\n".join(
            f"cli({command.removeprefix('dg ').split()}, standalone_mode=False)"
            for command in commands
        )
        return self._run(Path(sys.executable), "-c", code, cwd=self.root)

    def _run(self, program: Path, *words: str, cwd: Path) -> str:
        paths = (ROOT, self._installed, self.root / "src")
        env = {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "COLUMNS": "200",
            "HOME": str(self.root.parent),
            "DAGSTER_DG_UPDATE_CHECK_ENABLED": "0",
        }
        done = subprocess.run(
            [program, *words],
            cwd=cwd,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sensors need not wait until a daemon knows the definitions."""
    monkeypatch.setattr(door, "spreading", lambda: lambda context: True)


def test_dg_lists_scaffolds_and_accepts_all_components(tmp_path: Path) -> None:
    project = DgProject(tmp_path / "scaffolded")
    names = [f"mergepipe_pipeline.dagster.{name}" for name in NAMES]
    scaffold = [f"scaffold defs {name} my_{name.rsplit('.')[-1]}" for name in names]
    said = project.dg("list components", *scaffold, "check yaml", "check defs")
    assert [name for name in names if name not in said] == []
    assert "All component YAML validated successfully." in said
    assert "All definitions loaded successfully." in said
    assert (project.root / "warehouse" / "searches" / "my_SearchComponent.yml").exists()


def test_a_project_of_dg_trains_merges_and_releases_by_fifteen_lines_of_yaml(
    tmp_path: Path, instance: dg.DagsterInstance, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = DgProject(tmp_path / "shop")
    (commands,) = (block.text for block in PAGE if block.language == "sh")
    (recipe,) = (block for block in PAGE if block.title)
    assert len(recipe.text.splitlines()) <= 15
    made.dg(*commands.splitlines())
    (made.defs / "training.py").write_text(TRAINING)
    assert (made.root / recipe.title).exists()
    (made.root / recipe.title).write_text(recipe.text)
    (made.root / "eval.py").write_text(EVALUATOR)
    monkeypatch.syspath_prepend(made.root / "src")
    defs = dg.load_from_defs_folder(path_within_project=made.defs)
    project, home = Project(instance, defs), Warehouse.at(made.root / "warehouse")
    assert project.tick("mergepipe_both_recipe_sensor") == []
    assert project.make("training/math", "training/code").success
    assert len(all_done(project.tick("mergepipe_inbox_sensor"))) == 2
    assert all_done(project.tick("mergepipe_both_recipe_sensor")) == ["mergepipe_merge_both"]
    released = last_release(home, "both")
    assert released is not None
    (file,) = (home.snapshots / released.snapshot_id).glob("*.safetensors")
    (weight,) = load_file(file).values()
    np.testing.assert_allclose(weight, 2 * np.eye(16), atol=1e-3)
    graph = project.defs.resolve_asset_graph()
    above = graph.get_ancestor_asset_keys(dg.AssetKey(["both", "release"]))
    assert {dg.AssetKey(["training", name]) for name in ("math", "code")} < above


@pytest.fixture
def sandbox() -> Iterator[DefsFolderSandbox]:
    """An empty project in this process; components lie in its folder `one`."""
    with create_defs_folder_sandbox() as sandbox:
        yield sandbox


def loaded(
    sandbox: DefsFolderSandbox,
    kind: type[dg.Component],
    attributes: dict[str, Any],
    more: Mapping[str, Any] = {},
) -> dg.Definitions:
    """The definitions of a component with these attributes in its YAML."""
    text = {"type": f"mergepipe_pipeline.dagster.{kind.__name__}", "attributes": attributes, **more}
    path = sandbox.scaffold_component(kind, "one", defs_yaml_contents=text)
    with sandbox.load_component_and_build_defs(path) as (_, defs):
        return defs


def test_translation_says_what_assets_are_by_their_name_part_and_spec(
    sandbox: DefsFolderSandbox,
) -> None:
    (shown,) = (b.text for b in PAGE if b.text.startswith("translation"))
    translation = yaml.safe_load(shown)["translation"]
    attributes = {
        "home": "../warehouse",
        "recipes": {"a": ONE},
        "automation": "condition",
        "translation": translation,
    }
    defs = loaded(sandbox, MergeRecipeComponent, attributes)
    dg.Definitions.validate_loadable(defs)
    graph = defs.resolve_asset_graph()
    release, plan = (graph.get(dg.AssetKey(["models", "a", p])) for p in ("release", "plan"))
    assert (release.group_name, plan.group_name) == ("released", "merging")
    assert (release.owners, release.tags["step"]) == (["team:models"], "release")
    report = graph.get(dg.AssetKey(["models", "a", "report"]))
    assert report.automation_condition == dg.AutomationCondition.eager()
    assert plan.automation_condition is not None
    assert plan.automation_condition.name == "recipe_wants"
    assert dg.AssetKey(["models", "a", "snapshot"]) in release.parent_keys


class Owned(InboxComponent):
    """Somebody's subclass."""

    def get_asset_spec(self, props: MergePipeProps) -> dg.AssetSpec:
        """All assets have an owner."""
        return super().get_asset_spec(props).replace_attributes(owners=["team:ours"])


def test_a_subclass_says_what_assets_are(home: Warehouse) -> None:
    context = ComponentTree.for_test().load_context
    graph = Owned(home=str(home.root), key_prefix="ours").build_defs(context).resolve_asset_graph()
    assert graph.get(dg.AssetKey(["ours", "expert_index"])).owners == ["team:ours"]


def test_paths_start_from_the_yaml_and_recipes_come_from_a_folder(
    sandbox: DefsFolderSandbox,
) -> None:
    folder = sandbox.defs_folder_path / "one" / "recipes"
    folder.mkdir(parents=True)
    for name in ("a", "b"):
        (folder / f"{name}.yml").write_text(yaml.safe_dump(ONE))
    attributes = {"home": "../warehouse", "recipes": "recipes", "key_prefix": ["our", "team"]}
    defs = loaded(sandbox, MergeRecipeComponent, attributes)
    keys = defs.resolve_asset_graph().get_all_asset_keys()
    assert {dg.AssetKey(["our", "team", name, "release"]) for name in ("a", "b")} < keys
    assert (sandbox.defs_folder_path / "warehouse" / "recipes" / "b.yml").exists()


def sensors_of(sandbox: DefsFolderSandbox) -> set[str]:
    """The sensors of all components of a project."""
    with sandbox.build_all_defs() as defs:
        dg.Definitions.validate_loadable(defs)
        return {sensor.name for sensor in defs.get_repository_def().sensor_defs}


def test_components_with_several_recipes_each_have_sensors_that_stay_while_others_come(
    sandbox: DefsFolderSandbox,
) -> None:
    def documents(*names: str) -> str:
        kind = "mergepipe_pipeline.dagster.MergeRecipeComponent"
        texts = [{f"{name}1": ONE, f"{name}2": ONE} for name in names]
        attributes = [{"home": "{{ context.project_root }}/w", "recipes": text} for text in texts]
        return yaml.safe_dump_all([{"type": kind, "attributes": one} for one in attributes])

    for place, names in (("team/x", "a"), ("y", "b")):
        (sandbox.defs_folder_path / place).mkdir(parents=True)
        (sandbox.defs_folder_path / place / "defs.yaml").write_text(documents(*names))
    first = {"mergepipe_recipe_sensor_team_x", "mergepipe_recipe_sensor_y"}
    assert sensors_of(sandbox) == first
    (sandbox.defs_folder_path / "y" / "defs.yaml").write_text(documents("b", "c"))
    assert sensors_of(sandbox) == {*first, "mergepipe_recipe_sensor_y_1"}


def test_paths_of_evaluators_start_from_the_yaml(sandbox: DefsFolderSandbox) -> None:
    recipe = {**ONE, "evaluate": {"command": ["python", "eval.py"]}}
    loaded(sandbox, MergeRecipeComponent, {"home": "../warehouse", "recipes": {"a": recipe}})
    warehouse = Warehouse.at(sandbox.defs_folder_path / "warehouse")
    (file,) = recipe_files(warehouse)
    assert file.folder == sandbox.defs_folder_path / "one"


def test_housekeeping_reloads_where_its_yaml_says_so(
    sandbox: DefsFolderSandbox,
) -> None:
    attributes = {"home": "../warehouse", "only_own": False}
    usual = {"orphans", "retention", "failure", "stalled"}
    for more, names in (({}, usual), ({"reload": True}, usual | {"reload"})):
        defs = loaded(sandbox, HousekeepingComponent, attributes | more)
        found = {sensor.name for sensor in defs.get_repository_def().sensor_defs}
        assert found == {f"mergepipe_{name}_sensor" for name in names}


def test_recipes_stay_as_they_are_written_but_for_expressions(
    sandbox: DefsFolderSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHT", "0.25")
    chat = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model = {"model": "math@0123", "parameters": {"weight": "{{ env.WEIGHT }}"}}
    recipe = {"merge_method": "linear", "models": [model], "chat_template": chat, "name": "007"}
    texts = {"a": recipe, "b": f"# as text\n{yaml.safe_dump(ONE)}"}
    loaded(sandbox, MergeRecipeComponent, {"home": "../warehouse", "recipes": texts})
    recipes = sandbox.defs_folder_path / "warehouse" / "recipes"
    found = yaml.safe_load((recipes / "a.yml").read_text())
    assert found == {**recipe, "models": [{"model": "math@0123", "parameters": {"weight": 0.25}}]}
    assert (recipes / "b.yml").read_text() == texts["b"]


def test_kept_recipes_are_those_of_the_last_refresh_though_their_folder_changes_or_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = DgProject(tmp_path / "kept")
    kind = "mergepipe_pipeline.dagster.KeptRecipesComponent"
    project.dg(f"scaffold defs {kind} merges")
    folder = project.defs / "merges" / "recipes"
    (folder / "merges.yml").unlink()
    recipe = {**ONE, "evaluate": {"command": ["python", "eval.py"]}}
    monkeypatch.syspath_prepend(project.root / "src")

    def releases() -> set[str]:
        defs = dg.load_from_defs_folder(path_within_project=project.defs)
        keys = defs.resolve_asset_graph().get_all_asset_keys()
        return {key.path[0] for key in keys if key.path[-1] == "release"}

    (folder / "a.yml").write_text(yaml.safe_dump(recipe))
    assert releases() == set()
    project.dg("utils refresh-defs-state")
    assert releases() == {"a"}
    (folder / "a.yml").rename(folder / "b.yml")
    assert releases() == {"a"}
    project.dg("utils refresh-defs-state")
    shutil.rmtree(folder)
    assert releases() == {"b"}
    warehouse = Warehouse.at(project.root / "warehouse")
    starts = {file.name: file.folder for file in recipe_files(warehouse)}
    assert starts["b"] == folder


def test_recipes_in_the_yaml_and_a_state_without_a_key_are_not_kept(
    sandbox: DefsFolderSandbox,
) -> None:
    state = {"management_type": "LOCAL_FILESYSTEM"}
    for recipes, key in (({"a": ONE}, {"key": "k"}), ("recipes", {})):
        attributes = {"home": "../warehouse", "recipes": recipes, "defs_state": state | key}
        with pytest.raises(Exception, match="loading component") as refused:
            loaded(sandbox, KeptRecipesComponent, attributes)
        assert "Recipes cannot be kept as a state" in "".join(format_exception(refused.value))


def test_a_window_follows_the_asset_that_trains_and_has_the_keys_that_it_is_given(
    sandbox: DefsFolderSandbox,
) -> None:
    window = {"run": "runs/sft", "name": "w", "last": 4, "schedule": "exponential", "decay": 0.5}
    attributes = {
        "home": "../warehouse",
        **window,
        "recipe": {"dtype": "bfloat16"},
        "training": "t/s",
    }
    defs = loaded(sandbox, WindowComponent, attributes)
    plan = defs.resolve_asset_graph().get(dg.AssetKey(["w", "plan"]))
    assert dg.AssetKey(["t", "s"]) in plan.parent_keys
    text = yaml.safe_load(
        (sandbox.defs_folder_path / "warehouse" / "recipes" / "w.yml").read_text()
    )
    weights = {"schedule": "exponential", "decay": 0.5}
    assert text["models"] == [{"run": "sft", "last": 4, "weights": weights}]
    assert text["dtype"] == "bfloat16"


def test_an_expert_is_made_by_an_asset_or_by_one_of_its_partitions(
    sandbox: DefsFolderSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PART", "code")
    models = [{"model": name, "parameters": {"weight": 1}} for name in ("math", "code")]
    recipes = {"a": {"merge_method": "linear", "models": models}}
    experts = {"math": "t/math", "code": {"asset": "t/run", "partition": "{{ env.PART }}"}}
    attributes = {"home": "../warehouse", "recipes": recipes, "experts": experts}
    defs = loaded(sandbox, MergeRecipeComponent, attributes)
    plan = defs.get_assets_def(dg.AssetKey(["a", "plan"]))
    mapping = plan.get_partition_mapping(dg.AssetKey(["t", "run"]))
    assert isinstance(mapping, dg.SpecificPartitionsPartitionMapping)
    assert list(mapping.partition_keys) == ["code"]
    assert plan.get_partition_mapping(dg.AssetKey(["t", "math"])) is None
    sensors = {sensor.name for sensor in defs.get_repository_def().sensor_defs}
    assert "mergepipe_a_landing_sensor" in sensors


RUNNING = """
import dagster as dg

@dg.template_var
def in_one_process(context): return dg.in_process_executor

@dg.template_var
def processes(context): return dg.PipesSubprocessClient()
"""


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (MergeRecipeComponent, {"recipes": {"a": ONE}}),
        (WindowComponent, {"run": "sft", "name": "a"}),
    ],
)
def test_where_and_how_steps_run_is_said_in_yaml_by_variables_of_python(
    sandbox: DefsFolderSandbox, kind: type[dg.Component], what: dict[str, Any]
) -> None:
    (sandbox.defs_folder_path / "one").mkdir()
    (sandbox.defs_folder_path / "one" / "running.py").write_text(RUNNING)
    running = {
        "executor": "{{ in_one_process }}",
        "pool": "big_disk",
        "op_tags": {"tier": "big"},
        "pipes": "{{ processes }}",
        "pipes_args": {"command": ["nice", "{{ env.HOME }}/python"]},
    }
    more = {"template_vars_module": ".running"}
    defs = loaded(sandbox, kind, {"home": "../warehouse", **what, **running}, more)
    job = defs.resolve_job_def("mergepipe_merge_a")
    assert job.executor_def is dg.in_process_executor
    steps = {step.key: step for step in create_execution_plan(job).steps}
    shard = steps["a__merge.shard_001"]
    assert (shard.pool, shard.tags) == ("big_disk", {"tier": "big"})


def test_an_attribute_that_no_component_has_is_refused(sandbox: DefsFolderSandbox) -> None:
    with pytest.raises(Exception, match="Error while loading component") as refused:
        loaded(sandbox, InboxComponent, {"home": "../warehouse", "recipe": "both"})
    assert "Extra inputs are not permitted" in "".join(format_exception(refused.value))


def test_components_load_neither_torch_nor_numba() -> None:
    code = "import sys, mergepipe_pipeline.dagster\nprint({'torch', 'numba'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n"
