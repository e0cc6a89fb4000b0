"""What one command really costs, started with cold inputs and warm libraries.

Not a profiler: it looks from outside, at what the kernel counts for the command and its children.
`run` drops the inputs from the page cache, checks with mincore that they are gone, and refuses to
measure otherwise. Then it fills free memory with pages of another file, as it is on a machine in
use: a virtual machine gives free pages back to its host, and takes 1.7 s of a core per GB to get
them again, where the page cache itself takes 0.2. Benchmarks call it in turn for every contender
and keep the `Measurement`s.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

#: Inputs count as cold when at most this share of their pages is in memory.
COLD_SHARE = 0.01
_SAMPLE_S = 0.05
#: Dropping is tried again, later each time: another reader may be at work.
_ATTEMPTS = 4
#: A command that leaves less memory than this to the machine is stopped.
_SPARE_NBYTES = 300 << 20
_SECTOR_NBYTES = 512
#: What `fill_memory` leaves free: more than the kernel keeps free of itself.
_LEFT_FREE_NBYTES = 512 << 20
_FILL_NBYTES = 32 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)


class WarmInputsError(RuntimeError):
    """Inputs stayed in the page cache, so that a measurement would not be of cold reads."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of one command. Times in seconds; bytes are bytes.

    cpu_s: user and system time of all processes. sync_s: until what it left dirty was on disk.
    anon_nbytes, rss_nbytes: peaks over the process tree, sampled: anonymous and shared memory, and
    everything resident (file pages too). storage_*: the kernel's count of what the processes had
    fetched and dirtied; device_*: the same of the whole disk, with everyone else's. stopped:
    "timeout" or "memory" if it was ended before its time.
    """

    wall_s: float
    cpu_s: float
    sync_s: float
    anon_nbytes: int
    rss_nbytes: int
    storage_read_nbytes: int
    storage_write_nbytes: int
    device_read_nbytes: int | None
    device_write_nbytes: int | None
    exit_code: int
    stopped: str | None


def run(
    command: Sequence[str],
    *,
    cold: Sequence[Path] = (),
    warm_up: Sequence[str] = (),
    filler: Path | None = None,
    timeout_s: float | None = None,
    log: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Measurement:
    """Run `warm_up`, drop `cold` from the page cache, fill it by `filler`, then measure `command`.

    `log` receives its standard output and, with the suffix `.err`, its errors. Raises
    WarmInputsError; CalledProcessError if the command fails of itself.
    """
    environment = {**os.environ, **(env or {})}
    if warm_up:
        subprocess.run(warm_up, check=True, capture_output=True, env=environment)
    make_cold(cold)
    if filler:
        fill_memory(filler)
    disk = _disk_of(cold[0]) if cold else None
    read_before, written_before = _disk_counts(disk)
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(open(log or os.devnull, "wb"))
        err = stack.enter_context(open(log.with_suffix(".err") if log else os.devnull, "wb"))
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=out, stderr=err, env=environment, start_new_session=True
        )
        watch = stack.enter_context(_Watch(process.pid, timeout_s))
        try:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        except BaseException:
            # It has a session of its own, where the terminal's Ctrl-C does not reach it.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        wall_s = time.perf_counter() - started
        # A zombie still has its counters, with those of the children it has waited for.
        counters = _fields(Path(f"/proc/{process.pid}/io"))
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    started = time.perf_counter()
    os.sync()
    sync_s = time.perf_counter() - started
    read_after, written_after = _disk_counts(disk)
    if process.returncode and watch.stopped is None:
        said = log.with_suffix(".err").read_text()[-2000:] if log else None
        raise subprocess.CalledProcessError(process.returncode, list(command), stderr=said)
    return Measurement(
        wall_s=wall_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        sync_s=sync_s,
        anon_nbytes=watch.anon_nbytes,
        rss_nbytes=max(watch.rss_nbytes, usage.ru_maxrss << 10),
        storage_read_nbytes=counters["read_bytes"],
        storage_write_nbytes=counters["write_bytes"],
        device_read_nbytes=_difference(read_after, read_before),
        device_write_nbytes=_difference(written_after, written_before),
        exit_code=process.returncode,
        stopped=watch.stopped,
    )


def make_cold(files: Sequence[Path]) -> None:
    """Take files out of the page cache. Raises WarmInputsError if more than 1 % stays."""
    os.sync()
    total = sum(file.stat().st_size for file in files)
    warm: dict[Path, int] = {}
    for attempt in range(_ATTEMPTS):
        time.sleep(attempt)
        for file in files:
            _drop(file)
        warm = {file: n for file in files if (n := resident_nbytes(file))}
        if sum(warm.values()) <= COLD_SHARE * total:
            return
    raise WarmInputsError(
        f"Inputs stay in the page cache. Where: {max(warm, key=lambda file: warm[file])}. "
        f"Expected at most {COLD_SHARE:.0%} of {total} bytes resident, found {sum(warm.values())}. "
        "Next: end what reads or maps them, and measure again."
    )


def fill_memory(filler: Path) -> None:
    """Fill the page cache with pages of a sparse file, which is made and kept, and takes no disk.

    What a command needs of memory takes their place, and none comes from the host.
    """
    handle, piece = os.open(filler, os.O_RDWR | os.O_CREAT, 0o644), bytearray(_FILL_NBYTES)
    try:
        total = _fields(Path("/proc/meminfo"))["MemTotal"] << 10
        os.ftruncate(handle, total)
        # Pages that are read again would stay longest.
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        for at in range(0, total, _FILL_NBYTES):
            if _fields(Path("/proc/meminfo"))["MemFree"] << 10 <= _LEFT_FREE_NBYTES:
                break
            os.preadv(handle, [piece], at)
    finally:
        os.close(handle)


def _drop(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def resident_nbytes(file: Path) -> int:
    """How much of a file is in the page cache, in whole pages, by mincore(2)."""
    nbytes = file.stat().st_size
    if nbytes == 0:
        return 0
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, dtype=np.uint8)
        pages = np.zeros(-(-nbytes // mmap.PAGESIZE), dtype=np.uint8)
        failed = _LIBC.mincore(
            ctypes.c_void_p(view.ctypes.data),
            ctypes.c_size_t(nbytes),
            ctypes.c_void_p(pages.ctypes.data),
        )
        del view
        if failed:
            raise OSError(ctypes.get_errno(), "mincore", str(file))
    return int((pages & 1).sum()) * mmap.PAGESIZE


class _Watch:
    """Samples a process tree's memory, and ends it when it takes too long or too much."""

    def __init__(self, pid: int, timeout_s: float | None) -> None:
        self.anon_nbytes = self.rss_nbytes = 0
        self.stopped: str | None = None
        self._pid = pid
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> _Watch:
        # If memory runs out, the kernel shall end the measured command and nothing else.
        with contextlib.suppress(OSError):
            Path(f"/proc/{self._pid}/oom_score_adj").write_text("1000")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(_SAMPLE_S):
            anon = rss = 0
            for pid in process_tree(self._pid):
                with contextlib.suppress(OSError, ProcessLookupError):
                    status = _fields(Path(f"/proc/{pid}/status"))
                    anon += status.get("RssAnon", 0) + status.get("RssShmem", 0)
                    rss += status.get("VmRSS", 0)
            self.anon_nbytes = max(self.anon_nbytes, anon << 10)
            self.rss_nbytes = max(self.rss_nbytes, rss << 10)
            if self._deadline is not None and time.monotonic() > self._deadline:
                return self._stop("timeout")
            if _fields(Path("/proc/meminfo"))["MemAvailable"] << 10 < _SPARE_NBYTES:
                return self._stop("memory")
        return None

    def _stop(self, why: str) -> None:
        self.stopped = why
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)


def process_tree(root: int) -> Iterator[int]:
    """A process and everything that descends from it, children of all its threads included."""
    yield root
    with contextlib.suppress(OSError):  # it may end meanwhile
        for task in os.listdir(f"/proc/{root}/task"):
            with contextlib.suppress(OSError):
                for child in Path(f"/proc/{root}/task/{task}/children").read_text().split():
                    yield from process_tree(int(child))


def _fields(file: Path) -> dict[str, int]:
    """The numbers of a /proc file of `name: number` lines; others are left out."""
    pairs = (line.partition(":") for line in file.read_text().splitlines())
    found = {name: rest.split() for name, _, rest in pairs}
    return {name: int(words[0]) for name, words in found.items() if words and words[0].isdigit()}


def _disk_of(file: Path) -> Path | None:
    device = file.stat().st_dev
    counts = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    return counts if counts.exists() else None


def _disk_counts(disk: Path | None) -> tuple[int | None, int | None]:
    """Bytes read and written since boot, by everyone."""
    if disk is None:
        return None, None
    words = disk.read_text().split()
    return int(words[2]) * _SECTOR_NBYTES, int(words[6]) * _SECTOR_NBYTES


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before


def weight_files(folders: Iterable[Path]) -> list[Path]:
    """All safetensors files of model folders, in order."""
    return [file for folder in folders for file in sorted(folder.glob("*.safetensors"))]
