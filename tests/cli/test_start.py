"""How the command begins, and what it makes before it knows that it is meant."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main

# The command stands beside the interpreter: `make test` does not put the environment on the path.
MERGEPIPE = Path(sys.executable).with_name("mergepipe")


@pytest.mark.parametrize("after_s", [0.02, 0.05, 0.1, 0.2])
def test_ctrl_c_while_the_command_is_loaded_ends_it_without_a_traceback(
    tmp_path: Path, after_s: float
) -> None:
    environment = {**os.environ, "MERGEPIPE_HOME": str(tmp_path / "home")}
    process = subprocess.Popen(
        [MERGEPIPE, "ls"],
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        start_new_session=True,
    )
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    # Python's own start cannot be helped: it ends in what the interpreter says of itself.
    assert "mergepipe_pipeline/cli" not in told
    assert process.returncode in (-signal.SIGINT, 130, 1, 17)


@pytest.mark.parametrize("words", [["ls"], ["sql", "SELECT 1"], ["verify", "--all"], ["gc"]])
def test_commands_that_read_make_no_warehouse(tmp_path: Path, words: list[str]) -> None:
    done = CliRunner().invoke(main, [*words, "--home", str(tmp_path / "typo")])
    assert done.exit_code == 17
    assert "There is no warehouse here" in done.output
    assert not (tmp_path / "typo").exists()


def test_a_folder_of_something_else_is_not_filled(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    done = CliRunner().invoke(main, ["register", str(tmp_path), "--home", str(tmp_path)])
    assert done.exit_code == 10
    assert "This folder is no warehouse" in done.output
    assert "'config.json' and 1 more" in done.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
