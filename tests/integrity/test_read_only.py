"""A warehouse that cannot be written is verified, collected on trial and replayed all the same."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mergepipe_pipeline.storage.atomic import remove_tree
from mergepipe_pipeline.verbs.gc import collect
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run


def _may_mount() -> bool:
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(probe, capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not _may_mount(), reason="mounting a folder read-only needs root")


def read_only(
    home: Warehouse, *words: str, temporary: Path | None = None, room: str | None = None
) -> tuple[int, dict[str, Any]]:
    """A command on a warehouse that is mounted read-only: its exit status and its JSON.

    `room` is the size of a disk of its own for the `temporary` folder.
    """
    command = [sys.executable, "-m", "mergepipe_pipeline.cli.main", *words]
    small = [f"mount -t tmpfs -o size={room} none {temporary}"] if room else []
    steps = (
        f"mount --bind {home.root} {home.root}",
        f"mount -o remount,ro,bind {home.root}",
        *small,
        shlex.join([*command, "--home", str(home.root), "--json"]),
    )
    environment = {**os.environ, **({"TMPDIR": str(temporary)} if temporary else {})}
    before = sorted(home.root.rglob("*"))
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", " && ".join(steps)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert sorted(home.root.rglob("*")) == before
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_read_only_warehouse_is_verified(home: Warehouse, family: Path) -> None:
    register(home, family / "base")
    status, found = read_only(home, "verify", "--all")
    assert status == 0, found
    assert found["ok"]


@pytest.mark.parametrize("older", [False, True], ids=["", "of a version with fewer folders"])
def test_gc_says_of_a_read_only_warehouse_what_it_would_remove(
    home: Warehouse, recipe_text: Callable[..., str], older: bool
) -> None:
    made = run(home, recipe_text())
    remove_tree(made.snapshot.path)  # its layers are nobody's now
    (home.staging / "killed").mkdir()
    (home.staging / "killed" / "part").write_bytes(bytes(1000))
    if older:
        for folder in (home.evaluations, home.leases_dir):
            remove_tree(folder)
    status, found = read_only(home, "gc", "--dry-run", "--older-than", "0")
    assert status == 0, found
    paths = {str(Path(path).relative_to(home.root)).partition("/")[0] for path in found["paths"]}
    assert paths == {"actions", "objects", "stages", "staging"}
    assert found["nbytes"] > 1000
    status, refused = read_only(home, "gc", "--older-than", "0")
    assert status != 0
    assert "Read-only file system" in refused["error"]["found"]
    assert collect(home.ensure(), older_than_s=0).paths == tuple(found["paths"])


def test_a_merge_of_a_read_only_warehouse_is_replayed_in_a_temporary_folder(
    home: Warehouse, recipe_text: Callable[..., str], tmp_path: Path
) -> None:
    made = run(home, recipe_text(), budget="50%")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    status, found = read_only(home, "replay", made.snapshot.snapshot_id, temporary=temporary)
    assert status == 0, found
    assert found["same_bits"]
    assert found["snapshot_id"] == made.snapshot.snapshot_id
    assert list(temporary.iterdir()) == []


def test_a_replay_whose_temporary_folder_has_no_room_says_how_to_give_another(
    home: Warehouse, recipe_text: Callable[..., str], tmp_path: Path
) -> None:
    made = run(home, recipe_text())
    nbytes = sum(shard.nbytes for shard in made.snapshot.manifest.shards)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    status, refused = read_only(
        home, "replay", made.snapshot.snapshot_id, temporary=temporary, room=str(nbytes // 2)
    )
    error = refused["error"]
    assert (status, error["class"]) == (20, "StorageFullError")
    assert error["what"] == "The disk has no room for the result"
    assert str(temporary) in error["where"]
    assert "TMPDIR" in error["next_step"]
    assert "--keep" in error["next_step"]
    status, found = read_only(
        home,
        *("replay", made.snapshot.snapshot_id, "--keep", str(tmp_path / "kept")),
        temporary=temporary,
        room=str(nbytes // 2),
    )
    assert status == 0, found
