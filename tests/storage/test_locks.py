"""Locks tell whether the maker of a file lives, on file systems of several machines, too."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from mergepipe_pipeline.snapshots.leases import Leases, Need
from mergepipe_pipeline.storage.atomic import locked_file
from mergepipe_pipeline.storage.locks import is_held, probed

_FLOCK = fcntl.flock


def _over_nfs(handle: int, how: int) -> None:
    """flock as nfs(5) has it: who locks alone must have opened for writing, who shares for reading.

    There it becomes a lock of all bytes at the server.
    """
    mode = os.O_ACCMODE & fcntl.fcntl(handle, fcntl.F_GETFL)
    wrong = os.O_RDONLY if how & fcntl.LOCK_EX else os.O_WRONLY
    if mode == wrong:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    _FLOCK(handle, how)


@pytest.fixture
def over_nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks as NFS gives them."""
    monkeypatch.setattr(fcntl, "flock", _over_nfs)


@pytest.mark.usefixtures("over_nfs")
def test_who_lives_is_known_over_nfs(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    with locked_file(path, b"x"):
        assert is_held(path) is True
        path.chmod(0o444)  # another user of the same group
        assert is_held(path) is True
    path.write_bytes(b"x")
    assert is_held(path) is False


@pytest.mark.usefixtures("over_nfs")
def test_over_nfs_leases_of_the_dead_are_told_from_those_of_the_living(tmp_path: Path) -> None:
    leases, need = Leases(tmp_path), Need(plan_ids=frozenset("p"))
    (tmp_path / "dead.json").write_bytes(b"left by a process that was killed")
    with leases.hold(need):
        living = leases.living(older_than_s=0)
    assert not living.judged_by_age
    assert living.need == need
    assert [path.name for path in living.dead] == ["dead.json"]


def test_two_who_look_at_once_do_not_take_each_other_for_the_maker(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    path.touch()
    with probed(path) as one, probed(path) as other:
        assert (one, other) == (False, False)
