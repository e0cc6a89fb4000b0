"""Stands between the product and the file system: sees every change, and makes one go wrong.

It replaces the functions of `os` and `io.open` in this process, so nothing of it ships and no
change escapes it, whatever module makes it. Only changes below `root` count.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lab.torture.disk import Disk

#: How a step goes wrong. The first four are errors that the process sees and survives.
KINDS = ("error", "full", "tear", "kill", "cut", "power")
ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS)
#: What a full disk refuses; it lets go of files gladly.
_ALLOCATES = frozenset({"create", "write", "reserve", "copy", "mkdir", "link"})
_PRODUCT = f"{os.sep}mergepipe_pipeline{os.sep}"


@dataclass(frozen=True)
class Fault:
    """What goes wrong at the step numbered `at` (from 0). `seed` draws what power loss leaves.

    error: it fails; full: every step from here that needs space fails; tear: half of a write is
    done (of other steps all), then it fails; kill: the process ends before it; cut: as tear, then
    the process ends; power: only what was made durable stays, in `lost` beside `root`.
    """

    kind: str
    at: int
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """One change of the file system: what, where, and the module of the product that asked."""

    kind: str
    path: str
    module: str


@dataclass
class Shim:
    """Counts the changes below `root`; install once, in a process made for it."""

    root: Path
    fault: Fault | None = None
    steps: list[Step] = field(default_factory=list)
    has_struck: bool = False

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._prefix = f"{self.root}{os.sep}"
        self.disk: Disk | None = None

    def install(self) -> None:
        """Replace the functions of `os`, for good."""
        if self.fault is not None and self.fault.kind == "power":
            self.disk = Disk(self.root)  # here, since it holds files open: they go with the child
        for name, wrap in _WRAPPERS.items():
            setattr(os, name, wrap(self, getattr(os, name)))
        io.open = builtins.open = self._open(io.open)

    def power_off(self) -> None:
        """Write what would be left after a loss of power to `lost` beside `root`."""
        assert self.disk is not None
        assert self.fault is not None
        self.disk.dump(self.root.with_name("lost"), self.fault.seed)

    def step(
        self,
        kind: str,
        path: str,
        do: Callable[[], Any],
        half: Callable[[], Any] | None = None,
    ) -> Any:
        """Do one change, or let it go wrong; `half` does a part of it."""
        if not path.startswith(self._prefix):
            return do()
        with self._lock:
            number = len(self.steps)
            self.steps.append(Step(kind, path, _caller()))
            fault = self.fault
            if fault is not None and self._strikes(fault, number, kind):
                self.has_struck = True
                self._strike(fault, path, half or do)
            return do()

    def _strikes(self, fault: Fault, number: int, kind: str) -> bool:
        if fault.kind == "full":
            return number >= fault.at and kind in _ALLOCATES
        return number == fault.at

    def _strike(self, fault: Fault, path: str, part: Callable[[], Any]) -> None:
        if fault.kind == "power":
            self.power_off()
        if fault.kind in ("tear", "cut"):
            part()
        if fault.kind in ("kill", "cut", "power"):
            os.kill(os.getpid(), signal.SIGKILL)
        number = errno.ENOSPC if fault.kind == "full" else ERRORS[fault.at % len(ERRORS)]
        raise OSError(number, os.strerror(number), path)

    def _open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        shim = self

        class Raw(io.FileIO):
            def write(self, data: Any) -> int:
                view = memoryview(data).cast("B")
                put, half = super().write, view[: len(view) // 2]
                path = _of_fd(self.fileno())
                done: int = shim.step("write", path, lambda: put(view), lambda: put(half))
                return done

        def opened(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            given = (file, mode, buffering, encoding, errors, newline, closefd, opener)
            if not set(mode) & set("wax+"):
                return real(*given)
            path = _of_fd(file) if isinstance(file, int) else os.path.abspath(os.fspath(file))
            if isinstance(path, bytes) or not path.startswith(shim._prefix):
                return real(*given)

            def raw() -> Raw:
                return Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)

            made = raw() if isinstance(file, int) else shim.step("create", path, raw)
            if "b" in mode and buffering == 0:
                return made
            buffer = io.BufferedRandom(made) if "+" in mode else io.BufferedWriter(made)
            return buffer if "b" in mode else io.TextIOWrapper(buffer, encoding, errors, newline)

        return opened


def _of_fd(handle: int) -> str:
    return os.readlink(f"/proc/self/fd/{handle}")


def _path(target: Any, folder: int | None = None) -> str:
    if isinstance(target, int):
        return _of_fd(target)
    name = os.fsdecode(os.fspath(target))
    return os.path.join(_of_fd(folder), name) if folder is not None else os.path.abspath(name)


def _caller() -> str:
    """The innermost module of the product on the stack, as `storage/atomic.py`."""
    frame = sys._getframe(2)
    while frame is not None:
        _, found, after = frame.f_code.co_filename.rpartition(_PRODUCT)
        if found:
            return after
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _named(kind: str, which: int = 0) -> Callable[[Shim, Any], Any]:
    """A function whose argument `which` is the path that changes; it may take `dir_fd`."""

    def wrap(shim: Shim, real: Any) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            path = _path(given[which], more.get("dir_fd"))
            return shim.step(kind, path, lambda: real(*given, **more))

        return call

    return wrap


def _opens(shim: Shim, real: Any) -> Any:
    def call(target: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:
        if not flags & os.O_CREAT:
            return real(target, flags, mode, dir_fd=dir_fd)
        path = _path(target, dir_fd)
        return shim.step("create", path, lambda: real(target, flags, mode, dir_fd=dir_fd))

    return call


def _writes(shim: Shim, real: Any) -> Any:
    def call(handle: int, data: Any, *where: Any) -> Any:
        view = memoryview(data).cast("B")
        return shim.step(
            "write",
            _of_fd(handle),
            lambda: real(handle, view, *where),
            lambda: real(handle, view[: len(view) // 2], *where),
        )

    return call


def _copies(shim: Shim, real: Any) -> Any:
    def call(source: int, target: int, count: int, *more: Any) -> Any:
        return shim.step(
            "copy",
            _of_fd(target),
            lambda: real(source, target, count, *more),
            lambda: real(source, target, count // 2, *more),
        )

    return call


def _sends(shim: Shim, real: Any) -> Any:
    def call(target: int, source: int, at: int, count: int) -> Any:
        return shim.step("copy", _of_fd(target), lambda: real(target, source, at, count))

    return call


def _syncs(shim: Shim, _real: Any) -> Any:
    # No power is cut: `shim.disk` knows what a sync makes safe, and to wait for it proves nothing.
    def call(handle: int) -> Any:
        path = _of_fd(handle)

        def sync() -> None:
            if shim.disk is not None:
                shim.disk.sync(path)

        return shim.step("fsync", path, sync)

    return call


_WRAPPERS: dict[str, Callable[[Shim, Any], Any]] = {
    "open": _opens,
    "write": _writes,
    "pwrite": _writes,
    "posix_fallocate": _named("reserve"),
    "truncate": _named("truncate"),
    "ftruncate": _named("truncate"),
    "copy_file_range": _copies,
    "sendfile": _sends,
    "fsync": _syncs,
    "fdatasync": _syncs,
    "replace": _named("rename", 1),
    "rename": _named("rename", 1),
    "link": _named("link", 1),
    "symlink": _named("link", 1),
    "mkdir": _named("mkdir"),
    "unlink": _named("unlink"),
    "remove": _named("unlink"),
    "rmdir": _named("unlink"),
    "chmod": _named("chmod"),
    "fchmod": _named("chmod"),
    "utime": _named("utime"),
}
