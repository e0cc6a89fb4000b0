"""Permission bits: those of a group's folder, and refused ones."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

from mergepipe_pipeline.errors import MergePipeError


def share_as(folder: Path) -> None:
    """Let the group use what this process makes from now on, if it may write in `folder`.

    The process's umask says so to every library, too; where the group may not, it stays as it is.
    """
    with suppress(OSError):
        if folder.stat().st_mode & stat.S_IWGRP:
            os.umask(os.umask(0o077) & ~0o070)


def foreign_error(error: OSError) -> MergePipeError | None:
    """The error for a refusal by a file or folder of somebody else; None for any other."""
    if error.errno not in (errno.EACCES, errno.EPERM):
        return None
    for name in (error.filename, error.filename2):
        if isinstance(name, str):
            path = Path(name).absolute()
            while not os.path.lexists(path):
                path = path.parent
            refused = [p for p in (path, path.parent) if not os.access(p, os.R_OK | os.W_OK)]
            if refused and (found := refused[0].lstat()).st_uid != os.geteuid():
                return _foreign(refused[0], found)
    return None


def _foreign(path: Path, found: os.stat_result) -> MergePipeError:
    owner, group = _user(found.st_uid), str(found.st_gid)
    with suppress(KeyError):
        group = grp.getgrgid(found.st_gid).gr_name
    return MergePipeError(
        "A file or folder belongs to another user, and this one may not use it",
        where=str(path),
        expected="one of this user, or of a group that this user is in and that may write it",
        found=f"owner {owner}, group {group}, mode {stat.S_IMODE(found.st_mode):04o}",
        next_step=f"let {owner} share it with a group (docs/platform.md, Permissions), or use "
        "another folder",
    )


def this_user() -> str:
    """The name of the user of this process, or the number of one without a name."""
    return _user(os.geteuid())


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
