"""Opens files that somebody else made: regular ones only, and only in allowed places.

A FIFO blocks whoever opens it, a device acts or never ends, and a link may lead to a private file
that a merge would publish. A file is looked at through a descriptor that opens nothing (O_PATH);
what was looked at is then opened by that descriptor, so that nobody can swap it in between.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mergepipe_pipeline.errors import CheckpointError

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
#: Errors that say nothing about the file: the process may open no more, or has no memory.
_NOT_ITS_FAULT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_HUB_REPO, _HUB_SNAPSHOTS, _HUB_BLOBS = "models--", "snapshots", "blobs"
_LOOK = os.O_PATH | os.O_CLOEXEC


def places_of(root: Path) -> tuple[str, ...]:
    """Where the files of a checkpoint may lie, as real paths: its folder, or the one file it is.

    `root` itself may be reached through links: the user named it. A snapshot in a Hugging Face
    cache (`models--NAME/snapshots/COMMIT`) consists of links into `models--NAME/blobs`.
    Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
    """
    real = _real(root)
    parts = Path(real).parts
    for n, part in enumerate(parts[:-2]):
        if part.startswith(_HUB_REPO) and parts[n + 1] == _HUB_SNAPSHOTS:
            return real, str(Path(*parts[: n + 1], _HUB_BLOBS))
    return (real,)


def stat_regular(path: Path, places: Sequence[str]) -> os.stat_result:
    """Size, time and so on of a regular file in one of `places`; raises as `open_regular`."""
    with _looked_at(path, places) as (_, status):
        return status


def open_regular(path: Path, places: Sequence[str]) -> int:
    """A descriptor to read a regular file that lies in one of `places`, or below one.

    Raises FileNotFoundError, and CheckpointError for what is of another kind, lies elsewhere or
    cannot be opened.
    """
    with _looked_at(path, places) as (handle, _), refusals_named(path):
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


def read_small(path: Path, most_nbytes: int) -> bytes:
    """All of a regular file that the user named, wherever it lies.

    Raises as `open_regular`, and CheckpointError for one of more than `most_nbytes` bytes.
    """
    handle = open_regular(path, ("/",))
    with os.fdopen(handle, "rb") as file, refusals_named(path):
        nbytes = os.fstat(handle).st_size
        if nbytes > most_nbytes:
            raise too_large(str(path), most_nbytes, nbytes)
        return file.read(nbytes)


def too_large(where: str, most_nbytes: int, nbytes: int) -> CheckpointError:
    """The error for a file of a size that no sound one has."""
    return CheckpointError(
        "A file is absurdly large",
        where=where,
        expected=f"at most {most_nbytes} bytes",
        found=f"{nbytes} bytes",
        next_step="check that it is the right file, or get it again",
    )


def text_of(path: str | Path) -> str:
    """A path as UTF-8 can hold it: bytes that are no text are shown as escapes."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def _real(path: Path) -> str:
    """The kernel's path of a file; if there is none, the path without links."""
    try:
        handle = os.open(path, _LOOK)
    except OSError:
        return os.path.realpath(path)
    try:
        return os.readlink(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)


@contextmanager
def _looked_at(path: Path, places: Sequence[str]) -> Iterator[tuple[int, os.stat_result]]:
    with refusals_named(path):
        handle = os.open(path, _LOOK)
    try:
        status = os.fstat(handle)
        real = os.readlink(f"/proc/self/fd/{handle}")
        if not any(real == place or real.startswith(f"{place.rstrip('/')}/") for place in places):
            raise CheckpointError(
                "A link leaves its checkpoint",
                where=text_of(path),
                expected=f"a file in {text_of(places[0])}",
                found=f"a link to {text_of(real)}",
                next_step="put the file itself in the link's place, if it belongs to the model",
            )
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(
                "This is no regular file",
                where=text_of(path),
                expected="a regular file",
                found=_KINDS.get(stat.S_IFMT(status.st_mode), "something else"),
                next_step="remove it, or put the right file there",
            )
        yield handle, status
    finally:
        os.close(handle)


@contextmanager
def refusals_named(path: Path) -> Iterator[None]:
    """Turn what the system says of a path into FileNotFoundError or CheckpointError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise FileNotFoundError(errno.ENOENT, "no such file", text_of(path)) from error
        if error.errno in _NOT_ITS_FAULT:
            raise
        raise CheckpointError(
            "A file cannot be opened",
            where=text_of(path)[:300],
            found=os.strerror(error.errno or 0),
            next_step="check its name and its permissions, or get it again",
        ) from error


_TAIL_NBYTES = 4096


def unwritten(path: Path) -> str | None:
    """In a few words what looks unwritten in a file, or None. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        nbytes = os.fstat(handle).st_size
        hole = _first_hole(handle, nbytes)
        if hole < nbytes:
            return f"has a hole at byte {hole} of {nbytes}"
        start = max(0, nbytes - _TAIL_NBYTES)
        if nbytes and not any(os.pread(handle, nbytes - start, start)):
            return f"holds nothing but zeros from byte {start} of {nbytes}"
        return None
    finally:
        os.close(handle)


def _first_hole(handle: int, nbytes: int) -> int:
    """Where the first hole begins; `nbytes` if there is none or it cannot be known."""
    try:
        return os.lseek(handle, 0, os.SEEK_HOLE) if nbytes else 0
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENXIO, errno.EOPNOTSUPP):
            return nbytes
        raise
