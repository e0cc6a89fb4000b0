"""Measures a snapshot by a child process, once for each evaluator, and keeps what was measured.

Every byte is checked before: what is kept under an id was measured of what has it. A record is
sealed, lies beside the snapshots, goes with its snapshot, and can always be made again.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mergepipe_pipeline.digest import seal, sha256_hex, unseal
from mergepipe_pipeline.domain.evaluation import Evaluation, Evaluator, Metrics
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.errors import CorruptionError, EvaluationError, MetricsError
from mergepipe_pipeline.quality.child import Ended, refuse_abandoned, run_child
from mergepipe_pipeline.quality.evaluators import command_of, environment_of, evaluator_id
from mergepipe_pipeline.snapshots.commit import verify_snapshot
from mergepipe_pipeline.snapshots.leases import Need
from mergepipe_pipeline.storage.atomic import write_atomic
from mergepipe_pipeline.storage.forms import check_form
from mergepipe_pipeline.text import in_one_line
from mergepipe_pipeline.warehouse import Warehouse

#: The end of a log that an error shows.
_MOST_LINES, _MOST_CHARS = 12, 1500


def evaluate(
    warehouse: Warehouse,
    snapshot: Snapshot,
    evaluator: Evaluator,
    folder: Path,
    *,
    fresh: bool = False,
    stop: int | None = None,
) -> Evaluation:
    """The evaluation of a snapshot: as it is kept, or measured now (always, if `fresh`).

    `folder` is that of the recipe. Raises EvaluationError, naming the log, for an evaluator that
    fails each time, MetricsError for one that ends well without metrics, CorruptionError for a
    damaged snapshot, and AbandonedError as soon as the descriptor `stop` can be read.
    """
    digest = evaluator_id(evaluator, folder)
    evaluation = None if fresh else kept(warehouse, snapshot.snapshot_id, digest)
    if evaluation is not None:
        return evaluation
    command = [*command_of(evaluator, folder), snapshot.path]
    with warehouse.leases.hold(Need(snapshot_ids=frozenset([snapshot.snapshot_id])), "evaluate"):
        verify_snapshot(Path(snapshot.path), lambda _: refuse_abandoned(stop))
        metrics, log, seconds = _tries(
            warehouse, snapshot, evaluator, folder, digest, command, stop
        )
    evaluation = Evaluation(
        snapshot.snapshot_id,
        digest,
        evaluator.label,
        metrics,
        round(seconds, 3),
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        sha256_hex(log),
    )
    keep(warehouse, evaluation, log)
    return evaluation


def _tries(
    warehouse: Warehouse,
    snapshot: Snapshot,
    evaluator: Evaluator,
    folder: Path,
    digest: str,
    command: list[str],
    stop: int | None,
) -> tuple[Metrics, bytes, float]:
    """The metrics of the first attempt that gives some, the log of all, and that one's seconds."""
    log, most = b"", 1 + evaluator.retries
    for attempt in range(1, most + 1):
        began_s = time.monotonic()
        ended = run_child(
            command,
            folder=folder,
            environment=environment_of(evaluator, Path(snapshot.path)),
            timeout_s=evaluator.timeout_s,
            stop=stop,
        )
        log += f"== attempt {attempt} of {most}: {evaluator.label}\n".encode() + ended.output
        try:
            return _metrics(ended, evaluator), log, time.monotonic() - began_s
        except NoMetricsError as error:
            problem = str(error)
            log += f"\n== {problem}\n".encode()
        if ended.code == 0:  # it has done its work, and would do the same again
            break
    path = warehouse.evaluation_path(snapshot.snapshot_id, digest).with_suffix(".failed.log")
    write_atomic(path, log)
    raise (MetricsError if ended.code == 0 else EvaluationError)(
        f"An evaluator fails: {problem}",
        where=f"{evaluator.label}, of snapshot {snapshot.snapshot_id}",
        expected="exit code 0, and as the last line of standard output a JSON object of numbers",
        found=f"after {attempt} attempt{'s' if attempt > 1 else ''}:\n{_end(ended.output)}",
        next_step=f"mend it; all that it wrote is in {path}",
    )


def _metrics(ended: Ended, evaluator: Evaluator) -> Metrics:
    if ended.code is None:
        raise NoMetricsError(f"it has not ended after {evaluator.timeout_s:g} s")
    if ended.code:
        how = f"exits with code {ended.code}"
        raise NoMetricsError(f"it {how if ended.code > 0 else f'dies of signal {-ended.code}'}")
    return metrics_of(ended.stdout)


def _end(output: bytes) -> str:
    lines = output[-4 * _MOST_CHARS :].decode(errors="replace").strip().splitlines()
    return "\n".join(lines[-_MOST_LINES:])[-_MOST_CHARS:] or "no output"


_MOST = 256
_LONGEST_NAME = 100
_SHOWN_CHARS = 120


class NoMetricsError(Exception):
    """An output that ends in no metrics; the message says why."""


def metrics_of(stdout: bytes) -> Metrics:
    """The metrics in the last line that is not blank. Raises NoMetricsError."""
    lines = stdout.split(b"\n")
    last = next((line for line in reversed(lines) if line.strip()), b"")
    if not last:
        raise NoMetricsError("it prints nothing on standard output")
    try:
        value = json.loads(last, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        raise NoMetricsError(f"its last line is no JSON: {_shown(last)}") from None
    if not isinstance(value, dict) or not value:
        raise NoMetricsError(f"its last line is no JSON object of numbers: {_shown(last)}")
    if len(value) > _MOST:
        raise NoMetricsError(f"it gives {len(value)} metrics, {_MOST} are the most")
    return {_name(name): _number(name, number) for name, number in value.items()}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise NoMetricsError("its last line gives a metric twice")
    return dict(pairs)


def _name(name: str) -> str:
    if not name.strip() or len(name) > _LONGEST_NAME or in_one_line(name) != name:
        raise NoMetricsError(
            f"the name of a metric is no text of 1 to {_LONGEST_NAME} printable letters: "
            f"{_shown(name.encode(errors='backslashreplace'))}"
        )
    return name


def _number(name: str, value: object) -> float:
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
            if math.isfinite(number):
                return number
    except OverflowError:
        pass
    raise NoMetricsError(f"its metric {name!r} is no finite number: {_shown(repr(value).encode())}")


def _shown(line: bytes) -> str:
    text = in_one_line(line[: 4 * _SHOWN_CHARS].decode(errors="replace"))
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


FORMAT = "mergepipe-evaluation/1"


def keep(warehouse: Warehouse, evaluation: Evaluation, log: bytes) -> None:
    """Keep a record with its log, in place of an older one. Raises StorageFullError."""
    path = warehouse.evaluation_path(evaluation.snapshot_id, evaluation.evaluator_id)
    write_atomic(path.with_suffix(".log"), log)
    write_atomic(path, seal({"format": FORMAT, **asdict(evaluation)}))


def kept(warehouse: Warehouse, snapshot_id: str, evaluator_id: str) -> Evaluation | None:
    """The evaluation of a snapshot that is kept; None if nothing was, or it is damaged."""
    try:
        return read(warehouse.evaluation_path(snapshot_id, evaluator_id))
    except (FileNotFoundError, CorruptionError):
        return None


def evaluations_of(warehouse: Warehouse, snapshot_id: str) -> tuple[Evaluation, ...]:
    """All that was measured of a snapshot and can be read, the oldest first."""
    folder = warehouse.evaluations / snapshot_id
    evaluations = (kept(warehouse, snapshot_id, p.stem) for p in folder.glob("*.json"))
    return tuple(sorted((e for e in evaluations if e is not None), key=lambda e: e.created))


def read(path: Path) -> Evaluation:
    """The record in a file. Raises FileNotFoundError, CorruptionError for one that is not its own.

    The log belongs to it: another one than was written is damage, too.
    """
    value = unseal(path.read_bytes(), str(path))
    said = (value.pop("format", None), value.get("snapshot_id"), value.get("evaluator_id"))
    if said != (FORMAT, path.parent.name, path.stem):
        raise _wrong(path, f"{FORMAT} of snapshot {path.parent.name}", f"{said[0]} of {said[1]}")
    what, next_step = "A snapshot's evaluation", "run `mergepipe repair`"
    evaluation = check_form(Evaluation, value, str(path), what, next_step)
    log = path.with_suffix(".log")
    digest = sha256_hex(log.read_bytes()) if log.is_file() else "no file"
    if digest != evaluation.log_sha256:
        raise _wrong(log, f"sha256 {evaluation.log_sha256[:16]}", digest[:16])
    return evaluation


def records(warehouse: Warehouse) -> Iterator[Path]:
    """The files of all records, damaged or not."""
    yield from sorted(
        p for p in warehouse.evaluations.glob("*/*.json") if not p.name.startswith(".")
    )


def _wrong(path: Path, expected: str, found: str) -> CorruptionError:
    return CorruptionError(
        "The evaluation of a snapshot is not as it was written",
        where=str(path),
        expected=expected,
        found=found,
        next_step="run `mergepipe repair`; the snapshot is evaluated again where that is needed",
    )
