"""Measures a snapshot: by a child process, once for each evaluator.

Every byte is checked before: what is kept under an id was measured of what has it.
"""

from __future__ import annotations

import time
from pathlib import Path

from mergepipe_pipeline.digest import sha256_hex
from mergepipe_pipeline.domain.evaluation import Evaluation, Evaluator, Metrics
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.errors import EvaluationError, MetricsError
from mergepipe_pipeline.evaluation.child import Ended, refuse_abandoned, run_child
from mergepipe_pipeline.evaluation.identity import command_of, environment_of, evaluator_id
from mergepipe_pipeline.evaluation.metrics import NoMetricsError, metrics_of
from mergepipe_pipeline.evaluation.store import keep, kept
from mergepipe_pipeline.snapshots.commit import verify_snapshot
from mergepipe_pipeline.snapshots.leases import Need
from mergepipe_pipeline.storage.atomic import write_atomic
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
    """What an evaluator says of a snapshot: as it is kept, or measured now (always, if `fresh`).

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
