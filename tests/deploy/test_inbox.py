"""One bad neighbour in the inbox says why it waits; every other folder is taken."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mergepipe_pipeline.deploy.inbox import InboxEntry, scan_inbox
from mergepipe_pipeline.warehouse import Warehouse
from tests.hostile.corpus import INDEX, write_full, write_sharded


def fifo_index(inbox: Path) -> None:
    folder = write_sharded(inbox / "bad")
    (folder / INDEX).unlink()
    os.mkfifo(folder / INDEX)


NEIGHBOURS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a name of bytes": (
        lambda inbox: write_full(inbox / os.fsdecode(b"b\xff")),
        "b\\udcff",
        "cannot be a name",
    ),
    "a name with a blank": (lambda inbox: write_full(inbox / "b c"), "b c", "cannot be a name"),
    "a name of 200": (lambda inbox: write_full(inbox / ("b" * 200)), "b" * 200, "be a name"),
    "a FIFO as index": (fifo_index, "bad", "a FIFO"),
    "a link to nothing": (lambda inbox: (inbox / "bad").symlink_to("gone"), "bad", "No such file"),
    "a link to itself": (lambda inbox: (inbox / "bad").symlink_to("bad"), "bad", "symbolic links"),
}


@pytest.mark.parametrize("what", NEIGHBOURS)
def test_a_bad_neighbour_is_one_entry_that_says_why(home: Warehouse, what: str) -> None:
    make, name, why = NEIGHBOURS[what]
    write_full(home.inbox / "a")
    make(home.inbox)
    write_full(home.inbox / "z")
    a, bad, z = scan_inbox(home, 0.0)
    assert [(x.name, x.waiting) for x in (a, z)] == [("a", None), ("z", None)]
    assert bad.name == name
    assert why in (bad.waiting or "")
    assert json.dumps([bad.name, bad.token, bad.waiting]).encode().decode()


def test_a_folder_that_goes_while_the_inbox_is_read_stops_no_other(
    home: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "z"):
        write_full(home.inbox / name)
    scandir = os.scandir

    def late(path: str | Path) -> object:
        if Path(path).name == "b" and Path(path).exists():
            Path(path).rename(home.root / "moved")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", late)
    assert [(x.name, x.waiting is None) for x in scan_inbox(home, 0.0)] == [
        ("a", True),
        ("b", False),
        ("z", True),
    ]


def test_a_folder_that_may_not_be_read_stops_no_other(home: Warehouse) -> None:
    for name in ("a", "b", "z"):
        write_full(home.inbox / name)
    (home.inbox / "b").chmod(0)
    code = (
        "from mergepipe_pipeline.deploy.inbox import scan_inbox\n"
        "from mergepipe_pipeline.warehouse import Warehouse\n"
        f"for x in scan_inbox(Warehouse.at({str(home.root)!r}), 0.0): print(x.name, x.waiting)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=_obey_permissions,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "a None",
        "b it cannot be read: Permission denied",
        "z None",
    ]


def _obey_permissions() -> None:
    """Where tests run as root, drop from the bounding set what lets it pass over permissions."""
    libc, drop, override, read_search = ctypes.CDLL(None), 24, 1, 2
    for capability in (override, read_search):
        libc.prctl(drop, capability, 0, 0, 0)


def test_a_token_changes_with_names_sizes_and_times_and_with_nothing_else(home: Warehouse) -> None:
    folder = write_full(home.inbox / "a")

    def token() -> str:
        (landed,) = scan_inbox(home, 0.0)
        return landed.token

    seen = [token()]
    assert token() == seen[0]
    for change in (
        lambda: (folder / "new").write_text("x"),
        lambda: (folder / "new").write_text("xy"),
        lambda: os.utime(folder / "new", ns=(1, 1)),
        lambda: (folder / "new").rename(folder / "newer"),
    ):
        change()
        seen.append(token())
    assert len(set(seen)) == len(seen)


def test_what_is_no_folder_or_is_hidden_is_passed_over(home: Warehouse) -> None:
    (home.inbox / "notes.txt").write_text("x")
    os.mkfifo(home.inbox / "pipe")
    for name in (".hidden", "_hidden"):
        write_full(home.inbox / name)
    assert scan_inbox(home, 0.0) == ()


def test_a_folder_that_was_just_written_waits(home: Warehouse) -> None:
    write_full(home.inbox / "a")
    (landed,) = scan_inbox(home, 60.0)
    assert isinstance(landed, InboxEntry)
    assert "60 s of quiet" in (landed.waiting or "")
