"""The command `ui` before it becomes Dagster's process."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest


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
