"""A cluster of celery on this machine: a broker (redis) and workers, each a process of its own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.dagster_layer.daemon import free_port
from tests.support.processes import Processes, environment

#: What docs/executors.md has workers be told: a task is the broker's until it is done.
_WORKER = """
task_acks_late = True
task_reject_on_worker_lost = True
worker_prefetch_multiplier = 1
broker_transport_options = {"visibility_timeout": 20}
"""


def lacking() -> str | None:
    """What of the cluster is not installed here."""
    if shutil.which("redis-server") is None:
        return "redis-server is not installed"
    missing = [m for m in ("dagster_celery", "redis") if importlib.util.find_spec(m) is None]
    return f"no module {missing[0]}" if missing else None


class CeleryCluster(Processes):
    """A broker, and workers by name; what they say is in `folder`."""

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        super().__init__(folder)
        (folder / "dagster_celery_config.py").write_text(_WORKER)
        port = free_port()
        url = f"redis://127.0.0.1:{port}/0"
        self.settings = {**settings, "CELERY_BROKER_URL": url, "CELERY_RESULT_BACKEND": url}
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        self.start("redis", ["redis-server", *options], dict(os.environ))

    def add(self, name: str, home: Path, seen_at: Path | None = None) -> None:
        """Start a worker of one step at a time, whose every step is a new process."""
        assert seen_at is None, "mount points of its own are tried with ray"
        env = environment(home, self._folder / name / "dagster", **self.settings)
        env["PYTHONPATH"] += f"{os.pathsep}{self._folder}"
        command = [sys.executable, "-m", "celery", "-A", "dagster_celery.app", "worker"]
        command += ["-Q", "dagster", "-c", "1", "--max-tasks-per-child", "1", "-n", f"{name}@%h"]
        self.start(name, command, env)


@contextmanager
def celery_cluster(folder: Path, **settings: str) -> Iterator[CeleryCluster]:
    """A cluster without workers yet; none of its processes outlives the context."""
    cluster = CeleryCluster(folder, {"MERGEPIPE_EXECUTOR": "celery", **settings})
    try:
        yield cluster
    finally:
        cluster.stop()
