"""The command `ui` before it becomes Dagster's process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.deploy.instance import SETTINGS
from tests.dagster_layer.daemon import free_port


def test_an_occupied_port_is_said_before_anything_is_made_or_started(tmp_path: Path) -> None:
    pytest.importorskip("dagster_webserver")
    program, home = (sys.executable, "-m", "mergepipe_pipeline.cli.main"), tmp_path / "warehouse"
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"http://127.0.0.1:{other.getsockname()[1]}"
        words = ("--home", str(home), "ui", "--port", address.rpartition(":")[2])
        done = subprocess.run((*program, *words), capture_output=True, text=True, timeout=60)
    assert done.returncode == 10
    assert address in done.stderr
    assert "Address already in use" in done.stderr
    assert "--port 3001" in done.stderr
    assert not home.exists()


def test_a_name_with_two_addresses_of_which_one_is_occupied_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("dagster_webserver")
    started: list[object] = []
    monkeypatch.setattr(os, "execve", lambda *words: started.append(words))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        places = [(socket.AF_INET, place) for place in (("127.0.0.2", port), ("127.0.0.1", port))]
        found = [(family, socket.SOCK_STREAM, 6, "", place) for family, place in places]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        words = ["--home", str(tmp_path / "w"), "ui", "--host", "two", "--port", str(port)]
        done = CliRunner().invoke(main, words)
    assert (done.exit_code, started) == (10, [])
    assert "Address already in use" in done.stderr


@pytest.mark.parametrize(
    ("host", "is_said"),
    [("127.0.0.1", False), ("localhost", False), ("127.0.0.9", False), ("0.0.0.0", True)],
)
def test_an_address_that_other_machines_may_reach_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, is_said: bool
) -> None:
    pytest.importorskip("dagster_webserver")
    monkeypatch.setattr(os, "execve", lambda *words: None)
    words = ["--home", str(tmp_path / "w"), "ui", "--host", host, "--port", str(free_port())]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert ("has no login" in done.stderr) == is_said


def test_the_settings_are_those_of_the_instance_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("dagster_webserver")
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda *words: started.append(words[-1]))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "instance"))
    words = ["--home", str(tmp_path / "warehouse"), "ui", "--port", str(free_port())]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    (environment,) = started
    settings = Path(environment["DAGSTER_HOME"]) / SETTINGS.name
    # Without them nothing is limited, and runs that were killed as they began are never ended.
    assert settings.read_bytes() == SETTINGS.read_bytes()
