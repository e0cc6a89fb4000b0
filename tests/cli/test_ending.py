"""How a command ends: signals in order, no traceback whatever happens, text that steers nothing."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from mergepipe_pipeline.cli.common import Console, table, verb
from mergepipe_pipeline.cli.ending import as_error
from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.warehouse import Warehouse

PROGRAM = [sys.executable, "-m", "mergepipe_pipeline.cli.main"]


def call(*words: object) -> Result:
    return CliRunner().invoke(main, [str(w) for w in words])


def test_sigterm_ends_a_merge_with_a_message_and_without_staging(
    tmp_path: Path, recipe_text: Callable[..., str]
) -> None:
    process, home = _begin_merge(tmp_path, recipe_text)
    process.terminate()
    out, err = process.communicate(timeout=30)
    assert process.returncode == 143, err
    assert [line for line in err.splitlines() if not line.startswith("warning: ")] == [
        "error: stopped by SIGTERM; what was finished is kept: run the same command again"
    ]
    assert out == ""
    assert list((home / "staging").iterdir()) == []
    assert list((home / "snapshots").iterdir()) == []


def _begin_merge(
    tmp_path: Path, recipe_text: Callable[..., str], *options: str
) -> tuple[subprocess.Popen[str], Path]:
    """A long merge in a process of its own, in the midst of its first layer."""
    recipe, home = tmp_path / "r.yml", tmp_path / "w"
    recipe.write_text(recipe_text())
    process = subprocess.Popen(
        [*PROGRAM, "merge", str(recipe), "--home", str(home), "--window-size", "16", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(1500):
        if list((home / "staging").glob("merge-*/*")):
            return process, home
        time.sleep(0.01)
    process.kill()
    raise AssertionError(process.communicate())


@pytest.mark.parametrize("stderr", ["full", "closed", "nobody reads"])
def test_work_goes_on_where_nobody_can_be_told_how_it_goes(
    tmp_path: Path, recipe_text: Callable[..., str], stderr: str
) -> None:
    recipe = tmp_path / "r.yml"
    recipe.write_text(recipe_text())
    reading, writing = os.pipe()
    os.close(reading)
    redirected = {"full": "2>/dev/full", "closed": "2>&-", "nobody reads": f"2>&{writing}"}[stderr]
    words = ["--home", str(tmp_path / "w"), "--json"]

    def run(*verb: str) -> tuple[int, dict[str, Any]]:
        command = ["bash", "-c", f'"$@" {redirected}', "bash", *PROGRAM, *verb, *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, pass_fds=[writing])
        return done.returncode, json.loads(done.stdout)

    code, merged = run("merge", str(recipe))
    assert (code, Path(merged["path"]).is_dir()) == (0, True)
    assert run("history", "nobody")[0] == 17
    os.close(writing)


def test_a_machine_is_told_of_a_signal_by_one_json_result(
    tmp_path: Path, recipe_text: Callable[..., str]
) -> None:
    process, _ = _begin_merge(tmp_path, recipe_text, "--json")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert json.loads(out) == {
        "error": {
            "class": "Stopped",
            "what": "stopped by SIGINT; what was finished is kept: run the same command again",
        },
        "exit_code": 130,
    }


def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    code = (
        "import os, signal; signal.signal(signal.SIGHUP, signal.SIG_IGN);"
        "from mergepipe_pipeline.cli.ending import stop_by_signals; stop_by_signals();"
        "os.kill(os.getpid(), signal.SIGHUP); print('lives')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("lives\n", "")


def test_a_second_signal_ends_at_once() -> None:
    code = (
        "import os, signal, time;"
        "from mergepipe_pipeline.cli.ending import *; stop_by_signals()\n"
        "try: os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)\n"
        "except Stopped: os.kill(os.getpid(), signal.SIGINT); time.sleep(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=8)
    assert done.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_a_long_step_of_a_library_and_is_told_as_the_signal(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    query = "select max(sin(range)) from range(1000000000000)"  # takes days, and no memory
    Warehouse.at(tmp_path / "w").ensure().releases.rmdir()  # the command makes it when it begins
    process = subprocess.Popen(
        [*PROGRAM, "sql", query, "--home", str(tmp_path / "w")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not (tmp_path / "w" / "releases").exists():
        time.sleep(0.02)
    time.sleep(0.5)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err.count("\n")) == (code, 1), err
    assert err.startswith(f"error: stopped by {number.name}")


@click.command()
@click.argument("what")
@verb
def broken(console: Console, what: str) -> None:
    """Fails as a defect, a deep file, a short machine or half a character would."""
    if what == "defect":
        raise ZeroDivisionError("1 / 0")
    if what == "memory":
        bytearray(1 << 60)
    if what == "depth":
        json.loads("[" * 100_000)
    if what == "text":
        "\udcff".encode()
    if what == "warnings":
        logging.getLogger("mergepipe").warning("%s is damaged", "x\x1b[2J")
        console.show(
            {"x": float("nan"), "y": "\ud800\x9b"}, "a\x1b]0;b", *table(("n",), [("c\n|",)])
        )


@pytest.mark.parametrize(
    ("what", "code", "told"),
    [
        ("defect", 70, "found     ZeroDivisionError: 1 / 0\n  next      this is a defect of"),
        ("memory", 24, "The system gives no more memory or threads\n"),
        ("depth", 10, "A file is nested too deeply\n"),
        ("text", 10, "A text is not Unicode\n"),
    ],
)
def test_a_command_never_ends_in_a_traceback_unless_it_is_asked_for(
    what: str, code: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = CliRunner().invoke(broken, [what])
    assert result.exit_code == code
    assert told.lower() in result.stderr.lower()
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    monkeypatch.setenv("MERGEPIPE_TRACEBACK", "1")
    assert "Traceback (most recent call last)" in CliRunner().invoke(broken, [what]).stderr


def test_what_is_shown_and_warned_of_steers_no_terminal() -> None:
    result = CliRunner().invoke(broken, ["warnings"])
    assert result.stderr == "warning: x\\x1b[2J is damaged\n"
    assert result.stdout.splitlines() == ["a\\x1b]0;b", "n", "----", "c\\n|"]
    result = CliRunner().invoke(broken, ["warnings", "--json"])
    assert json.loads(result.stdout) == {"x": None, "y": "\ud800\x9b"}
    assert "NaN" not in result.stdout


@pytest.mark.parametrize("failing", ["bytearray(1 << 60)", "exec('raise SystemError')"])
def test_memory_that_ends_outside_of_any_verb_is_an_error_and_no_traceback(failing: str) -> None:
    code = (
        "import click; from mergepipe_pipeline.cli.main import main, program;"
        f"main.add_command(click.Command('outside', callback=lambda: {failing})); program()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "outside"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 24, done.stderr
    assert done.stderr.startswith("error: The system gives no more memory or threads\n")
    assert "Traceback" not in done.stderr


def test_of_a_long_text_about_memory_the_line_that_says_it_is_told() -> None:
    advice = "Importing NumPy failed.\nRead this.\nOriginal: x.so: failed to map segment from y\n"
    told = str(as_error(ImportError(advice)))
    assert "Found Original: x.so: failed to map segment from y. Next: raise" in told


def test_a_machine_short_of_memory_is_an_error_and_no_traceback(
    tmp_path: Path, recipe_text: Callable[..., str]
) -> None:
    recipe = tmp_path / "r.yml"
    recipe.write_text(recipe_text())

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))

    done = subprocess.run(
        [*PROGRAM, "merge", str(recipe), "--home", str(tmp_path / "w")],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 24, done.stderr
    warning, told = done.stderr.splitlines()[0], done.stderr
    assert warning.startswith("warning: `ulimit -v` allows 512 MiB of address space: below 640 MiB")
    assert "The system gives no more memory or threads\n" in told
    assert "Traceback" not in told


HALF = b"x\xff"


@pytest.mark.parametrize(
    "words",
    [
        ["register", HALF],
        ["register", b".", b"--name", HALF],
        ["analyze", HALF],
        ["check", HALF],
        ["merge", HALF, b"--out", HALF],
        ["publish", HALF, b"--ref", HALF],
        ["history", HALF],
        ["rollback", HALF, b"--reason", HALF],
        ["verify", HALF],
        ["explain", HALF],
        ["sql", HALF],
        [HALF],
    ],
    ids=lambda words: str(words[0]),
)
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_words_that_are_not_utf8_are_answered(
    tmp_path: Path, words: list[str | bytes], options: list[str]
) -> None:
    decoded = [os.fsdecode(w) for w in words]
    result = call(*decoded, *options, "--home", tmp_path / "w")
    assert result.exit_code not in (0, 1, 70), result.output
    result.stderr.encode()


def test_a_reason_that_is_not_utf8_changes_nothing(
    tmp_path: Path, recipe_text: Callable[..., str]
) -> None:
    recipe, home = tmp_path / "r.yml", tmp_path / "w"
    recipe.write_text(recipe_text(experts=1))
    done = json.loads(call("merge", recipe, "--home", home, "--json").stdout)
    words = ("publish", done["snapshot_id"], "--ref", "live", "--home", home, "--reason")
    result = call(*words, os.fsdecode(HALF))
    assert (result.exit_code, "A text is not Unicode" in result.stderr) == (10, True)
    assert call("history", "live", "--home", home).exit_code == 17
    assert call(*words, "a\x1b[2J|b").exit_code == 0
    assert "\x1b" not in call("history", "live", "--home", home).stdout


@pytest.mark.parametrize(
    "place", ["", "~no-such-user/w", "s3://bucket/w", "GS:/bucket/w", "file:///w", "at/hf:/org/w"]
)
def test_a_warehouse_without_a_place_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("ls", "--home", place).exit_code == 10
    assert call("--home", place, "ls").exit_code == 10
    assert call("demo", "--home", place).exit_code == 10
    monkeypatch.setenv("MERGEPIPE_HOME", place)
    result = call("ls")
    assert result.exit_code == 10
    assert (
        f"The warehouse has no place\n  where     --home or MERGEPIPE_HOME, {place!r}"
        in result.stderr
    )
    assert ".." not in result.stderr
    assert list(tmp_path.iterdir()) == []
