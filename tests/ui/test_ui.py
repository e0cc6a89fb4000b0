"""The main pages of the UI say in a real browser what they should; a failed run is told."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dagster import DagsterRunStatus as Status
from PIL import Image

from mergepipe_pipeline.sensors.ticks import attempt_of
from tests.dagster_layer.daemon import REPOSITORY, Daemon, command_of, free_port, ui_command
from tests.dagster_layer.test_failure_sensor import webhook
from tests.ui.chromium import CHROMIUM, Page, browser
from tests.ui.pages import ODD, ODD_NAN, VIEWS, odd_views, running, show, warehouse
from tests.ui.screenshots import MOST_NBYTES

pytestmark = [pytest.mark.waits, pytest.mark.filterwarnings("ignore::Warning")]


@pytest.fixture(scope="module")
def deployed(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Daemon, list[dict[str, Any]]]]:
    """`dagster dev` after its first merges, and what a webhook was told of them."""
    folder = tmp_path_factory.mktemp("ui") / ODD
    with (
        webhook() as (url, posted),
        running(warehouse(folder), ODD_NAN, MERGEPIPE_WEBHOOK=url) as daemon,
    ):
        yield daemon, posted


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page of a browser."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def test_a_webhook_is_told_once_of_a_run_that_failed_with_its_tensor_and_what_to_do(
    deployed: tuple[Daemon, list[dict[str, Any]]],
) -> None:
    daemon, posted = deployed
    daemon.wait_for("a POST", lambda: posted)
    (told,) = posted
    (run,) = daemon.runs("merge_nightly_bad")
    assert (told["recipe"], told["run_id"]) == ("nightly_bad", run.run_id)
    assert ODD_NAN in told["cause"]
    assert told["next_step"].startswith("mend the expert")


LAUNCH = """mutation($path: [String!]!) { launchRun(executionParams: {mode: "default",
  executionMetadata: {tags: [{key: "dagster/max_retries", value: "2"}]}, selector: {
  repositoryLocationName: "mergepipe", repositoryName: "__repository__",
  jobName: "merge_nightly_bad", assetSelection: [{path: $path}], assetCheckSelection: []}})
  { __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""


def test_a_click_on_release_alone_publishes_nothing_that_a_check_refused(
    deployed: tuple[Daemon, list[dict[str, Any]]],
) -> None:
    daemon, _ = deployed
    daemon.wait_for("the refused run", lambda: daemon.runs("merge_nightly_bad", Status.FAILURE))
    asked = json.dumps({"query": LAUNCH, "variables": {"path": ["nightly_bad", "release"]}})
    request = urllib.request.Request(
        f"http://127.0.0.1:{daemon.port}/graphql",
        asked.encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        launched = json.load(answer)["data"]["launchRun"]
    assert launched["__typename"] == "LaunchRunSuccess", launched
    run_id = launched["run"]["runId"]

    def ended() -> bool:
        run = daemon.instance.get_run_by_id(run_id)
        return run is not None and run.is_finished

    daemon.wait_for("the release alone", ended)
    run = daemon.instance.get_run_by_id(run_id)
    assert run is not None
    assert run.status is Status.FAILURE
    assert ODD_NAN in attempt_of(daemon.instance, run_id).error
    assert run.tags["dagster/will_retry"] == "false"  # though it may: it would be refused again
    assert not (daemon.home.refs_dir / "nightly_bad").exists()


def test_a_second_ui_of_a_warehouse_serves_pages_alone_and_says_who_runs_the_rest(
    deployed: tuple[Daemon, list[dict[str, Any]]], tmp_path: Path
) -> None:
    daemon, _ = deployed
    port = free_port()
    said = tmp_path / "said"
    places = {"MERGEPIPE_HOME": str(daemon.home.root), "DAGSTER_HOME": str(daemon.folder)}
    with said.open("wb") as log:
        second = subprocess.Popen(
            (*ui_command(), "--port", str(port)), env={**os.environ, **places}, stderr=log
        )
    try:
        daemon.wait_for("its pages", lambda: is_served(port))
        command = Path(f"/proc/{second.pid}/cmdline").read_bytes()
        assert b"dagster_webserver" in command
        begun = f"; its sensors run at http://127.0.0.1:{daemon.port}, process "
        assert begun in said.read_text()
    finally:
        second.terminate()
        second.wait(timeout=60)
    # Numbers of processes begin anew at some time: the first one is not always the eldest.
    assert any("dagster dev" in command_of(process) for process in daemon.processes())


def is_served(port: int) -> bool:
    """Whether a webserver answers at a port."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/server_info", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_the_main_pages_say_what_they_should(
    deployed: tuple[Daemon, list[dict[str, Any]]], page: Page
) -> None:
    for name, view in VIEWS.items():
        assert "Traceback" not in show(page, deployed[0], view), name


def test_names_paths_and_warnings_are_shown_letter_by_letter(
    deployed: tuple[Daemon, list[dict[str, Any]]], page: Page
) -> None:
    daemon, _ = deployed
    refused = daemon.runs("merge_nightly_bad", Status.FAILURE)[0]
    for view in odd_views(daemon.home, refused.run_id):
        show(page, daemon, view)


def test_the_pictures_of_the_readme_are_those_of_the_views_and_small() -> None:
    found = {path.stem: path for path in (REPOSITORY / "docs" / "pictures").glob("*.png")}
    assert VIEWS.keys() <= found.keys()
    for name in VIEWS:
        assert found[name].stat().st_size <= MOST_NBYTES
        with Image.open(found[name]) as picture:
            assert picture.width == 1400
