"""A collection and a working process that meet at the worst moment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mergepipe_pipeline.execution.plan_leases import lease_run, run_lives
from mergepipe_pipeline.snapshots import collection as gc
from mergepipe_pipeline.storage import locks
from mergepipe_pipeline.verbs.gc import collect
from mergepipe_pipeline.warehouse import Warehouse


def test_a_lease_is_there_only_while_it_is_locked(
    home: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, seen = locks._flock, list[tuple[Path, ...]]()

    def look_first(handle: int, how: int) -> bool:
        with monkeypatch.context() as context:
            context.setattr(locks, "_flock", flock)
            seen.append(home.leases.living(0).dead)
        return flock(handle, how)

    monkeypatch.setattr(locks, "_flock", look_first)
    with lease_run(home, "r"):
        assert run_lives(home, "r")
    assert seen == [()] * len(seen) != []


def test_what_its_maker_locks_after_a_collection_looked_at_it_stays(
    home: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, freed_nbytes = home.plans / ".x.json.q1.tmp", gc._freed_nbytes
    path.write_bytes(b"half")
    handle = os.open(path, os.O_RDWR)

    def lock_now(paths: Any) -> int:
        assert locks.lock(handle)
        return freed_nbytes(paths)

    monkeypatch.setattr(gc, "_freed_nbytes", lock_now)
    collect(home, older_than_s=0)
    assert path.exists()
    os.close(handle)
    monkeypatch.undo()
    collect(home, older_than_s=0)
    assert not path.exists()


def test_what_killed_writers_left_goes_from_every_folder(home: Warehouse) -> None:
    left = [home.arrival_path("a"), home.leases_dir / "run.json"]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.with_name(f".{path.name}.q1.tmp").write_bytes(b"half")
    collect(home, older_than_s=0)
    assert list(home.root.rglob("*.tmp")) == []
