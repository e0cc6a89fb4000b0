"""The permission bits of files and folders that are made again: read, write and execute alone.

Bits that lend rights (setuid, setgid, sticky) are neither kept nor given, and a link is never
followed.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

_PERMISSIONS = 0o777
#: The bits that its maker needs to read a file or a folder.
_FILE_LEAST, _FOLDER_LEAST = 0o400, 0o500
#: What the kernel says where the file system keeps no permissions, as that of a USB stick.
_KEEPS_NONE = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def permissions_of(path: Path) -> int | None:
    """The permission bits of a file or folder; None for a link, whose own mean nothing."""
    mode = path.lstat().st_mode
    return None if stat.S_ISLNK(mode) else mode & _PERMISSIONS


def give_permissions(path: Path, mode: int) -> None:
    """Give a file or folder the permission bits of `mode`; its owner may read it all the same.

    Does nothing on a file system that keeps none. Raises OSError for a link.
    """
    handle = os.open(path, _OPEN)
    try:
        current_mode = os.fstat(handle).st_mode
        least = _FOLDER_LEAST if stat.S_ISDIR(current_mode) else _FILE_LEAST
        # A folder may have inherited bits from the one that it lies in.
        inherited = stat.S_IMODE(current_mode) & ~_PERMISSIONS
        os.fchmod(handle, inherited | mode & _PERMISSIONS | least)
    except OSError as error:
        if error.errno not in _KEEPS_NONE:
            raise
    finally:
        os.close(handle)


def make_removable(folder: Path) -> None:
    """Let the owner change a folder and all below it, as far as that is allowed, to remove it."""
    if folder.is_symlink() or not folder.is_dir():
        return
    with suppress(OSError):
        give_permissions(folder, 0o700)
    for parent, names, _ in os.walk(folder):  # which enters a folder after its own turn
        for name in names:
            with suppress(OSError):  # as of links
                give_permissions(Path(parent, name), 0o700)
