"""The verb `register`: make a checkpoint known by name, from its headers alone."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from mergepipe_pipeline.catalog.catalog import Registration
from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.remote.address import is_address, is_hub_name
from mergepipe_pipeline.resolution.locate import Places, expanded, free_name, locate_registered
from mergepipe_pipeline.warehouse import Warehouse


def register(
    warehouse: Warehouse, path: str | Path, name: str | None = None, base: str | None = None
) -> Registration:
    """Register the checkpoint at a path or an address under `name` (default: its folder's name).

    An unchanged checkpoint adds no version. Raises CheckpointError for what is not a readable
    checkpoint, NotFoundError for an unknown base.
    """
    catalog = warehouse.catalog
    if base is not None:
        base = locate_registered(warehouse, base).name
    if is_address(str(path)):
        checkpoint = Places(warehouse).locate(str(path))
        return catalog.register(
            replace(checkpoint, name=name or checkpoint.name), base, is_meant=True
        )
    root = Path(os.path.realpath(expanded(path)))
    if is_hub_name(str(path)) and not root.exists():
        raise CheckpointError(
            "A checkpoint is not there",
            where=str(root),
            expected="a folder with safetensors files",
            found="nothing at this path that may be read",
            next_step=f"check the path, or write hf://{path} for a model of the Hugging Face hub",
        )
    chosen = name or free_name(catalog, root, {})
    by_link = Path(path) == warehouse.inbox / chosen and Path(path).is_symlink()
    checkpoint = open_checkpoint(str(root), chosen)
    return catalog.register(checkpoint, base, is_meant=True, by_link=by_link)
