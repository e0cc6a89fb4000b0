"""The verb `register`: make a checkpoint known by name, from its headers alone.

Also the one place that decides what a model text in a recipe means: a registered name, or a path.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from mergepipe_pipeline.catalog.catalog import Catalog, Registration
from mergepipe_pipeline.errors import CheckpointError, NotFoundError
from mergepipe_pipeline.storage.checkpoint import open_checkpoint
from mergepipe_pipeline.warehouse import Warehouse


def register(
    home: Warehouse, path: str | Path, name: str | None = None, base: str | None = None
) -> Registration:
    """Register the checkpoint at `path` under `name` (default: its folder's name).

    An unchanged checkpoint adds no version. Raises CheckpointError for what is not a readable
    checkpoint, NotFoundError for an unknown base.
    """
    catalog = Catalog(home.catalog)
    if base is not None:
        base = resolve(home, base).name
    root = Path(path).expanduser().resolve()
    chosen = name or _free_name(catalog, root)
    return catalog.register(open_checkpoint(str(root), chosen), base)


def resolve(home: Warehouse, text: str, relative_to: Path | None = None) -> Registration:
    """The registration that a recipe's model text means, brought up to date with the files.

    A registered name wins over a path. A path may be absolute, relative to the working directory or
    to `relative_to` (the recipe's folder). Raises CheckpointError when neither fits.
    """
    catalog = Catalog(home.catalog)
    if text in catalog.names():
        known = catalog.get(text)
        return catalog.register(open_checkpoint(known.checkpoint.root, text), known.base)
    for folder in (Path.cwd(), relative_to):
        if folder is not None and (folder / Path(text).expanduser()).exists():
            return register(home, folder / Path(text).expanduser())
    try:
        catalog.get(text)
    except NotFoundError as error:
        near = error.next_step
    raise CheckpointError(
        "A model is neither a registered name nor a path that exists",
        where=text,
        expected="a folder with safetensors, or one of the names of `mergepipe ls`",
        found=f"no such name, and nothing at {text!r}",
        next_step=near or "check the spelling, or download the model and give its folder",
    )


def _free_name(catalog: Catalog, root: Path) -> str:
    """The folder's name, or with a digest of the path if another checkpoint has taken it."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", root.stem if root.is_file() else root.name)
    plain = plain.lstrip(".-_") or "checkpoint"
    if plain in catalog.names() and catalog.get(plain).checkpoint.root != str(root):
        return f"{plain}-{hashlib.sha256(str(root).encode()).hexdigest()[:6]}"
    return plain
