"""What reads of a cold file take, by size, and the two figures that explain it: seek and rate."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.timing.storage_timers import ColdFile

#: Sizes of single reads in bytes: from far below a block of weights to above one.
SIZES = tuple(1 << n for n in (14, 16, 18, 20, 22))
MAX_READS = 64
MAX_SIZE_NBYTES = 64 << 20
RUN_NBYTES = 256 << 20
REPEATS = 3

_ALIGN = 4096

#: Seconds to read a number of bytes from each of some starts of a cold file.
ReadTimer = Callable[[Sequence[int], int], float]


@dataclass(frozen=True, slots=True)
class Observation:
    """The median of `seconds` that `seeks` reads of `nbytes` in all took."""

    seeks: int
    nbytes: int
    seconds: float


def time_reads(path: Path, progress: Progress) -> tuple[Observation, ...]:
    """Observations of a file, dropped from the page cache before each.

    Raises MergePipeError if it stays there.
    """
    with ColdFile(path) as file:
        total = sum(o.nbytes for o in observe(lambda starts, nbytes: 0.0, file.nbytes, 1)) * REPEATS
        with progress.task(f"read {path.name}", total) as advance:

            def read_s(starts: Sequence[int], nbytes: int) -> float:
                seconds = file.read_s(starts, nbytes)
                advance(len(starts) * nbytes)
                return seconds

            return tuple(observe(read_s, file.nbytes))


def observe(read_s: ReadTimer, file_nbytes: int, repeats: int = REPEATS) -> Iterator[Observation]:
    """Random reads of every size in SIZES that fits, then one sequential run.

    Every repetition reads other places, so that no cache below the system's helps.
    """
    places = random.Random(file_nbytes)
    for size in SIZES:
        slots = file_nbytes // size
        reads = min(MAX_READS, MAX_SIZE_NBYTES // size, slots // 2)
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
    target = np.ones(len(rows))
    # Columns of like size: seeks and bytes differ by orders of magnitude.
    scale = np.linalg.norm(rows, axis=0)
    seek_s, byte_s = np.linalg.lstsq(rows / scale, target, rcond=None)[0] / scale
    if seek_s < 0 or byte_s <= 0:
        seek_s, byte_s = 0.0, rows[:, 1].sum() / (rows[:, 1] ** 2).sum()
    return float(seek_s), float(1 / byte_s)
