"""A child is bounded in time and output, and nothing that it started outlives it or us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mergepipe_pipeline.quality.child import KEPT_NBYTES, AbandonedError, Ended, run_child

#: Starts a process that would live for a minute in the group, and writes its number.
NURSE = "import subprocess as s; p = s.Popen(['sleep', '60']); print(p.pid, flush=True)"
WAITS = f"{NURSE}; p.wait()"
RUNS = """
import sys
from pathlib import Path
from mergepipe_pipeline.quality.child import run_child
run_child([sys.executable, "-c", sys.argv[1]], folder=Path("."), environment={}, timeout_s=60)
"""


def run(code: str, timeout_s: float = 30.0, folder: Path = Path()) -> Ended:
    command = [sys.executable, "-I", "-S", "-c", code]
    return run_child(command, folder=folder, environment=os.environ, timeout_s=timeout_s)


def is_gone(number: int) -> bool:
    """Whether a process has ended; who waits for it may not have looked yet."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def within(seconds: float, happens: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + seconds
    while not (done := happens()) and time.monotonic() < end_s:
        time.sleep(0.02)
    return done


def test_exit_code_output_and_folder_are_the_commands_own(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd()); print('no', file=sys.stderr); sys.exit(3)"
    ended = run(code, folder=tmp_path)
    assert (ended.code, ended.stdout) == (3, f"{tmp_path}\n".encode())
    assert sorted(ended.output.splitlines()) == sorted([str(tmp_path).encode(), b"no"])


def test_no_shell_reads_the_command(tmp_path: Path) -> None:
    ended = run_child(
        ["echo", "$HOME; touch x", "*"], folder=tmp_path, environment=os.environ, timeout_s=30
    )
    assert ended.stdout == b"$HOME; touch x *\n"
    assert list(tmp_path.iterdir()) == []


def test_a_child_that_dies_of_a_signal_says_which() -> None:
    assert run("import os; os.kill(os.getpid(), 11)").code == -signal.SIGSEGV


def test_a_command_that_is_not_there_ends_as_a_shell_would_say_it() -> None:
    ended = run_child(["/no/such"], folder=Path(), environment=os.environ, timeout_s=30)
    assert ended.code == 127
    assert b"/no/such: No such file" in ended.output


def test_a_child_that_nobody_wants_the_result_of_any_more_is_killed_with_what_it_started(
    tmp_path: Path,
) -> None:
    read, write = os.pipe()
    number = tmp_path / "number"
    code = f"{NURSE}; open({str(number)!r}, 'w').write(str(p.pid)); p.wait()"
    command = [sys.executable, "-I", "-S", "-c", code]

    def close() -> None:
        within(20, lambda: number.exists() and bool(number.read_text()))
        os.close(write)

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(AbandonedError):
        run_child(command, folder=Path(), environment=os.environ, timeout_s=60, stop=read)
    closer.join()
    os.close(read)
    assert within(5, lambda: is_gone(int(number.read_text())))


def test_time_over_kills_the_child_and_what_it_started() -> None:
    began_s = time.monotonic()
    ended = run(WAITS, timeout_s=1.0)  # of which a busy machine takes some to start it
    assert ended.code is None
    assert time.monotonic() - began_s < 10
    assert within(5, lambda: is_gone(int(ended.stdout)))


def test_what_a_child_leaves_behind_ends_with_it_and_keeps_nobody_waiting() -> None:
    ended = run(NURSE)
    assert ended.code == 0
    assert within(5, lambda: is_gone(int(ended.stdout)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_child_does_not_outlive_who_runs_it(number: signal.Signals, tmp_path: Path) -> None:
    told = tmp_path / "number"
    code = f"{NURSE}; open({str(told)!r}, 'w').write(f'{{p.pid}} '); p.wait()"
    # Python ignores SIGINT where the shell of the tests does.
    start = "import signal; signal.signal(2, signal.default_int_handler)\n"
    runner = subprocess.Popen([sys.executable, "-c", start + RUNS, code], stderr=subprocess.DEVNULL)
    try:
        assert within(30, lambda: told.exists() and told.read_text().endswith(" "))
        runner.send_signal(number)
        runner.wait(30)
        assert within(5, lambda: is_gone(int(told.read_text())))
    finally:
        runner.kill()
        runner.wait()


@pytest.mark.parametrize("beyond", [0, 1, 5, KEPT_NBYTES, KEPT_NBYTES + 5])
def test_a_last_line_is_whole_wherever_what_is_kept_of_the_start_ends(beyond: int) -> None:
    last = '{"good": 0.25}'
    before = KEPT_NBYTES + beyond - len(last) - 2
    ended = run(f"print('x' * {before}); print({last!r})")
    assert ended.stdout.split(b"\n")[-2:] == [last.encode(), b""]


def test_of_a_long_output_start_and_end_are_kept() -> None:
    ended = run(f"print('first'); print('x' * {4 * KEPT_NBYTES}); print('last')")
    assert ended.output.startswith(b"first\nxx")
    assert ended.output.endswith(b"xx\nlast\n")
    assert b"bytes are left out" in ended.output
    assert ended.stdout.endswith(b"\nlast\n")
    assert len(ended.output) < 2 * KEPT_NBYTES + 100
