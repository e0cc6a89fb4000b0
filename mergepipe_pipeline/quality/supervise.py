"""Runs a command in this process's group, and kills the group when its parent is gone.

A script of the standard library alone, run as `python -I -S supervise.py STATUS COMMAND…`, so that
an evaluator outlives neither its time-out nor whoever started it, even one that is killed. Its
standard input is a pipe that the parent keeps open; the exit code is written to the descriptor
STATUS, negative for a signal, as text.
"""

import os
import signal
import subprocess
import sys
import threading


def _watch() -> None:
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


def _run(status: int, command: list[str]) -> None:
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os.write(status, b"127")
        return
    threading.Thread(target=_watch, daemon=True).start()
    os.write(status, str(child.wait()).encode())


if __name__ == "__main__":
    _run(int(sys.argv[1]), sys.argv[2:])
