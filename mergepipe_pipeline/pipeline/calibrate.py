"""The verb `calibrate`: what the user's storage costs, and how fast the engine works on it.

Decides what to time and fits the model to the times; the I/O is in `storage.measure`, and what is
not storage is timed by `trial`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.execution.leases import staging
from mergepipe_pipeline.pipeline.trial import try_engine
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.spec.engine_pace import EnginePace, Flow
from mergepipe_pipeline.spec.storage_profile import StorageProfile
from mergepipe_pipeline.storage.measure import ColdFile, hash_s, is_stored, stream, write_s
from mergepipe_pipeline.storage.profile import store_profile
from mergepipe_pipeline.storage.source import Reading
from mergepipe_pipeline.warehouse import Warehouse

#: Sizes of single reads in bytes: from far below a block of weights to above one.
SIZES = tuple(1 << n for n in (14, 16, 18, 20, 22))
MAX_READS = 64
MAX_TRIAL_NBYTES = 64 << 20
RUN_NBYTES = 256 << 20
MIN_NBYTES = 4 << 20
REPEATS = 3

_ALIGN = 4096
#: Places that are read in turn, as from so many experts.
_STREAMS = 6
_STREAM_NBYTES = 512 << 20
_HASH_NBYTES = 64 << 20

#: Seconds to read a number of bytes from each of some starts of a cold file.
ReadTimer = Callable[[Sequence[int], int], float]


@dataclass(frozen=True, slots=True)
class Observation:
    """The median of `seconds` that `seeks` reads of `nbytes` in all took."""

    seeks: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """A profile and what it was fitted to, the sequential run last."""

    profile: StorageProfile
    observations: tuple[Observation, ...]


def calibrate(
    home: Warehouse,
    path: str | Path | None = None,
    *,
    temp_nbytes: int = 1 << 30,
    with_engine: bool = True,
    progress: Progress | None = None,
) -> Calibration:
    """Measure reads of a file at or under `path`, and writes into the warehouse; remember both.

    Without a path, the largest file of a registered checkpoint is read, or a temporary file of
    `temp_nbytes`. Without the engine, times of merges are not predicted. Raises
    MergePipeError if no file is large enough, or it cannot be read cold.
    """
    with staging(home, "calibrate") as folder:
        target = _file_to_read(home, path)
        if target is None:
            target = folder / "read"
            write_s(target, temp_nbytes)
        observations = _timed_reads(target, progress or Silent())
        written = min(RUN_NBYTES, temp_nbytes)
        wrote_s = min(write_s(folder / f"write{n}", written) for n in range(3))
        engine = _engine_pace(target, folder) if with_engine else None
    seek_s, rate = fit(observations)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    # A temporary file is gone by now.
    where = home.root if target.is_relative_to(folder) else target
    profile = StorageProfile(rate, seek_s, written / wrote_s, now, str(where), engine)
    store_profile(home.profile_path, profile)
    return Calibration(profile, observations)


def observe(read_s: ReadTimer, file_nbytes: int, repeats: int = REPEATS) -> Iterator[Observation]:
    """Random reads of every size in SIZES that fits, then one sequential run.

    Every repetition reads other places, so that no cache below the system's helps.
    """
    places = random.Random(file_nbytes)
    for size in SIZES:
        slots = file_nbytes // size
        reads = min(MAX_READS, MAX_TRIAL_NBYTES // size, slots // 2)
        if reads:
            chosen = [places.sample(range(slots), reads) for _ in range(repeats)]
            seconds = median(read_s([slot * size for slot in some], size) for some in chosen)
            yield Observation(reads, reads * size, seconds)
    run = min(RUN_NBYTES, file_nbytes // 2)
    starts = [places.randrange(0, file_nbytes - run + 1, _ALIGN) for _ in range(repeats)]
    yield Observation(1, run, median(read_s([start], run) for start in starts))


def fit(observations: Sequence[Observation]) -> tuple[float, float]:
    """Seconds per seek and bytes per second that explain the times best.

    Least squares of relative errors in seconds = seeks · seek_s + nbytes / rate; a seek costs no
    less than nothing.
    """
    table = np.array([(o.seeks, o.nbytes) for o in observations], np.float64)
    rows = table / np.array([[max(o.seconds, 1e-9)] for o in observations])
    wanted = np.ones(len(rows))
    # Columns of like size: seeks and bytes differ by orders of magnitude.
    scale = np.linalg.norm(rows, axis=0)
    seek_s, byte_s = np.linalg.lstsq(rows / scale, wanted, rcond=None)[0] / scale
    if seek_s < 0 or byte_s <= 0:
        seek_s, byte_s = 0.0, rows[:, 1].sum() / (rows[:, 1] ** 2).sum()
    return float(seek_s), float(1 / byte_s)


def _engine_pace(file: Path, folder: Path) -> EnginePace:
    """How fast the engine reads `file` and works; `folder` is for what it needs to try."""
    from mergepipe_pipeline.engine.options import EngineOptions

    threads = EngineOptions().threads

    def flow(reading: Reading, *, is_cold: bool) -> Flow:
        tries = [
            stream(
                file,
                reading,
                streams=_STREAMS,
                threads=threads,
                nbytes=_STREAM_NBYTES,
                is_cold=is_cold,
            )
            for _ in range(REPEATS)
        ]
        rate = max(nbytes / wall_s for nbytes, wall_s, _ in tries)  # what disturbs only slows
        return Flow(rate, median(cpu_s / nbytes for nbytes, _, cpu_s in tries))

    past_cache = flow("once", is_cold=True)
    cold = flow("exact", is_cold=True)
    cached = flow("exact", is_cold=False)
    (folder / "trial").mkdir()
    tried = try_engine(folder / "trial")
    return EnginePace(
        cores=os.cpu_count() or 1,
        threads=threads,
        cold=cold,
        past_cache=past_cache,
        cached=cached,
        hash_bytes_per_s=_HASH_NBYTES / hash_s(_HASH_NBYTES),
        start_s=tried.start_s,
        commit_s=tried.commit_s,
        analysis_elem_s=tried.analysis_elem_s,
        methods=tried.methods,
    )


def _timed_reads(path: Path, progress: Progress) -> tuple[Observation, ...]:
    with ColdFile(path) as file:
        total = sum(o.nbytes for o in observe(lambda starts, nbytes: 0.0, file.nbytes, 1)) * REPEATS
        with progress.task(f"read {path.name}", total) as advance:

            def read_s(starts: Sequence[int], nbytes: int) -> float:
                seconds = file.read_s(starts, nbytes)
                advance(len(starts) * nbytes)
                return seconds

            return tuple(observe(read_s, file.nbytes))


def _file_to_read(home: Warehouse, path: str | Path | None) -> Path | None:
    """The largest file under `path`, or registered; None if nothing large is registered."""
    if path is None:
        return _largest(_registered_files(home))
    root = Path(path).expanduser().resolve()
    found = _largest([root] if root.is_file() else root.rglob("*"))
    if found is None:
        raise MergePipeError(
            "There is no file to measure storage on",
            where=str(root),
            expected=f"a file of at least {MIN_NBYTES >> 20} MiB without holes, better of some GiB",
            found="none",
            next_step="name a checkpoint's folder: `mergepipe calibrate PATH`",
        )
    return found


def _registered_files(home: Warehouse) -> Iterator[Path]:
    """The weight files of all current checkpoints."""
    catalog = Catalog(home.catalog)
    for name in catalog.names():
        checkpoint = catalog.get(name).checkpoint
        yield from (Path(checkpoint.root) / file.path for file in checkpoint.files)


def _largest(paths: Iterable[Path]) -> Path | None:
    """The largest file that is there and large enough, if one is."""
    fit_for_it = [p for p in paths if p.is_file() and p.stat().st_size >= MIN_NBYTES]
    return max(filter(is_stored, fit_for_it), key=lambda p: p.stat().st_size, default=None)
