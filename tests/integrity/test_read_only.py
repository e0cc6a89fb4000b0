"""A warehouse that cannot be written is verified all the same."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mergepipe_pipeline.integrity.auditor import SCOPES
from mergepipe_pipeline.storage.journal import Journal
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse


def _may_mount() -> bool:
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(probe, capture_output=True).returncode == 0


@pytest.mark.skipif(not _may_mount(), reason="mounting a folder read-only needs root")
@pytest.mark.parametrize("options", [[], ["--fresh"]], ids=["", "fresh"])
def test_a_read_only_warehouse_is_verified_also_after_a_verification_that_was_killed(
    home: Warehouse, family: Path, options: list[str]
) -> None:
    register(home, family / "base")
    with Journal(home.verified_path("-".join(SCOPES))) as killed:
        killed.record("a file", "as it was")
    before = sorted(home.root.rglob("*"))
    verify = [sys.executable, "-m", "mergepipe_pipeline.cli.main", "verify", "--all", *options]
    steps = (
        f"mount --bind {home.root} {home.root}",
        f"mount -o remount,ro,bind {home.root}",
        shlex.join([*verify, "--home", str(home.root), "--json"]),
    )
    command = ["unshare", "-m", "sh", "-c", " && ".join(steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["ok"]
    assert sorted(home.root.rglob("*")) == before
