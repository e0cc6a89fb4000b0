"""The short form of every campaign, and the tools they stand on."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.torture import child
from tests.lab.torture.shim import Fault, Shim
from tests.lab.torture.world import make_world

CAMPAIGNS = (
    "faults",
    "kills",
    "flips",
    "hostile",
    "states",
    "hubs",
    "rot",
    "twins",
    "travelling",
    "guests",
)
#: What may be done outside storage: folders of staging, modes, and times of use.
ELSEWHERE = {"mkdir", "chmod", "utime", "unlink"}


def python(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.waits
def test_the_short_form_of_every_campaign_finds_nothing() -> None:
    done = python("tests.lab.torture", "--short")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    rows = [row for row in rows if row and row[0] in CAMPAIGNS]
    assert [row[0] for row in rows] == list(CAMPAIGNS)
    for _, tried, *found, _ in rows:
        assert int(tried) > 5
        assert found == ["0"] * 4


def test_only_storage_writes_renames_links_and_syncs_and_a_kill_costs_nothing(
    tmp_path: Path,
) -> None:
    world, place, trace = make_world(tmp_path / "world"), tmp_path / "place", tmp_path / "trace"
    place.mkdir()
    merge = ["merge", str(world / "full.yml"), "--publish", "--json", "--home", f"{place}/w"]
    killed = python("tests.lab.torture.launcher", str(place), "--fault", "kill:120", "--", *merge)
    assert killed.returncode == -signal.SIGKILL
    done = python(
        *("tests.lab.torture.launcher", str(place), "--trace", str(trace)),
        *("--", *merge, "--out", f"{place}/out"),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ref_version"] == 1
    steps = [line.split("\t") for line in trace.read_text().splitlines()]
    assert {kind for kind, _, _ in steps} >= {"create", "write", "fsync", "rename", "link"}
    strange = {
        (kind, module)
        for kind, module, _ in steps
        if kind not in ELSEWHERE and not module.startswith("storage/")
    }
    assert strange == set()


def write_twice(root: Path, fault: Fault) -> list[int | None]:
    """What two writes of four bytes in a process with a fault say: an errno, or nothing."""
    shim = Shim(root, fault)
    shim.install()
    said: list[int | None] = []
    for name in ("a", "b"):
        try:
            (root / name).write_bytes(b"four")
            said.append(None)
        except OSError as error:
            said.append(error.errno)
    (root / "a").unlink(missing_ok=True)
    return said


@pytest.mark.parametrize(
    ("fault", "said", "left"),
    [
        (Fault("error", 1), [errno.ENOSPC, None], {"b": b"four"}),
        (Fault("full", 1), [errno.ENOSPC, errno.ENOSPC], {}),
        (Fault("tear", 2), [None, errno.EDQUOT], {"b": b""}),
        (Fault("error", 99), [None, None], {"b": b"four"}),
    ],
)
def test_a_fault_strikes_where_it_is_asked_to(
    tmp_path: Path, fault: Fault, said: list[int | None], left: dict[str, bytes]
) -> None:
    assert child.call(write_twice, tmp_path, fault) == said
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == left


@pytest.mark.parametrize(("kind", "left"), [("kill", b""), ("cut", b"fo")])
def test_the_process_ends_before_a_step_or_in_the_middle_of_it(
    tmp_path: Path, kind: str, left: bytes
) -> None:
    with pytest.raises(RuntimeError, match="without an answer"):
        child.call(write_twice, tmp_path, Fault(kind, 1))
    assert (tmp_path / "a").read_bytes() == left
    assert os.listdir(tmp_path) == ["a"]
