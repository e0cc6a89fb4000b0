"""A real `dagster-daemon` over a warehouse: with its code server, its runs, and its own end.

All its processes share a session, by which they are killed: one of a kind, or all at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, wraps
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import dagster as dg
import yaml
from dagster import DagsterRunStatus as Status

from mergepipe_pipeline.assets.experts import EXPERT_INDEX
from mergepipe_pipeline.warehouse import Warehouse

P = ParamSpec("P")
T = TypeVar("T")
REPOSITORY = Path(__file__).parents[2]
#: Makes daemons quick; Dagster's own pace is 5 s.
QUICK = REPOSITORY / "tests" / "support" / "quick_daemon"
ACTIVE = (Status.QUEUED, Status.NOT_STARTED, Status.STARTING, Status.STARTED, Status.CANCELING)
_STEP_START = dg.DagsterEventType.STEP_START
_LAUNCHED = dg.DagsterEventType.PIPELINE_STARTING
_DAEMON = (sys.executable, "-m", "dagster._daemon", "run", "-w")


def asks_again(look: Callable[P, T]) -> Callable[P, T]:
    """Looks up to five times where SQLite finds a database malformed.

    It did so once in hundreds of runs of all tests, though nothing writes to the files but SQLite.
    """

    @wraps(look)
    def patiently(*args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(4):
            try:
                return look(*args, **kwargs)
            except Exception as error:  # of SQLAlchemy, which is Dagster's dependency and not ours
                if "database disk image is malformed" not in str(error):
                    raise
                print(f"asked again: {error}")
                time.sleep(0.5)
        return look(*args, **kwargs)

    return patiently


class Daemon:
    """Starts, kills and asks one daemon over a `workspace`; `ui` starts it with the UI on a free
    port: by `dg dev`, or by `mergepipe ui`.
    """

    def __init__(
        self,
        home: Warehouse,
        *,
        ui: Literal["dg", "mergepipe"] | None = None,
        environment: dict[str, str] | None = None,
        sigint: Any = signal.default_int_handler,
    ) -> None:
        self.workspace = REPOSITORY / "workspace.yaml"
        self.home, self.folder, self._ui = home, home.root / "dagster", ui
        self._sigint = sigint
        self.folder.mkdir(exist_ok=True)
        self.port = free_port()
        self._environment = {
            **os.environ,
            "MERGEPIPE_HOME": str(home.root),
            "DAGSTER_HOME": str(self.folder),
            "MERGEPIPE_UI_URL": f"http://127.0.0.1:{self.port}",
            "MERGEPIPE_INBOX_QUIET_S": "1",
            "MERGEPIPE_SENSOR_INTERVAL_S": "2",
            "PYTHONPATH": f"{QUICK}{os.pathsep}{REPOSITORY}",
            "PYTHONWARNINGS": "ignore",
            **(environment or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._sessions: list[int] = []
        self.settle({})

    def settle(self, changes: dict[str, dict[str, Any]]) -> None:
        """Write dagster.yaml: the repository's, with sections changed. Before `start` only."""
        settings = yaml.safe_load((REPOSITORY / "mergepipe_pipeline" / "dagster.yaml").read_text())
        for section, values in changes.items():
            settings[section] = {**settings.get(section, {}), **values}
        (self.folder / "dagster.yaml").write_text(yaml.safe_dump(settings))

    @property
    def instance(self) -> dg.DagsterInstance:
        """A fresh view of the daemon's storage."""
        return dg.DagsterInstance.from_config(str(self.folder))

    @cached_property
    def _view(self) -> dg.DagsterInstance:
        """One view for all looks of this class: making it takes ten times as long as a look."""
        return self.instance

    def start(self) -> None:
        """Start the processes; what they say goes to `log`."""
        address = ("--host", "127.0.0.1", "--port", str(self.port))
        command = (*_WITH_UI[self._ui](), *address) if self._ui else (*_DAEMON, str(self.workspace))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,  # not the repository: definitions load from any directory
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Where tests run in the background, SIGINT is ignored, and children inherit that.
                preexec_fn=lambda: signal.signal(signal.SIGINT, self._sigint),
            )
        self._sessions.append(self._process.pid)

    @property
    def log(self) -> Path:
        """What the processes wrote."""
        return self.folder / "daemon.log"

    def kill(self) -> None:
        """SIGKILL every process at once: what a power loss does."""
        self._kill(self.processes())
        if self._process:
            self._process.wait(timeout=20)

    def kill_workers(self) -> int:
        """SIGKILL the processes that execute runs; how many there were."""
        workers = [p for p in self.processes() if "spawn_main" in command_of(p)]
        self._kill(workers)
        return len(workers)

    def kill_code_server(self) -> int:
        """SIGKILL the processes that serve definitions; how many there were."""
        servers = [p for p in self.processes() if " grpc " in f"{command_of(p)} "]
        self._kill(servers)
        return len(servers)

    def processes(self) -> list[int]:
        """The living processes of all starts, by their sessions."""
        return [p for p in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._owns(p)]

    @asks_again
    def runs(self, job: str | None = None, *statuses: Status) -> list[dg.DagsterRun]:
        """Runs, oldest first."""
        wanted = dg.RunsFilter(job_name=job, statuses=list(statuses) or None)
        return list(self._view.get_runs(wanted))[::-1]

    def partitions(self, *statuses: Status) -> list[str]:
        """The experts whose index runs have these statuses, oldest first, each as often as run."""
        found = self.runs("index_experts", *statuses)
        return [run.tags["dagster/partition"] for run in found]

    @asks_again
    def indexed(self) -> set[str]:
        """The experts that have been indexed."""
        return self._view.get_materialized_partitions(EXPERT_INDEX)

    @asks_again
    def skips(self, sensor: str, limit: int | None = 20) -> list[str]:
        """What the last ticks of a sensor said, newest first."""
        states = [s for s in self._view.all_instigator_state() if s.name == sensor]
        return [
            tick.skip_reason or ""
            for s in states
            for tick in self._view.get_ticks(s.instigator_origin_id, s.selector_id, limit=limit)
        ]

    @asks_again
    def failures(self, sensor: str) -> list[str]:
        """The errors with which ticks of a sensor ended."""
        states = [s for s in self._view.all_instigator_state() if s.name == sensor]
        return [
            tick.error.to_string()
            for s in states
            for tick in self._view.get_ticks(s.instigator_origin_id, s.selector_id)
            if tick.error
        ]

    @asks_again
    def begun(self, job: str | None = None) -> list[str]:
        """The runs that execute a step now, by id."""
        runs = self._view.get_runs(dg.RunsFilter(job_name=job, statuses=[Status.STARTED]))
        return [r.run_id for r in runs if self._view.all_logs(r.run_id, of_type=_STEP_START)]

    def wait_for(
        self, what: str, look: Callable[[], T | None], seconds: float = 120, every_s: float = 0.5
    ) -> T:
        """The first truth that `look` gives. Raises AssertionError with the log's end."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if found := asks_again(look)():
                return found
            assert self._process is None or self._process.poll() is None, self._said(what)
            time.sleep(every_s)
        raise AssertionError(self._said(what))

    def _said(self, what: str) -> str:
        runs = [(r.job_name, r.status.value, r.tags.get("dagster/partition")) for r in self.runs()]
        tail = self.log.read_text(errors="replace")[-3000:]
        return f"{what} did not happen; runs {runs}; the log ends:\n{tail}"

    def _owns(self, process: int) -> bool:
        try:
            return os.getsid(process) in self._sessions and _is_alive(process)
        except (ProcessLookupError, PermissionError):
            return False

    def _kill(self, processes: Sequence[int]) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        until = time.monotonic() + 20
        while any(map(self._owns, processes)) and time.monotonic() < until:
            time.sleep(0.05)


@contextmanager
def running_daemon(
    home: Warehouse, *, ui: Literal["dg", "mergepipe"] | None = None, **environment: str
) -> Iterator[Daemon]:
    """A daemon that runs; none of its processes outlives the context."""
    daemon = Daemon(home, ui=ui, environment=environment)
    daemon.runs()  # makes the storage: processes that do so at once stand in each other's way
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.kill()


def most_at_once(instance: dg.DagsterInstance, since_s: float = 0.0) -> dict[str, int]:
    """Pool to how many of its runs, created after a time in seconds, had left the queue at once."""
    moments: dict[str, list[tuple[float, int]]] = {}
    for record in instance.get_run_records():
        run = record.dagster_run
        if run.run_op_concurrency and record.create_timestamp.timestamp() >= since_s:
            launched = instance.all_logs(run.run_id, of_type=_LAUNCHED)
            for pool in (run.run_op_concurrency.all_pools or ()) if launched else ():
                ended = (record.end_time or time.time(), -1)
                moments.setdefault(pool, []).extend([(launched[0].timestamp, 1), ended])
    return {
        pool: max(accumulate(step for _, step in sorted(both))) for pool, both in moments.items()
    }


def dg_program() -> str | None:
    """Dagster's program `dg` beside this interpreter; None if it is not installed."""
    return shutil.which("dg", path=str(Path(sys.executable).parent))


def dev_command() -> tuple[str, ...]:
    """What starts daemon, webserver and code server: `dg dev`, or `dagster dev` without `dg`."""
    program = dg_program()
    if program is None:
        return (sys.executable, "-m", "dagster", "dev", "-w", str(REPOSITORY / "workspace.yaml"))
    return (program, "dev", "--target-path", str(REPOSITORY))


def ui_command() -> tuple[str, ...]:
    """`mergepipe ui`, as an installed package starts it."""
    return (sys.executable, "-m", "mergepipe_pipeline.cli.main", "ui")


_WITH_UI = {"dg": dev_command, "mergepipe": ui_command}


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def command_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _is_alive(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
