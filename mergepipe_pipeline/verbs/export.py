"""The verb behind `merge --out`: a plain Hugging Face folder with the recipe beside the weights."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from mergepipe_pipeline.evaluation.store import evaluations_of
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.snapshots.folder_export import RECIPE_FILE, export_snapshot
from mergepipe_pipeline.snapshots.out_folder import check_out
from mergepipe_pipeline.warehouse import Warehouse

__all__ = ["RECIPE_FILE", "check_out", "export"]


def export(warehouse: Warehouse, snapshot_id: str, out: Path) -> None:
    """Copy a snapshot to `out`, with what was measured of it.

    Raises what `snapshots.folder_export` raises.
    """
    measured = [asdict(e) for e in evaluations_of(warehouse, snapshot_id)]
    export_snapshot(load_snapshot(warehouse.snapshots, snapshot_id), out, measured)
