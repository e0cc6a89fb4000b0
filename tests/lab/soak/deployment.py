"""The deployment under test, on a port of its own: `dagster dev`, or its daemon and UI apart."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import cycle
from pathlib import Path
from urllib.request import Request, urlopen

from mergepipe_pipeline.warehouse import Warehouse

Kind = tuple[tuple[str, ...], ...]
ROOT = Path(__file__).parents[3]
WORKSPACE = ROOT / "workspace.yaml"
_RELOAD = """mutation Reload($name: String!) {
  reloadRepositoryLocation(repositoryLocationName: $name) {
    __typename
    ... on WorkspaceLocationEntry {
      locationOrLoadError { __typename ... on PythonError { message } }
    }
  }
}"""
_START_S = 150.0
#: What one start starts: the commands of its processes, which each take a workspace.
DEV: Kind = (("dagster", "dev"),)
APART: Kind = (("dagster._daemon", "run"), ("dagster_webserver",))
DAEMON: Kind = (("dagster._daemon", "run"),)
#: A word of a process's command line to what the process is; the first that fits.
_ROLES = {
    "dagster._daemon": "daemon",
    "dagster_webserver": "webserver",
    "code-server": "code server",
    "grpc": "code server",
    "multiprocessing": "run worker",
    " dev ": "dev",
}


class Deployment:
    """Every process of one instance, known by the warehouse that its environment names.

    Each start takes the next of `kinds`. `quick`: sensors are looked at each second, not each 5 s.
    """

    def __init__(
        self,
        home: Warehouse,
        log: Path,
        environment: dict[str, str],
        port: int = 0,
        *,
        kinds: Sequence[Kind] = (DEV, APART),
        quick: bool = False,
        workspace: Path = WORKSPACE,
    ) -> None:
        self.home, self.dagster_home, self._log = home, home.dagster_home, log
        self.dagster_home.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "mergepipe_pipeline" / "dagster.yaml", self.dagster_home)
        self._port, self._kinds, self._workspace = port, cycle(kinds), str(workspace)
        self._served: int | None = None
        self._mark = f"MERGEPIPE_HOME={home.root}"
        mine = {"MERGEPIPE_HOME": str(home.root), "DAGSTER_HOME": str(self.dagster_home)}
        given = {k: v for k, v in os.environ.items() if not k.startswith("MERGEPIPE_")}
        path = [str(ROOT / "tests" / "support" / "quick_daemon")] * quick + [str(ROOT)]
        self._plain = given | mine | {"PYTHONPATH": os.pathsep.join(path)}
        self._environment = self._plain | environment

    def start(self) -> None:
        """Start the processes of the next kind; returns at once."""
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", self._port))
            port = free.getsockname()[1]
        self._served = None
        for command in next(self._kinds):
            serves = command[0] != "dagster._daemon"
            self._served = port if serves else self._served
            args = ["-h", "127.0.0.1", "-p", str(port)] if serves else []
            with self._log.open("ab") as log:
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-m", *command, "-w", self._workspace, *args],
                    cwd=ROOT,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    # A shell in the background ignores SIGINT, and children inherit that.
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
                )

    def reload(self, location: str) -> None:
        """Press the button Reload of a code location, where a UI runs. Raises AssertionError."""
        body = json.dumps({"query": _RELOAD, "variables": {"name": location}}).encode()
        end = time.monotonic() + _START_S
        while self._served is not None:
            address = f"http://127.0.0.1:{self._served}/graphql"
            asked = Request(address, body, {"Content-Type": "application/json"})
            try:
                with urlopen(asked, timeout=_START_S) as answer:
                    told = answer.read().decode()
            except OSError:
                assert time.monotonic() < end, f"no UI at {address}"
                time.sleep(1.0)
                continue
            assert '"RepositoryLocation"' in told, told
            return

    def leave_settings(self) -> None:
        """From the next start on every setting is as by default."""
        self._environment = self._plain

    def kill(self, *roles: str) -> None:
        """`kill -9` of every process of these roles, of all without one, until none is left.

        One may start another while it is killed.
        """
        while found := [pid for pid, role in self.processes() if not roles or role in roles]:
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def kill_process(self, pid_of: Callable[[], int | None], wait_s: float = 20.0) -> None:
        """`kill -9` of one process of ours, once its id is known."""
        end = time.monotonic() + wait_s
        while time.monotonic() < end:
            pid = pid_of()
            if pid is not None:
                if pid in dict(self.processes()):
                    os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.1)

    def stop(self, wait_s: float = 20.0) -> None:
        """End everything, by force where asking does not help."""
        found = list(self.processes())
        first = {"dev"} if "dev" in {role for _, role in found} else {"daemon", "webserver"}
        for pid, role in found:
            if role in first:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)
        end = time.monotonic() + wait_s
        while list(self.processes()) and time.monotonic() < end:
            time.sleep(0.2)
        self.kill()

    def processes(self) -> Iterator[tuple[int, str]]:
        """Id and role of each living process."""
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self._mark in (folder / "environ").read_text(errors="replace").split("\0"):
                    line = (folder / "cmdline").read_text(errors="replace").replace("\0", " ")
                    if line:  # none: it is dead already, and nobody has waited for it
                        role = next((r for word, r in _ROLES.items() if word in line), "other")
                        yield int(folder.name), role

    def memory_mib(self) -> dict[str, float]:
        """Resident memory by role, in MiB."""
        found = dict[str, float]()
        for pid, role in self.processes():
            with suppress(OSError):
                text = Path(f"/proc/{pid}/status").read_text()
                kib = next((int(x.split()[1]) for x in text.splitlines() if "VmRSS" in x), 0)
                found[role] = found.get(role, 0.0) + kib / 1024
        return found

    def storage_nbytes(self) -> dict[str, int]:
        """Bytes under DAGSTER_HOME by its first folder: history, schedules, storage, logs."""
        found = dict[str, int]()
        for path in self.dagster_home.rglob("*"):
            with suppress(OSError):
                if path.is_file():
                    top = path.relative_to(self.dagster_home).parts[0]
                    found[top] = found.get(top, 0) + path.stat().st_size
        return found

    def database_nbytes(self) -> int:
        """Bytes of the pages in use in all SQLite files of the instance."""
        return sum(map(_used_nbytes, self.dagster_home.rglob("*.db")))


def _used_nbytes(path: Path) -> int:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=20)) as database:
        pages, free, nbytes = (
            int(database.execute(f"PRAGMA {what}").fetchone()[0])
            for what in ("page_count", "freelist_count", "page_size")
        )
    return (pages - free) * nbytes
