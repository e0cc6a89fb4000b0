"""A cluster of dask on this machine: a scheduler and workers, each a process of its own.

Every worker has a home, a directory and, if the system lets us, a mount point of its own: it sees
the warehouse elsewhere than the others do, and not where they do.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from tests.support.processes import Processes

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
_DASK = [sys.executable, "-m", "dask"]


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


class Cluster(Processes):
    """A scheduler at `address`, and its workers by name; what they say is in `folder`."""

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        super().__init__(folder)
        file = folder / "scheduler.json"
        options = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
        command = [*_DASK, "scheduler", *options, "--scheduler-file", str(file)]
        self.start("scheduler", command, dict(os.environ))
        self.address = str(wait_for("a scheduler", lambda: _address(file)))
        self.settings = {**settings, "MERGEPIPE_DASK_SCHEDULER": self.address}

    def add(self, name: str, home: Path, seen_at: Path | None = None) -> None:
        """Start a worker of one thread, which sees the warehouse `home` at `seen_at` alone."""
        own = self._folder / name
        env = environment(seen_at or home, own / "dagster", **self.settings)
        options = ["--name", name, "--nthreads", "1", "--no-nanny", "--no-dashboard"]
        options += ["--local-directory", str(own), "--death-timeout", "60"]
        command = [*_DASK, "worker", self.address, *options]
        if seen_at is not None:
            seen_at.mkdir(parents=True, exist_ok=True)
            mounts = f"mount --bind {home} {seen_at} && mount -t tmpfs none {home}"
            command = ["unshare", "-m", "sh", "-c", f"{mounts} && exec {shlex.join(command)}"]
        self.start(name, command, env)


@contextmanager
def running_cluster(folder: Path, **settings: str) -> Iterator[Cluster]:
    """A cluster without workers yet; none of its processes outlives the context."""
    cluster = Cluster(folder, {"MERGEPIPE_EXECUTOR": "dask", **settings})
    try:
        yield cluster
    finally:
        cluster.stop()


def _address(file: Path) -> str | None:
    with suppress(OSError, ValueError):
        return str(json.loads(file.read_text())["address"])
    return None
