"""The size of weight files in a folder that a merge is written to, as an option of `merge`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from mergepipe_pipeline.snapshots.export import Shards
    from mergepipe_pipeline.verbs.merge import Merged
    from mergepipe_pipeline.warehouse import Warehouse

_SIZE = re.compile(r"([0-9]+)\s*([kmgtb]?)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "b": 3, "t": 4}


def cut_of(warehouse: Warehouse, out: str | None, size: str | None) -> tuple[Path, Shards] | None:
    """The folder and its files' size; None where the option is not given.

    Raises UsageError for a size that is none, or without a folder, and what `check_out` raises.
    """
    if size is None:
        return None
    from mergepipe_pipeline.verbs.export import Shards, check_out, refuse_full

    if out is None:
        raise click.UsageError("--shard-size is of the files in --out, and there is none")
    folder = check_out(out, warehouse.root)
    refuse_full(folder)
    return folder, Shards(_nbytes(size))


def _nbytes(size: str) -> int | None:
    """Bytes of `5GB`, `500MiB`, `5B` (billions, as in mergekit) or a number; None for `none`."""
    if size.lower() == "none":
        return None
    match = _SIZE.fullmatch(size.strip())
    if match is None or int(match[1]) == 0:
        raise click.UsageError(f"--shard-size {size!r} is no size: write 5GB, 500MiB or none")
    unit: int = (1024 if match[3] else 1000) ** _POWERS[match[2].lower()]
    return int(match[1]) * unit


def exported(warehouse: Warehouse, merged: Merged, folder: Path, shards: Shards) -> Merged:
    """What was merged, in a folder with weight files of that size."""
    from mergepipe_pipeline.verbs.export import export

    export(warehouse, merged.outcome.snapshot.snapshot_id, folder, shards)
    return replace(merged, folder=folder)
