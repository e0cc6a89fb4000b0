"""The one home of every rename, link and fsync: a name appears whole or not at all.

Not a general file layer: six ways to make a name appear (replace, exclusive, adopt, rename, folder,
and folder in place of another), each durable when it returns, and three for a while (`locked_file`,
`turn`, `write_fleeting`).
`crash_hook`, if set, is called before each change of the file system, so that tests can stop at any
of them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from mergepipe_pipeline.errors import StorageFullError
from mergepipe_pipeline.storage.locks import is_held, lock

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
#: What the system says where nothing may be written.
READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})

#: What the kernel says where it copies nothing: between, or on, such file systems; in a sandbox.
_NO_COPIES = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})
#: Of file systems without links, or of a file that has no name.
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOENT)

#: Arguments of `renameat2`: paths are absolute, and the names change places.
_HERE, _EXCHANGE = -100, 2

crash_hook: Callable[[str], None] | None = None


def write_atomic(path: str | Path, data: bytes | Iterable[bytes]) -> None:
    """Make `path` hold exactly `data`, whole or in pieces: readers see the old file or the new one.

    Raises StorageFullError.
    """
    final = Path(path)
    with full_disk_named(final), _temp_file(final, data) as temp:
        _step("replace")
        os.replace(temp, final)
        _fsync_dir(final.parent)


def create_exclusive(path: str | Path, data: bytes) -> None:
    """Create `path` with `data`; of several writers one wins, the others get FileExistsError."""
    final = Path(path)
    with full_disk_named(final), _temp_file(final, data) as temp:
        _step("link")
        os.link(temp, final)
        _fsync_dir(final.parent)


def write_fleeting(path: str | Path, pieces: Iterable[bytes | bytearray]) -> None:
    """Make `path` hold exactly the pieces, whole or not at all; it may not outlive a power loss.

    For files that can be made again. Raises StorageFullError.
    """
    final = Path(path)
    with full_disk_named(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        handle, name = _locked_temp(final)
        try:
            with os.fdopen(handle, "wb") as file:
                file.writelines(pieces)
                file.flush()
                os.replace(name, final)
        finally:
            Path(name).unlink(missing_ok=True)


def remove_unnamed(folder: str | Path) -> None:
    """Remove the temporary files that killed processes left below a folder."""
    for path in Path(folder).rglob(".*.tmp"):
        if is_held(path) is False:
            path.unlink(missing_ok=True)


@contextmanager
def locked_file(path: str | Path, data: bytes) -> Iterator[None]:
    """A file that is there, locked and whole, for as long as the context; it is not durable.

    Raises StorageFullError.
    """
    final = Path(path)
    with ExitStack() as stack:
        with full_disk_named(final):
            handle, name = _locked_temp(final)
            stack.callback(os.close, handle)
            for made in (Path(name), final):
                stack.callback(made.unlink, missing_ok=True)
            while data:
                data = data[os.write(handle, data) :]
            _step("lease")
            os.rename(name, final)
        yield


@contextmanager
def turn(path: str | Path, data: bytes) -> Iterator[None]:
    """Wait for the lock of `path` and hold it alone; the file is removed afterwards.

    Meanwhile it holds `data`, for people. The turn of a killed process ends with the process. Where
    there are no locks, nobody waits.
    """
    path = Path(path)
    with ExitStack() as stack:
        with full_disk_named(path):
            handle = _next_turn(path)
            stack.callback(os.close, handle)
            stack.callback(path.unlink, missing_ok=True)
            os.ftruncate(handle, 0)
            os.pwrite(handle, data, 0)
        yield


def _next_turn(path: Path) -> int:
    """Open and lock the file that has this name when its lock is free."""
    while True:
        with ExitStack() as stack:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            stack.callback(os.close, handle)
            lock(handle)
            with suppress(FileNotFoundError):  # its last holder has removed it
                if os.path.samestat(os.fstat(handle), path.stat()):
                    stack.pop_all()
                    return handle


def adopt_file(temp: str | Path, final: str | Path) -> None:
    """Give a finished file its final name, durably; replaces an equal one."""
    final = Path(final)
    with full_disk_named(final):
        make_dirs(final.parent)
        _fsync_file(Path(temp))
        _step("adopt")
        os.replace(temp, final)
        _fsync_dir(final.parent)


def rename(path: str | Path, to: str | Path) -> Path:
    """Give a file or folder, whatever is in it, a name that nothing has; gives the new path."""
    path, to = Path(path), Path(to)
    with full_disk_named(to):
        make_dirs(to.parent)
        _step("rename")
        os.rename(path, to)
        for folder in {path.parent, to.parent}:
            _fsync_dir(folder)
    return to


def publish_dir(staged: str | Path, final: str | Path) -> bool:
    """Give a complete folder its final name by one rename. Raises StorageFullError.

    Every file and folder inside is made durable first. Returns False, leaving `staged`, if `final`
    exists and is not empty: then the same result is there already.
    """
    staged, final = Path(staged), Path(final)
    with full_disk_named(final):
        for folder, _, files in os.walk(staged, topdown=False):
            for name in files:
                _fsync_file(Path(folder) / name)
            _fsync_dir(Path(folder))
        make_dirs(final.parent)
        _step("publish")
        try:
            os.rename(staged, final)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        _fsync_dir(final.parent)
        return True


def replace_dir(staged: str | Path, final: str | Path) -> None:
    """Give a complete folder its final name, durably; an older one then has the name `staged`.

    Readers see the old one or the new one. Where the file system cannot exchange two names, there
    is neither for a moment, and a process that is killed in it leaves the old one beside its place,
    under a name with a dot. Raises StorageFullError.
    """
    staged, final = Path(staged), Path(final)
    if publish_dir(staged, final):
        return
    _step("exchange")
    if not _exchanged(staged, final):
        aside = final.with_name(f".{final.name}.old-{uuid.uuid4().hex[:8]}")
        os.rename(final, aside)
        _step("publish")
        os.rename(staged, final)
        os.rename(aside, staged)
    for folder in {staged.parent, final.parent}:
        _fsync_dir(folder)


def _exchanged(a: Path, b: Path) -> bool:
    """Let two names change places at once; False where the system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(a.absolute()), os.fsencode(b.absolute())
    try:
        done: int = libc.renameat2(_HERE, names[0], _HERE, names[1], _EXCHANGE)
    except AttributeError:  # a C library without it
        return False
    if done == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(b))


def make_dirs(*folders: str | Path) -> None:
    """Make folders, with those above them, durably; those that are there are left as they are."""
    parents = {parent: None for folder in folders for parent in _make_missing(Path(folder))}
    for parent in parents:
        _fsync_dir(parent)


def link_file(source: str | Path, target: str | Path) -> None:
    """A second name for the same bytes; a copy where the file system has no links across it.

    A `source` of `/proc/self/fd` is an open file; one without a name any more is copied.
    """
    with full_disk_named(Path(target)):
        _step("link")
        try:
            os.link(os.readlink(source) if os.path.islink(source) else source, target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _copy_bytes(source, target)


def link_path(target: str | Path, link: str | Path) -> None:
    """Make `link` lead to `target`; what has its name already stays."""
    _step("symlink")
    with full_disk_named(Path(link)), suppress(FileExistsError):
        os.symlink(target, link)
        _fsync_dir(Path(link).parent)


def copy_file(source: str | Path, target: str | Path) -> None:
    """An independent copy; the kernel shares or copies the blocks where it can."""
    with full_disk_named(Path(target)):
        _step("copy")
        _copy_bytes(source, target)


def remove_tree(path: str | Path) -> None:
    """Remove a folder or file if it is there; another process may remove it meanwhile."""
    _step("remove")
    path = Path(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _copy_bytes(source: str | Path, target: str | Path) -> None:
    """Copy as shutil.copyfile does, which before Python 3.14 never shares blocks."""
    with open(source, "rb") as old, open(target, "wb") as new:
        uncopied_nbytes = os.fstat(old.fileno()).st_size
        try:
            while uncopied_nbytes and (
                n := os.copy_file_range(old.fileno(), new.fileno(), uncopied_nbytes)
            ):
                uncopied_nbytes -= n
        except OSError as error:
            if error.errno not in _NO_COPIES:
                raise
    if uncopied_nbytes:
        shutil.copyfile(source, target)


@contextmanager
def _temp_file(final: Path, data: bytes | Iterable[bytes]) -> Iterator[Path]:
    """A durable temporary file beside `final`, gone afterwards whatever happens."""
    make_dirs(final.parent)
    _step("write")
    handle, name = _locked_temp(final)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines((data,) if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
            yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _make_missing(folder: Path) -> list[Path]:
    """Make a folder and its missing parents; returns the folders that got a new entry."""
    missing = list(takewhile(lambda p: not p.is_dir(), (folder, *folder.parents)))
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
    return [new.parent for new in missing]


def _locked_temp(final: Path) -> tuple[int, str]:
    """A new file beside `final`, locked so that a collection sees that its maker lives."""
    while True:
        name = str(final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.tmp"))
        try:  # its permissions are by the umask, as those of the file that it becomes
            handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            continue
        lock(handle)
        if os.fstat(handle).st_nlink:
            return handle, name
        os.close(handle)  # a collection came between


def _fsync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_fsync_dir = _fsync_file


def _step(name: str) -> None:
    if crash_hook is not None:
        crash_hook(name)


@contextmanager
def full_disk_named(path: Path) -> Iterator[None]:
    """Raise StorageFullError naming the path where writing there finds the disk full."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise StorageFullError(
                "The disk is full",
                where=str(path),
                found=os.strerror(error.errno or 0),
                next_step="free space and run the same command again; finished work is kept",
            ) from error
        raise
