"""A child process with all that it starts: it ends in time, and its output is kept, bounded."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_SUPERVISOR = Path(__file__).with_name("supervise.py")
#: What is kept of a long output: so many bytes of its start, and so many of its end.
KEPT_NBYTES = 512 << 10
_CHUNK_NBYTES = 64 << 10
#: Seconds for what is in the pipes when the child has ended.
_DRAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended: its exit code, negative for a signal, None for the time-out.

    `stdout` is the end of its standard output; `output` is what it wrote to both, as it came, a
    part in the middle left out where it is long.
    """

    code: int | None
    stdout: bytes
    output: bytes


class AbandonedError(Exception):
    """Nobody wants the child's result any more."""


class _Kept:
    """The start and the end of a stream of bytes."""

    def __init__(self) -> None:
        self._head, self._tail, self._nbytes = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        """Take what follows."""
        self._nbytes += len(data)
        room = KEPT_NBYTES - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * KEPT_NBYTES:
            del self._tail[:-KEPT_NBYTES]

    @property
    def end(self) -> bytes:
        """The last bytes."""
        # What is in the tail is the end, of which the head may hold the first part.
        return bytes((self._head + self._tail)[-KEPT_NBYTES:])

    @property
    def whole(self) -> bytes:
        """All that is kept, with a line where something is left out."""
        tail = bytes(self._tail[-KEPT_NBYTES:])
        left_out = self._nbytes - len(self._head) - len(tail)
        gap = f"\n... {left_out} bytes are left out ...\n".encode() if left_out else b""
        return bytes(self._head) + gap + tail


def run_child(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    timeout_s: float,
    stop: int | None = None,
) -> Ended:
    """Run a command in `folder`, without a shell, for at most `timeout_s` seconds.

    It has a process group of its own, which is killed when the command ends, when its time is over,
    when this function is left by an exception, and when this process dies. Raises AbandonedError as
    soon as the descriptor `stop` can be read.
    """
    deadline = time.monotonic() + timeout_s
    with _started(command, folder, environment) as (process, status):
        assert process.stdout is not None
        assert process.stderr is not None
        streams = {process.stdout.fileno(): _Kept(), process.stderr.fileno(): _Kept()}
        output = _Kept()
        code = None
        for ready, data in _read(status, list(streams), deadline, stop):
            if ready == status:
                code = int(data)
                break
            streams[ready].add(data)
            output.add(data)
        _kill(process)
        for ready, data in _read(None, list(streams), time.monotonic() + _DRAIN_S):
            streams[ready].add(data)
            output.add(data)
        return Ended(code, streams[process.stdout.fileno()].end, output.whole)


def refuse_abandoned(stop: int | None) -> None:
    """Raise AbandonedError if the descriptor `stop` can be read."""
    if stop is not None:
        with selectors.DefaultSelector() as selector:
            selector.register(stop, selectors.EVENT_READ)
            if selector.select(0):
                raise AbandonedError


@contextmanager
def _started(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The supervisor of a command, and the pipe by which it tells how that ended."""
    status, end = os.pipe()
    try:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SUPERVISOR), str(end), *command],
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(end,),
                start_new_session=True,
                bufsize=0,
            )
        finally:
            os.close(end)
        with process:
            try:
                yield process, status
            finally:
                _kill(process)
    finally:
        os.close(status)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the group, while its leader has not been waited for: its number is nobody else's."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _read(
    status: int | None, pipes: list[int], deadline: float, stop: int | None = None
) -> Iterator[tuple[int, bytes]]:
    """Yield what comes through the pipes, until all have ended or it is time.

    `status` says more by its end than nothing: the supervisor was killed. Raises AbandonedError
    when `stop` can be read.
    """
    with selectors.DefaultSelector() as selector:
        for pipe in (*pipes, *(extra for extra in (status, stop) if extra is not None)):
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fd == stop:
                    raise AbandonedError
                data = os.read(key.fd, _CHUNK_NBYTES)
                if data:
                    yield key.fd, data
                elif key.fd == status:
                    yield key.fd, str(-signal.SIGKILL).encode()
                else:
                    selector.unregister(key.fd)
