"""The verb `calibrate`: what the user's storage costs, and how fast the engine works on it.

The storage is timed by `storage_benchmark`, the engine by `engine_benchmark`; here they are put
together and stored for planning and for `forecast`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mergepipe_pipeline.concurrency.threads import cores
from mergepipe_pipeline.domain.machine_profile import EnginePace, MachineProfile
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.execution.plan_leases import staging
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.storage.profile import store_profile
from mergepipe_pipeline.text import now
from mergepipe_pipeline.timing.engine_benchmark import measure_engine
from mergepipe_pipeline.timing.storage_benchmark import (
    REPEATS,
    RUN_NBYTES,
    Observation,
    fit,
    time_reads,
)
from mergepipe_pipeline.timing.storage_timers import is_stored, stream_s, write_s
from mergepipe_pipeline.warehouse import Warehouse

MIN_NBYTES = 4 << 20
#: Places that are read in turn, as from so many experts.
_STREAMS = 6
_STREAM_NBYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Calibration:
    """A profile and what it was fitted to, the sequential run last."""

    profile: MachineProfile
    observations: tuple[Observation, ...]


def calibrate(
    warehouse: Warehouse,
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
    with staging(warehouse, "calibrate") as folder:
        target = _file_to_read(warehouse, path)
        if target is None:
            target = folder / "read"
            write_s(target, temp_nbytes)
        observations = time_reads(target, progress or Silent())
        written = min(RUN_NBYTES, temp_nbytes)
        wrote_s = min(write_s(folder / f"write{n}", written) for n in range(3))
        engine = _engine_pace(target, folder) if with_engine else None
    seek_s, rate = fit(observations)
    measured = now()
    # A temporary file is gone by now.
    where = warehouse.root if target.is_relative_to(folder) else target
    profile = MachineProfile(rate, seek_s, written / wrote_s, measured, str(where), engine)
    store_profile(warehouse.profile_path, profile)
    return Calibration(profile, observations)


def _engine_pace(file: Path, folder: Path) -> EnginePace:
    """How fast the engine reads `file` and works; `folder` is for the family it works on."""
    threads = EngineOptions().workers
    streamed = [
        stream_s(file, streams=_STREAMS, threads=threads, nbytes=_STREAM_NBYTES)
        for _ in range(REPEATS)
    ]
    (folder / "family").mkdir()
    benchmark = measure_engine(folder / "family")
    return EnginePace(
        cores=cores(),
        read_bytes_per_s=max(nbytes / s for nbytes, s in streamed),  # what disturbs only slows
        start_s=benchmark.start_s,
        plan_input_s=benchmark.plan_input_s,
        methods=benchmark.methods,
    )


def _file_to_read(warehouse: Warehouse, path: str | Path | None) -> Path | None:
    """The largest file under `path`, or registered; None if nothing large is registered."""
    if path is None:
        return _largest(_registered_files(warehouse))
    root = Path(path).expanduser().resolve()
    file = _largest([root] if root.is_file() else root.rglob("*"))
    if file is None:
        raise MergePipeError(
            "There is no file to measure storage on",
            where=str(root),
            expected=f"a file of at least {MIN_NBYTES >> 20} MiB without holes, better of some GiB",
            found="none",
            next_step="name a checkpoint's folder: `mergepipe calibrate PATH`",
        )
    return file


def _registered_files(warehouse: Warehouse) -> Iterator[Path]:
    """The weight files of all current checkpoints."""
    catalog = warehouse.catalog
    for name in catalog.names():
        checkpoint = catalog.get(name).checkpoint
        yield from (Path(checkpoint.root) / file.path for file in checkpoint.files)


def _largest(paths: Iterable[Path]) -> Path | None:
    """The largest file that is there and large enough, if one is."""
    fit_for_it = [p for p in paths if p.is_file() and p.stat().st_size >= MIN_NBYTES]
    return max(filter(is_stored, fit_for_it), key=lambda p: p.stat().st_size, default=None)
