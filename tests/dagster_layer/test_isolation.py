"""One recipe that cannot be used stops no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest

from mergepipe_pipeline import definitions
from mergepipe_pipeline.assets.experts import experts_of
from mergepipe_pipeline.assets.metadata import table
from mergepipe_pipeline.deploy.recipe_files import RecipeFile, recipe_files
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop, records_of
from tests.dagster_layer.test_experts import jobs
from tests.dagster_layer.test_recipe_kinds import LINEAR

pytestmark = pytest.mark.filterwarnings("ignore::Warning")

#: Loads definitions as Dagster does, and prints the assets with the problems that they tell.
LOAD = """
import json
from mergepipe_pipeline.definitions import defs
defs.get_repository_def().load_all_definitions()
graph = defs.resolve_asset_graph()
print(json.dumps({k.path[0]: graph.get(k).description for k in graph.get_all_asset_keys()
                  if "problem" in graph.get(k).kinds or k.path[-1] == "release"}))
"""
#: Loads what a workspace names, from where the process stands.
WORKSPACE = """
import importlib, sys
from dagster._core.workspace.load import location_origins_from_yaml_paths
(origin,) = location_origins_from_yaml_paths(sys.argv[1:])
module = importlib.import_module(origin.loadable_target_origin.module_name)
print(module.defs.get_repository_def().get_sensor_def("inbox_sensor").name)
"""


def hostile_recipes(folder: Path) -> dict[str, str]:
    """Makes files that are no recipes; asset name to what its problem says."""
    (folder / "folder.yml").mkdir()
    os.mkfifo(folder / "fifo.yml")
    (folder / "latin.yml").write_bytes(b"# caf\xe9\n" + LINEAR.encode())
    (folder / "void.yml").write_bytes(b"\0" * 100)
    with (folder / "huge.yml").open("wb") as file:
        file.truncate(100 << 20)
    for raw in (b"caf\xe9.yml", b"caf\xe8.yml"):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + raw)).write_text(LINEAR)
    for name in ("good.yaml", "good.yml", "good.yml.yml", r"caf\udce9.yml"):
        (folder / name).write_text(LINEAR)
    return {
        **dict.fromkeys(("folder", "fifo", "latin"), "cannot be read"),
        **dict.fromkeys(("void", "huge"), "recipe"),
        **dict.fromkeys(
            (r"caf\udce9.yml", r"caf\udce9.yml'", r"caf\udce8.yml"), "cannot name assets"
        ),
        "good.yml": "same assets or job as good.yaml",
        "good.yml.yml": "same assets or job as good.yml",
    }


def test_definitions_load_whatever_lies_among_the_recipes(home: Warehouse, family: Path) -> None:
    for name, source in (("base", "base"), ("expert", "expert_00")):
        register(home, family / source, name)
    problems = hostile_recipes(home.recipes)
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        env={**os.environ, "MERGEPIPE_HOME": str(home.root)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told.keys() == {*problems, "good"}
    for name, message in problems.items():
        assert message in told[name]


def test_a_schedule_that_dagster_refuses_is_the_problem_of_its_recipe(
    home: Warehouse, ticker: Ticker, drop: Drop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(home: Warehouse) -> list[RecipeFile]:
        good, bad = recipe_files(home)[::-1]
        return [replace(bad, parsed=replace(bad.recipe, schedule="0 0 30 2 *")), good]

    for name in ("good", "bad"):
        home.recipe_path(name).write_text(LINEAR)
    drop("base")
    drop("expert", "expert_00")
    monkeypatch.setattr(definitions, "recipe_files", never)
    assert jobs(ticker.tick()) == ["base", "expert", "merge_good"]
    graph = definitions.build_definitions(home).resolve_asset_graph()
    node = graph.get(dg.AssetKey(["bad", "plan"]))
    assert node.kinds == {"problem"}
    assert "cron" in (node.description or "")


def test_text_from_outside_steers_neither_the_page_nor_the_logs(
    home: Warehouse, ticker: Ticker
) -> None:
    (home.inbox / "x\x1b[2J").mkdir()
    home.recipe_path("bad").write_text('merge_method: linear\nmodels: []\n"<b>\\e[2J": 1\n')
    assert ticker.tick() == []
    assert len(ticker.reasons()) == 2
    assert not any("\x1b" in reason for reason in ticker.reasons())
    assert r"x\x1b[2J: " in ticker.reasons()[0]
    node = (
        definitions.build_definitions(home).resolve_asset_graph().get(dg.AssetKey(["bad", "plan"]))
    )
    assert r"\<b\>" in (node.description or "")
    assert "\x1b" not in f"{node.description} {node.metadata}"


def test_the_file_name_in_an_experts_problem_is_shown_letter_by_letter(
    home: Warehouse, instance: dg.DagsterInstance
) -> None:
    (home.inbox / "x").mkdir()
    (home.inbox / "x" / "<b>.safetensors").write_bytes(b"no header")
    instance.add_dynamic_partitions(experts_of(home).name or "", ["x"])
    job = definitions.build_definitions(home).resolve_job_def("index_experts")
    job.execute_in_process(instance=instance, partition_key="x", raise_on_error=False)
    (record,) = instance.fetch_observations(dg.AssetKey("expert_index"), 1).records
    observation = record.asset_observation
    assert r"\<b\>.safetensors" in str(observation and observation.description)


def test_definitions_load_from_any_folder_and_make_no_warehouse(tmp_path: Path) -> None:
    workspace = Path(__file__).parents[2] / "workspace.yaml"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", WORKSPACE, str(workspace)],
        cwd=tmp_path,
        env={**env, "MERGEPIPE_HOME": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, list(tmp_path.iterdir())) == ("inbox_sensor\n", []), done.stderr


def test_a_table_shows_the_letters_of_its_cells() -> None:
    shown = table(("a|b",), [("c|d<img>",), ("e\nf",), (1.5,)])
    assert records_of(shown) == [{"a|b": "c|d<img>"}, {"a|b": "e\\nf"}, {"a|b": "1.5"}]
