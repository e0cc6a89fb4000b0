"""Locks that the system drops when their process ends, however it ends: flock.

A lock says whether the maker of a file still lives. Where the file system has no locks, callers
judge by age.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

#: What the system says where a file system has no locks.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF})


def lock(handle: int, *, shared: bool = False) -> bool:
    """Wait for the lock of an open file, held until it is closed; False: there are no locks."""
    return _flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def is_held(path: Path) -> bool | None:
    """Whether a living process has locked the file; None where this cannot be known.

    False for a file that is not there.
    """
    with probed(path) as held:
        return held


@contextmanager
def probed(path: Path) -> Iterator[bool | None]:
    """Do as `is_held`; if False, nobody can lock the file alone while the context lasts."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        yield False if isinstance(error, FileNotFoundError) else None
        return
    try:
        try:
            # Shared: the file is open for reading only, and then NFS gives no other lock.
            held = False if _flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB) else None
        except BlockingIOError:
            held = True
        yield held
    finally:
        os.close(handle)


@contextmanager
def locked_there(path: Path) -> Iterator[None]:
    """Wait for the lock of an existing file or folder and hold it; writes nothing.

    Where there is no lock, or nothing at `path`, nothing is held.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY)
            stack.callback(os.close, handle)
            lock(handle)
        yield


@contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock of `path`, which is made if it is not there and stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        lock(handle, shared=shared)
        yield
    finally:
        os.close(handle)


def this_process() -> str:
    """This process, for people who ask who holds a lock."""
    return f"process {os.getpid()} on {platform.node()} since {time.strftime('%F %T')}"


def claim_for_life(path: Path, data: bytes) -> bytes | None:
    """Hold the lock of `path` until this process ends, whatever it executes; `data` goes into it.

    Returns None, or what somebody else wrote who holds it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with open(handle, "rb") as theirs:
            return theirs.read()
    os.ftruncate(handle, 0)
    os.pwrite(handle, data, 0)
    os.set_inheritable(handle, True)
    return None


@contextmanager
def claimed(path: Path, data: bytes, *, shared: bool = False) -> Iterator[bytes | None]:
    """Hold the lock of `path`, which stays, and write `data` into it; yields None.

    If somebody else holds it, yields what he wrote: anybody, or, if it is to be `shared`, one who
    holds it alone. None as well where there are no locks.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            _flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            yield os.pread(handle, os.fstat(handle).st_size, 0)
            return
        os.ftruncate(handle, 0)
        os.pwrite(handle, data, 0)
        yield None
    finally:
        os.close(handle)


def _flock(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, how)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True
