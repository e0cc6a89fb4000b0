"""A warehouse of a group: one user goes on with what another made; a stranger is told."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mergepipe_pipeline.jit import kernel_cache

#: Numbers of users and of their group, of which the machine need not know.
ANN, BEN, TEAM, OTHERS = 60001, 60002, 60003, 60004
#: Programs of this interpreter may lie where only root looks.
_READS = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
_PROGRAM = "from mergepipe_pipeline.cli.start import program; program()"
ROOT = Path(__file__).parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]


def _as(user: int, group: int, *options: str) -> list[str]:
    names = [f"--reuid={user}", f"--regid={group}", "--clear-groups"]
    return ["setpriv", *names, *options, sys.executable]


@pytest.fixture(scope="module")
def options() -> tuple[str, ...]:
    """How another user runs this interpreter."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can be two users, by setpriv")
    for found in (_READS, ()):
        probe = [*_as(ANN, TEAM, *found), "-c", "import numpy, torch, duckdb"]
        if subprocess.run(probe, cwd=ROOT, capture_output=True).returncode == 0:
            return found
    pytest.skip("another user cannot run this interpreter")


@pytest.fixture
def place(family: Path, tmp_path: Path) -> Path:
    """A folder that all may enter, with a family of models, a recipe and compiled kernels."""
    os.chmod(tmp_path, 0o755)
    shutil.copytree(family, tmp_path / "family")
    shutil.copytree(kernel_cache(), tmp_path / "cache" / "mergepipe" / kernel_cache().name)
    for path in tmp_path.rglob("*"):
        path.chmod(0o777 if path.is_dir() and "cache" in path.parts else 0o755)
    (tmp_path / "r.yml").write_text(
        "merge_method: task_arithmetic\nbase_model: base\n"
        "models: [{model: math, parameters: {weight: 0.5}}]\n"
    )
    return tmp_path


@pytest.fixture
def run(place: Path, options: tuple[str, ...]) -> Run:
    """Runs the command line in the warehouse, as a user with the usual umask."""

    def call(
        user: int, *words: str, group: int = TEAM, code: int = 0
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*_as(user, group, *options), "-c", _PROGRAM, *words],
            cwd=place,
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(ROOT),
                "HOME": str(place),
                "XDG_CACHE_HOME": str(place / "cache"),
                "MERGEPIPE_HOME": str(place / "warehouse"),
            },
            umask=0o022,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return call


def told(done: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(done.stdout)


def make_warehouse(place: Path, mode: int) -> Path:
    """The folder of a warehouse, of Ann and her group."""
    folder = place / "warehouse"
    folder.mkdir()
    os.chown(folder, ANN, TEAM)
    folder.chmod(mode)
    return folder


def test_two_users_of_a_group_merge_publish_and_collect_in_one_warehouse(
    place: Path, run: Run
) -> None:
    folder = make_warehouse(place, 0o2775)
    for name, model in (("base", "base"), ("math", "expert_00")):
        run(ANN, "register", f"family/{model}", "--name", name)
    first = told(run(ANN, "merge", "r.yml", "--publish", "--json"))
    again = told(run(BEN, "merge", "r.yml", "--publish", "--json"))
    assert again["snapshot_id"] == first["snapshot_id"]
    assert again["layers_reused"] == first["layers_executed"] > 0

    (place / "r.yml").write_text((place / "r.yml").read_text().replace("0.5", "0.25"))
    run(BEN, "merge", "r.yml", "--publish")
    run(ANN, "rollback", "r")
    for user in (ANN, BEN):
        assert len(told(run(user, "history", "r", "--json"))) >= 3
        run(user, "gc", "--older-than", "0")
        run(user, "verify", "r")

    found = {p: p.lstat() for p in folder.rglob("*")}
    assert {s.st_gid for s in found.values()} == {TEAM}
    assert {s.st_uid for s in found.values()} == {ANN, BEN}
    for path, status in found.items():
        # Layers are read-only for everybody.
        wanted = 0o070 if stat.S_ISDIR(status.st_mode) else 0o060
        if path.suffix not in {".safetensors", ""} or stat.S_ISDIR(status.st_mode):
            assert status.st_mode & wanted == wanted, path


def test_a_user_of_no_group_of_a_warehouse_is_told_whose_it_is(place: Path, run: Run) -> None:
    folder = make_warehouse(place, 0o755)
    run(ANN, "register", "family/base", "--name", "base")
    refused = run(BEN, "register", "family/expert_00", "--name", "math", code=10).stderr
    assert "belongs to another user" in refused
    assert f"owner {ANN}, group {TEAM}, mode 0755" in refused
    assert str(folder) in refused
    assert "docs/platform.md, Permissions" in refused
    assert "base" in run(BEN, "ls", group=OTHERS).stdout
