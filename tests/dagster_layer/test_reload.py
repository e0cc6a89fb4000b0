"""Recipes appear, change and vanish under real processes, which nobody starts again."""

from __future__ import annotations

import json
import shutil
import time
from urllib.request import Request, urlopen

import dagster as dg
import pytest
from dagster import DagsterRunStatus as Status

from mergepipe_pipeline import definitions
from mergepipe_pipeline.deploy.recipe_files import RecipeFile, recipe_files
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors import reload
from mergepipe_pipeline.sensors.reload import listening
from mergepipe_pipeline.verbs.deploy import last_release
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.verbs.publish import history
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop
from tests.dagster_layer.daemon import Daemon, running_daemon
from tests.dagster_layer.test_experts import sum_of

pytestmark = [pytest.mark.waits, pytest.mark.filterwarnings("ignore::Warning")]


def assets_shown(daemon: Daemon) -> set[str]:
    """The assets that the webserver knows."""
    query = json.dumps({"query": "{ assetNodes { assetKey { path } } }"}).encode()
    request = Request(
        f"http://127.0.0.1:{daemon.port}/graphql", query, {"Content-Type": "application/json"}
    )
    with urlopen(request, timeout=60) as answer:
        nodes = json.load(answer)["data"]["assetNodes"]
    return {"/".join(node["assetKey"]["path"]) for node in nodes}


def test_a_new_recipe_appears_on_any_port_and_an_edited_one_is_merged_once(
    home: Warehouse, drop: Drop
) -> None:
    for name in ("base", "expert_00"):
        drop(name)
        index_arrival(home, name)
    shown = {"new/plan", "new/layers", "new/release"}
    with running_daemon(home, ui="dg") as daemon:
        daemon.wait_for("a look at recipes", lambda: daemon.skips("recipe_sensor"))
        home.recipe_path("new").write_text(sum_of("base", "expert_00"))
        daemon.wait_for("a merge", lambda: daemon.runs("merge_new", Status.SUCCESS))
        assert daemon.failures("recipe_sensor") == []
        daemon.wait_for("its assets in the UI", lambda: shown <= assets_shown(daemon))
        home.recipe_path("new").write_text(sum_of("base", "expert_00").replace("0.5", "0.25"))
        daemon.wait_for(
            "the edited merge", lambda: len(daemon.runs("merge_new", Status.SUCCESS)) == 2
        )
        daemon.wait_for(
            "two looks that find nothing to do",
            lambda: all("release is current" in s for s in daemon.skips("recipe_sensor")[:2]),
        )
        assert len(daemon.runs("merge_new")) == 2
        said = daemon.skips("reload_sensor", limit=None)
        asked = [s for s in said if "loads definitions anew" in s]
        assert len(asked) == 2  # of a server that is loading nobody asks to load once more
        assert [r.number for r in history(home, "new")] == [1, 2]


def test_what_lands_after_the_process_that_serves_definitions_is_killed_is_merged(
    home: Warehouse, recipe_file: RecipeFile, drop: Drop
) -> None:
    with running_daemon(home, ui="dg") as daemon:
        daemon.wait_for("a look at recipes", lambda: daemon.skips("reload_sensor"))
        daemon.wait_for("the release", lambda: last_release(home, "n"))
        for number in (2, 3):
            daemon.wait_for(
                "a look that succeeds", lambda: daemon.skips("reload_sensor", 1) != [""]
            )
            assert daemon.kill_code_server() == 1
            shutil.rmtree(home.inbox / "expert_01")
            drop("expert_01", f"expert_0{number}")
            daemon.wait_for(f"release {number}", lambda: len(history(home, "n")) == number)  # noqa: B023


def test_a_recipe_that_comes_while_definitions_are_made_has_them_loaded_anew(
    home: Warehouse, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    def before_another(warehouse: Warehouse) -> tuple[RecipeFile, ...]:
        files = recipe_files(warehouse)
        home.recipe_path("new").write_text(sum_of("base", "expert_00"))
        return files

    monkeypatch.setattr(definitions, "recipe_files", before_another)
    repository = definitions.build_definitions(home).get_repository_def()
    resources = {"mergepipe": MergePipe(home=str(home.root))}
    with dg.build_sensor_context(
        instance, repository_def=repository, resources=resources
    ) as context:
        said = repository.get_sensor_def("reload_sensor")(context)
    assert isinstance(said, dg.SkipReason)
    assert str(said.skip_message).startswith("recipes changed")


def test_the_address_of_a_code_server_is_what_its_command_or_environment_says() -> None:
    start = ["python", "-m", "dagster", "code-server", "start"]
    found = listening([*start, "--socket", "/tmp/x", "--heartbeat"], {})
    assert found is not None
    assert found.socket == "/tmp/x"
    found = listening([*start, "-p", "4000", "-h", "0.0.0.0", "-m", "a.b"], {})
    assert found is not None
    assert (found.port, found.host) == ("4000", "0.0.0.0")
    found = listening(start, {"DAGSTER_CODE_SERVER_PORT": "4001"})
    assert found is not None
    assert found.port == "4001"
    assert listening(["dagster-daemon", "run"], {"DAGSTER_CODE_SERVER_PORT": "4001"}) is None


def test_a_job_is_asked_for_in_a_look_that_began_when_the_daemon_knew_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reload, "_SPREADING_S", 0.5)
    monkeypatch.setattr(reload, "_age_s", lambda: 0.0)
    is_known = reload.spreading()

    def asked(tick_before_s: float) -> bool:
        with dg.DagsterInstance.ephemeral() as instance:
            return is_known(
                dg.SensorEvaluationContext(
                    instance_ref=None,
                    instance=instance,
                    last_tick_completion_time=tick_before_s,
                    last_run_key=None,
                    cursor=None,
                    repository_name=None,
                )
            )

    first_s = time.time()
    assert not asked(first_s - 5)
    time.sleep(0.6)
    # The look may be as old as the tick before: other sensors had their turns since.
    assert not asked(first_s)
    assert not asked(first_s + 0.4)
    assert asked(time.time())
