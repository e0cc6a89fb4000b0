"""The verb `register`: make a checkpoint known by name, from its headers alone.

Also the one place that decides what a model text in a recipe means: a registered name, or a path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from mergepipe_pipeline.catalog.catalog import Catalog, Registration
from mergepipe_pipeline.digest import sha256_hex
from mergepipe_pipeline.errors import CheckpointError, NotFoundError
from mergepipe_pipeline.spec.checkpoint import Checkpoint
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
    chosen = name or _free_name(catalog, root, {})
    return catalog.register(open_checkpoint(str(root), chosen), base)


def resolve(home: Warehouse, text: str, relative_to: Path | None = None) -> Registration:
    """The registration that a model text means, brought up to date with the files; see `look`."""
    return Catalog(home.catalog).register(look(home, text, relative_to), None)


def look(
    home: Warehouse,
    text: str,
    relative_to: Path | None = None,
    taken: Mapping[str, str] | None = None,
) -> Checkpoint:
    """The checkpoint that a recipe's model text means, as its files are now; writes nothing.

    A registered name wins over a path. A path may be absolute, relative to the working directory or
    to `relative_to` (the recipe's folder). `taken` maps names given but not registered yet to their
    roots. Raises CheckpointError when neither fits.
    """
    catalog = Catalog(home.catalog)
    if text in catalog.names():
        return open_checkpoint(catalog.get(text).checkpoint.root, text)
    for folder in (Path.cwd(), relative_to):
        if folder is not None and (folder / Path(text).expanduser()).exists():
            root = (folder / Path(text).expanduser()).resolve()
            return open_checkpoint(str(root), _free_name(catalog, root, taken or {}))
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


def _free_name(catalog: Catalog, root: Path, taken: Mapping[str, str]) -> str:
    """The folder's name, or with a digest of the path if another checkpoint has it."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", root.stem if root.is_file() else root.name)
    plain = plain.lstrip(".-_") or "checkpoint"
    owner = taken.get(plain)
    if owner is None and plain in catalog.names():
        owner = catalog.get(plain).checkpoint.root
    if owner not in (None, str(root)):
        return f"{plain}-{sha256_hex(str(root).encode())[:6]}"
    return plain
