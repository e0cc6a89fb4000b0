"""Runs the command line in a forked child of a warmed-up process, so that a try costs little.

The child is a process of its own: it can be killed, and what is wrong with it harms no other try.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Seconds after which a verb on these tiny models counts as hanging.
HANGS_S = 60.0


@dataclass(frozen=True)
class Done:
    """How a child ended: its exit code (negative: the signal), what it printed, its time."""

    code: int
    out: str
    err: str
    hung: bool
    seconds: float

    @property
    def has_traceback(self) -> bool:
        """Whether it ended in a traceback, or said that it met a defect of its own."""
        return "Traceback (most recent call last)" in self.err or "defect of mergepipe" in self.err


def run(
    args: Sequence[str],
    logs: Path,
    *,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
    kill_after_s: float | None = None,
    hangs_s: float = HANGS_S,
) -> Done:
    """`mergepipe ARGS` in a child; `before` and `after` run in it. `logs` is a folder.

    With `kill_after_s` it gets SIGKILL then, if it still runs.
    """
    logs.mkdir(exist_ok=True)
    out, err = logs / "out", logs / "err"
    child = os.fork()
    if child == 0:
        _be_program(args, out, err, before, after)
    began = time.monotonic()
    if kill_after_s is not None:
        code = _wait(child, kill_after_s)
        if code is None:
            os.kill(child, signal.SIGKILL)
    else:
        code = None
    code = _wait(child, hangs_s) if code is None else code
    hung = code is None
    if code is None:
        os.kill(child, signal.SIGKILL)
        code = -signal.SIGKILL
        os.waitpid(child, 0)
    said, wrong = (p.read_text(errors="replace") if p.exists() else "" for p in (out, err))
    return Done(code, said, wrong, hung, time.monotonic() - began)


def call(function: Callable[..., Any], *given: Any, hangs_s: float = HANGS_S) -> Any:
    """The result of a function called in a child. Raises RuntimeError for what it raised.

    TimeoutError after `hangs_s`.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            answer = (True, function(*given))
        except BaseException:
            answer = (False, traceback.format_exc())
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(write)
    signal.signal(signal.SIGALRM, _late)
    signal.setitimer(signal.ITIMER_REAL, hangs_s)
    try:
        with os.fdopen(read, "rb") as pipe:
            data = pipe.read()
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.waitpid(child, 0)
    if not data:
        raise RuntimeError("the child ended without an answer")
    is_fine, answer = pickle.loads(data)
    if not is_fine:
        raise RuntimeError(answer)
    return answer


def _late(number: int, frame: Any) -> None:
    raise TimeoutError("a child hangs")


def _wait(child: int, seconds: float) -> int | None:
    """The exit code, or None if the child still runs then."""
    until = time.monotonic() + seconds
    pause_s = 0.001
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(min(pause_s, max(0.0, until - time.monotonic())))
        pause_s = min(2 * pause_s, 0.02)
    return None


def _be_program(
    args: Sequence[str],
    out: Path,
    err: Path,
    before: Callable[[], None] | None,
    after: Callable[[], None] | None,
) -> None:
    """The rest of this process is `mergepipe ARGS`."""
    code = 1
    try:
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(i, "rw"[i > 0]) for i in range(3))
        sys.argv = ["mergepipe", *args]
        from mergepipe_pipeline.cli.main import program

        if before is not None:
            before()
        try:
            program()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        else:
            code = 0
        if after is not None:
            after()
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
