"""Processes by name, each with a directory and a log of its own; who started them ends them."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path


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

    def kill(self, name: str) -> None:
        """SIGKILL a process, and nothing that it has started."""
        self._processes[name].send_signal(signal.SIGKILL)
        self._processes[name].wait(timeout=20)

    def log(self, name: str) -> str:
        """The end of what a process said."""
        return (self._folder / f"{name}.log").read_text(errors="replace")[-3000:]

    def stop(self) -> None:
        """SIGKILL every process, and what it has started."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=20)
