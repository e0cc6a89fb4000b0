"""A cluster of ray on this machine: a head that runs no step, and nodes that run one at a time.

Every node has a home, a directory and, if the system lets us, a mount point of its own: it sees the
warehouse elsewhere than the others do, and not where they do.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from tests.dagster_layer.daemon import free_port
from tests.support.processes import Processes, ancestors, environment, wait_for

_BIN = Path(sys.executable).parent


def lacking() -> str | None:
    """What of the cluster is not installed here."""
    missing = [m for m in ("dagster_ray", "ray") if importlib.util.find_spec(m) is None]
    return f"no module {missing[0]}" if missing else None


class RayCluster(Processes):
    """A head, and nodes by name; what they say is in `folder`."""

    def __init__(self, folder: Path, sockets: Path, settings: dict[str, str]) -> None:
        super().__init__(folder)
        self._head, dashboard = f"127.0.0.1:{free_port()}", free_port()
        self.settings = {**settings, "RAY_ADDRESS": f"http://127.0.0.1:{dashboard}"}
        options = ["--head", "--num-cpus", "0", "--port", self._head.rpartition(":")[2]]
        options += ["--dashboard-port", str(dashboard), "--temp-dir", str(sockets)]
        self._ray("head", options, dict(os.environ), [])
        wait_for("a head", lambda: _answers(dashboard), seconds=180, every_s=0.2)

    def add(self, name: str, home: Path, seen_at: Path | None = None) -> None:
        """Start a node of one step, which sees the warehouse `home` at `seen_at` alone."""
        env = environment(seen_at or home, self._folder / name / "dagster", **self.settings)
        env.pop("RAY_ADDRESS")
        before = []
        if seen_at is not None:
            seen_at.mkdir(parents=True, exist_ok=True)
            mounts = f"mount --bind {home} {seen_at} && mount -t tmpfs none {home}"
            before = ["unshare", "-m", "sh", "-c", f'{mounts} && exec "$@"', "sh"]
        self._ray(name, ["--address", self._head, "--num-cpus", "1"], env, before)
        # One after the other: a node that does not start in 30 s gives up.
        wait_for(f"node {name}", lambda: "runtime started" in self.log(name), seconds=120)

    def kill_worker_of(self, step: int) -> None:
        """SIGKILL the node on which a step runs, and the step: what a power cut does."""
        node = next(p for p in ancestors(step) if _is_node(p))
        for process in (node, step):
            os.kill(process, signal.SIGKILL)

    def _ray(self, name: str, options: list[str], env: dict[str, str], before: list[str]) -> None:
        path = f"{_BIN}{os.pathsep}{env['PATH']}"  # a job of ray is a command: `dagster`
        ray = [*before, sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        memory = ["--object-store-memory", str(80 << 20), "--disable-usage-stats"]
        self.start(name, [*ray, *memory, *options], {**env, "PATH": path})


@contextmanager
def ray_cluster(folder: Path, **settings: str) -> Iterator[RayCluster]:
    """A cluster without nodes yet; none of its processes outlives the context."""
    sockets = Path(tempfile.mkdtemp(prefix="ray-"))  # paths of sockets are short
    try:
        cluster = RayCluster(folder, sockets, {"MERGEPIPE_EXECUTOR": "ray", **settings})
        try:
            yield cluster
        finally:
            cluster.stop()
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


def _is_node(process: int) -> bool:
    return Path(f"/proc/{process}/comm").read_text().strip() == "raylet"


def _answers(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/api/version", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
