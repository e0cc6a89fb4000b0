"""One line per measurement: what was run, by whom, on which machine and commit, and its cost.

Benchmarks append rows to a JSON-lines file as they go, so that an interrupted run keeps what it
has; `report` reads them. It knows nothing of how a row came about.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.lab.bench.measure import Measurement

_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and of what rows were measured; `ram_nbytes` is all there is, `disk` a file system."""

    commit: str
    cpu: str
    cores: int
    ram_nbytes: int
    disk: str
    kernel: str
    family: str

    @staticmethod
    def here(family: Path, disk_of: Path) -> Setting:
        """This commit, this machine, and the file system that holds `disk_of`."""
        return Setting(
            commit=_commit(),
            cpu=_first_value(Path("/proc/cpuinfo"), "model name"),
            cores=len(os.sched_getaffinity(0)),
            ram_nbytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            disk=filesystem(disk_of),
            kernel=os.uname().release,
            family=family.name,
        )


@dataclass(frozen=True, slots=True)
class Needed:
    """What a merge cannot do without, in bytes."""

    base_nbytes: int
    expert_nbytes: int
    write_nbytes: int


@dataclass(frozen=True, slots=True)
class Spent:
    """Where ours says its time went, in seconds: wall before merging and of merging; of all workers
    together, reading and arithmetic; of the thread that hashes and hands over to the disk.
    """

    before_s: float
    merging_s: float
    read_s: float
    arithmetic_s: float
    write_s: float

    @staticmethod
    def told_by(log: Path) -> Spent:
        """What `merge --json` printed."""
        told = json.loads(log.read_text())
        wall, names = told["time"], ("read_s", "arithmetic_s", "write_s")
        return Spent(wall["before_s"], wall["merging_s"], *(told[n] for n in names))


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement of one contender in one round; `k` experts, load average before it."""

    case: str
    k: int
    who: str
    round: int
    needed: Needed
    cost: Measurement
    load: float
    at: str
    setting: Setting
    spent: Spent | None = None

    @staticmethod
    def from_json(row: dict[str, Any]) -> Row:
        """The row of one line. Raises TypeError or KeyError for a line of another form."""
        parts = {"needed": Needed, "cost": Measurement, "setting": Setting}
        known = {name: kind(**row[name]) for name, kind in parts.items()}
        spent = Spent(**row["spent"]) if row.get("spent") else None
        return Row(**{**row, **known, "spent": spent})


def append(file: Path, row: Row) -> None:
    """Add one line."""
    with open(file, "a") as opened:
        opened.write(json.dumps(asdict(row)) + "\n")


def load(file: Path) -> list[Row]:
    """All rows of a file, in order."""
    return [Row.from_json(json.loads(line)) for line in file.read_text().splitlines()]


def now() -> str:
    """The time of a row, UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _commit() -> str:
    """The commit's short name, with `+` if tracked files were changed since."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(_ROOT), *words], capture_output=True, text=True)
        return done.stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("diff", "HEAD", "--stat") else "")


def _first_value(file: Path, name: str) -> str:
    lines = (line.partition(":") for line in file.read_text().splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "unknown")


def filesystem(path: Path) -> str:
    """The type of the file system that holds `path`."""
    device = path.resolve().stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    return next(_mounts(wanted), "unknown")


def _mounts(wanted: str) -> Iterator[str]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        words = line.split()
        if words[2] == wanted:
            yield words[words.index("-") + 1]
