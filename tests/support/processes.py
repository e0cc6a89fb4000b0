"""Processes by name, each with a directory and a log of its own; who started them ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
ROOT = Path(__file__).parents[2]


def environment(home: Path, dagster_home: Path, **settings: str) -> dict[str, str]:
    """What a process of ours is started with: its warehouse, its home, and no other settings."""
    dagster_home.mkdir(parents=True, exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MERGEPIPE_", "DAGSTER_"))}
    return {
        **kept,
        "MERGEPIPE_HOME": str(home),
        "DAGSTER_HOME": str(dagster_home),
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        **settings,
    }


def wait_for(
    what: str, look: Callable[[], T | None], seconds: float = 60.0, every_s: float = 0.02
) -> T:
    """The first truth that `look` gives. Raises AssertionError."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := look():
            return found
        time.sleep(every_s)
    raise AssertionError(f"{what} did not happen in {seconds:g} s")


class Processes:
    """What they say is in `folder`, which is made here."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: list[str], env: dict[str, str]) -> None:
        """Start a process in `folder`/`name`, in a group of its own."""
        own = self._folder / name
        own.mkdir(exist_ok=True)
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command,
                cwd=own,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def pid(self, name: str) -> int:
        """The process of this name."""
        return self._processes[name].pid

    def kill_worker_of(self, step: int) -> None:
        """SIGKILL the worker that has started a step's process, and not that process."""
        parents = set(ancestors(step))
        (worker,) = (p for p in self._processes.values() if p.pid in parents)
        worker.send_signal(signal.SIGKILL)
        worker.wait(timeout=20)

    def log(self, name: str) -> str:
        """The end of what a process said."""
        return (self._folder / f"{name}.log").read_text(errors="replace")[-3000:]

    def stop(self) -> None:
        """SIGKILL every process, and what it has started."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=20)


def ancestors(process: int) -> Iterator[int]:
    """The process that started a process, and so on."""
    while process > 1:
        stat = Path(f"/proc/{process}/stat").read_text()
        process = int(stat.rpartition(")")[2].split()[1])
        yield process
