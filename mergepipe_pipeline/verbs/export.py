"""The verb behind `merge --out`: a plain Hugging Face folder with the recipe beside the weights."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from mergepipe_pipeline.quality.measure import evaluations_of
from mergepipe_pipeline.snapshots.export import (
    Shards,
    check_out,
    export_snapshot,
    refuse_full,
)
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.snapshots.model_folder import RECIPE_FILE
from mergepipe_pipeline.warehouse import Warehouse

__all__ = ["RECIPE_FILE", "Shards", "check_out", "export", "refuse_full"]


def export(warehouse: Warehouse, snapshot_id: str, out: Path, shards: Shards | None = None) -> None:
    """Copy a snapshot to `out`, with what was measured of it; in `shards` of another size.

    Raises what `snapshots.folder_export` raises.
    """
    measured = [asdict(e) for e in evaluations_of(warehouse, snapshot_id)]
    snapshot = load_snapshot(warehouse.snapshots, snapshot_id)
    export_snapshot(snapshot, out, measured, shards)
