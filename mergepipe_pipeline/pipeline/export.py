"""The verb behind `merge --out`: a plain Hugging Face folder with the recipe beside the weights."""

from __future__ import annotations

from pathlib import Path

from mergepipe_pipeline.digest import unseal
from mergepipe_pipeline.snapshots.export import check_out, export_snapshot
from mergepipe_pipeline.snapshots.load import load_snapshot
from mergepipe_pipeline.snapshots.stage import PROVENANCE
from mergepipe_pipeline.warehouse import Warehouse

__all__ = ["RECIPE_FILE", "check_out", "export"]

RECIPE_FILE = "mergepipe_recipe.yml"


def export(home: Warehouse, snapshot_id: str, out: Path) -> None:
    """Copy a snapshot to `out`. Raises what `snapshots.export` raises."""
    snapshot = load_snapshot(home.snapshots, snapshot_id)
    path = Path(snapshot.path) / PROVENANCE
    recipe = str(unseal(path.read_bytes(), str(path)).get("recipe", ""))
    export_snapshot(snapshot, out, {RECIPE_FILE: recipe.encode()})
