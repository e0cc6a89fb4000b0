"""What was measured is kept beside the snapshots: a sealed record per snapshot and evaluator.

A record goes with its snapshot, and can always be made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

from mergepipe_pipeline.digest import seal, sha256_hex, unseal
from mergepipe_pipeline.domain.evaluation import Evaluation
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.storage.atomic import write_atomic
from mergepipe_pipeline.storage.forms import check_form
from mergepipe_pipeline.warehouse import Warehouse

FORMAT = "mergepipe-evaluation/1"


def keep(warehouse: Warehouse, evaluation: Evaluation, log: bytes) -> None:
    """Keep a record with its log, in place of an older one. Raises StorageFullError."""
    path = warehouse.evaluation_path(evaluation.snapshot_id, evaluation.evaluator_id)
    write_atomic(path.with_suffix(".log"), log)
    write_atomic(path, seal({"format": FORMAT, **asdict(evaluation)}))


def kept(warehouse: Warehouse, snapshot_id: str, evaluator_id: str) -> Evaluation | None:
    """What was measured of a snapshot by an evaluator; None if nothing was, or it is damaged."""
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
    names = {f.name for f in fields(Evaluation)}
    said = (value.get("format"), value.get("snapshot_id"), value.get("evaluator_id"))
    if said != (FORMAT, path.parent.name, path.stem) or not names <= value.keys():
        raise _wrong(path, f"{FORMAT} of snapshot {path.parent.name}", f"{said[0]} of {said[1]}")
    told = {name: value[name] for name in names}
    what, next_step = "What was measured of a snapshot", "run `mergepipe repair`"
    evaluation = check_form(Evaluation, told, str(path), what, next_step)
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
        "What was measured of a snapshot is not as it was written",
        where=str(path),
        expected=expected,
        found=found,
        next_step="run `mergepipe repair`; the snapshot is evaluated again where that is needed",
    )
