"""Finds the checkpoint that a model text means: a registered name, or a path.

This is the one place that decides so, for recipes and verbs alike. It reads headers alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from mergepipe_pipeline.catalog.catalog import Catalog, Registration
from mergepipe_pipeline.contents.away import away_from, open_away, open_root
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.errors import (
    CheckpointChangedError,
    CheckpointError,
    IncompleteCheckpointError,
)
from mergepipe_pipeline.recipe.problems import suggest
from mergepipe_pipeline.recipe.references import ONE_BY_ONE, UnreadableReference, parse_reference
from mergepipe_pipeline.remote.address import is_address, is_hub_name, parse_address
from mergepipe_pipeline.resolution.addresses import at_address, is_offline, look_again, on_hub
from mergepipe_pipeline.resolution.names import free_name
from mergepipe_pipeline.storage.chain import NAME
from mergepipe_pipeline.storage.hub_cache import cached_model
from mergepipe_pipeline.storage.open_checkpoint import open_checkpoint
from mergepipe_pipeline.storage.regular import text_of
from mergepipe_pipeline.storage.roots import refuse_unmounted, why_unmounted
from mergepipe_pipeline.warehouse import Warehouse

UNKNOWN_MODEL = "A model is neither a registered name nor a path that exists"


def locate_registered(warehouse: Warehouse, text: str) -> Registration:
    """The registration that a model text means, brought up to date with the files.

    See `locate_checkpoint`.
    """
    return warehouse.catalog.register(locate_checkpoint(warehouse, text), None)


def locate_checkpoint(
    warehouse: Warehouse,
    text: str,
    relative_to: Path | None = None,
    taken: Mapping[str, str] | None = None,
    revision: str | None = None,
) -> Checkpoint:
    """The checkpoint that a model text means, as its files are now; writes nothing.

    A registered name wins over a path. A path may be absolute, below a named root (`models:chat`),
    relative to the working directory or to `relative_to` (the recipe's folder), or an address
    (`hf://org/model`, `s3://bucket/prefix`). A hub name (`org/model`) is looked up in the local
    Hugging Face cache, then at the hub. What `pack --replace` moved away is found by its name, and
    where it was. `revision` picks a version of a registered name, or a commit of the hub. `taken`
    maps names given but not registered yet to their roots. Raises CheckpointError when nothing
    fits, RemoteError for what cannot be reached, CheckpointChangedError for a revision whose files
    were replaced.
    """
    catalog = warehouse.catalog
    if text in catalog:
        if revision is None:
            look_again(catalog.root(text))
            return _open_registered(warehouse, catalog.root(text), text)
        return _as_registered(warehouse, _revision(catalog, text, revision), revision)
    if is_address(text):
        return at_address(catalog, parse_address(text, revision), taken or {})
    place = warehouse.roots.here(text) if warehouse.roots.means(text) else text
    for folder in (Path.cwd(), relative_to):
        if folder is not None and os.path.exists(folder / expanded(place)):
            root = (folder / expanded(place)).resolve()
            checkpoint = open_checkpoint(str(root), free_name(catalog, root, taken or {}))
            _refuse_revision(checkpoint, revision)
            return checkpoint
    if why_unmounted(place):
        refuse_unmounted(place)
    cached = _cached(catalog, text, revision, taken or {})
    if cached is not None:
        return cached
    moved = _moved(warehouse, place, relative_to) if revision is None else None
    if moved is not None:
        return moved
    near = partial(_near_path, text, relative_to)
    if is_hub_name(text) and not is_offline():
        return on_hub(catalog, text, revision, taken or {}, near)
    _refuse_landed(warehouse, text)
    raise _unknown(catalog, text, near())


def _refuse_landed(warehouse: Warehouse, text: str) -> None:
    """Raise CheckpointError for the name of a folder of the inbox, which says why it waits."""
    folder = warehouse.inbox / text
    if NAME.fullmatch(text) and os.path.exists(folder):
        open_checkpoint(str(folder), text)
        raise CheckpointError(
            "A model lies in the inbox and is not indexed yet",
            where=str(folder),
            next_step="let `mergepipe ui` index it, or register it: `mergepipe register "
            f"{folder} --name {text}`",
        )


def registered_version(catalog: Catalog, text: str) -> Checkpoint:
    """The checkpoint that NAME or NAME@REVISION was registered as; looks at no file of it.

    Raises NotFoundError for an unknown name, CheckpointError for a revision that there is none of.
    """
    if text in catalog:
        return catalog.get(text).checkpoint
    try:
        ref = parse_reference(text)
    except UnreadableReference as error:
        raise CheckpointError(
            "A version of a registered name cannot be read",
            where=text,
            expected="NAME, or NAME@VERSION",
            found=str(error),
            next_step="correct it; `mergepipe ls` lists the names",
        ) from error
    if ref.revision is None or ref.lora is not None:
        return catalog.get(text).checkpoint
    if ref.model not in catalog:
        return catalog.get(ref.model).checkpoint
    return _revision(catalog, ref.model, ref.revision)


def _near_path(text: str, relative_to: Path | None) -> str:
    """`; did you mean …?` for a path whose folder is there and holds a folder of a near name."""
    parent = text[: text.rfind("/") + 1]
    for folder in (Path.cwd(), relative_to) if parent else ():
        if folder is None:
            continue
        with suppress(OSError):
            places = (p for p in (folder / expanded(parent)).iterdir() if p.is_dir())
            if near := suggest(text, [f"{parent}{text_of(p.name)}" for p in places]):
                return near
    return ""


def _unknown(catalog: Catalog, text: str, near: str) -> CheckpointError:
    return CheckpointError(
        UNKNOWN_MODEL,
        where=text,
        expected="a folder with safetensors, a model in the Hugging Face cache, an address like "
        "hf://org/model or s3://bucket/prefix, or one of the names of `mergepipe ls`",
        found=f"no such name, and nothing at {text!r}{suggest(text, catalog.names()) or near}",
        next_step=f"check the path; of several adapters on one model, {ONE_BY_ONE}"
        if text.count("+") > 1
        else "check the spelling, or give the model's folder or address",
    )


def _open_registered(warehouse: Warehouse, root: str, name: str) -> Checkpoint:
    """What is at the root of a registered name. Raises CheckpointError, also where it is gone."""
    is_gone = "://" not in root and not os.path.exists(root)
    if is_gone and away_from(warehouse, root) is None:
        raise CheckpointError(
            "The folder of a registered checkpoint is gone",
            where=f"{name}, registered at {root}",
            expected="a folder with safetensors files",
            found="nothing at this path that may be read",
            next_step="put it back, or say where it is now: "
            f"`mergepipe register NEWPATH --name {name}`",
        )
    return open_root(warehouse, root, name)


def _cached(
    catalog: Catalog, text: str, revision: str | None, taken: Mapping[str, str]
) -> Checkpoint | None:
    """A model in the hub's cache; None if it is absent, or incomplete while the hub has all of it.

    Raises CheckpointError.
    """
    folder = cached_model(text, revision)
    if folder is None:
        return None
    try:
        return open_checkpoint(str(folder), free_name(catalog, folder, taken, text))
    except IncompleteCheckpointError:
        if is_offline():
            raise
        return None


def exists(warehouse: Warehouse, text: str, relative_to: Path | None = None) -> bool:
    """Whether a text as it stands is a registered name or a path."""
    folders = [f for f in (Path.cwd(), relative_to) if f is not None]
    is_path = any(os.path.exists(folder / expanded(text)) for folder in folders)
    return is_path or text in warehouse.catalog


def expanded(path: str | Path) -> Path:
    """The path with `~` replaced; as it is where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def names_here(warehouse: Warehouse) -> list[str]:
    """The registered names but those whose files `pack --replace` moved away."""
    moved = warehouse.replaced.roots_away()
    return [n for n in warehouse.catalog.names() if warehouse.catalog.root(n) not in moved]


def has_left(warehouse: Warehouse, name: str, root: str) -> bool:
    """Whether the files of a registered name were taken away, and are in no pack.

    False where nobody can know: for an address, and in an empty or missing folder, as of a disk
    that is not mounted.
    """
    if "://" in root or (warehouse.inbox / name).exists():
        return False
    place = expected_place(warehouse, name, root)
    if place.exists():
        return False
    is_known = place.parent.is_dir() and any(place.parent.iterdir())
    return is_known and root not in warehouse.replaced.roots_away()


def expected_place(warehouse: Warehouse, name: str, root: str) -> Path:
    """The place whose absence means that a registered name is gone; the inbox has no files of it.

    It is the name's root, or the link in the inbox by which it came, once that is removed. A link
    that leads to nothing is still there: its target may be on a disk that is not mounted.
    """
    link = warehouse.inbox / name
    is_withdrawn = warehouse.catalog.came_by_link(name) and not os.path.lexists(link)
    return link if is_withdrawn else Path(root)


def _moved(warehouse: Warehouse, text: str, relative_to: Path | None) -> Checkpoint | None:
    """What was at a path and was moved away, under the name by which it is registered."""
    for folder in (Path.cwd(), relative_to):
        root = folder and os.path.realpath(folder / expanded(text))
        record = away_from(warehouse, root) if root else None
        if root and record is not None:
            plain = free_name(warehouse.catalog, Path(root), {})
            is_known = plain in warehouse.catalog
            return open_away(warehouse, record, plain if is_known else record.name)
    return None


def _as_registered(warehouse: Warehouse, registered: Checkpoint, revision: str) -> Checkpoint:
    """The checkpoint, if its files are still those of that revision."""
    present = _open_registered(warehouse, registered.root, registered.name)
    if present.checkpoint_id != registered.checkpoint_id:
        pinned = f"{registered.name}@{revision}"
        is_moved = warehouse.replaced.find(registered.checkpoint_id) is not None
        raise CheckpointChangedError(
            "The files of a revision have been replaced",
            where=f"{pinned}, {registered.root}",
            expected=f"checkpoint {registered.checkpoint_id[:8]}",
            found=f"checkpoint {present.checkpoint_id[:8]}",
            next_step=f"name the folder that `mergepipe unpack {pinned} --to FOLDER` makes"
            if is_moved
            else "put the old files back, or leave the revision out for what is there now",
        )
    return present


def _revision(catalog: Catalog, name: str, revision: str) -> Checkpoint:
    history = catalog.history(name)
    for registration in history:
        c = registration.checkpoint
        if revision == str(registration.version) or (
            len(revision) >= 7 and c.checkpoint_id.startswith(revision)
        ):
            return c
    raise CheckpointError(
        "A registered checkpoint has no such revision",
        where=f"{name}@{revision}",
        expected="a version number or the start of a checkpoint id: "
        + ", ".join(f"{r.version} ({r.checkpoint.checkpoint_id[:8]})" for r in history[-5:]),
        found=revision,
        next_step="correct the revision, or leave it out for the newest",
    )


def _refuse_revision(checkpoint: Checkpoint, revision: str | None) -> None:
    if revision is not None and not Path(checkpoint.root).name.startswith(revision):
        raise CheckpointError(
            "A folder has no revisions",
            where=f"{checkpoint.root}@{revision}",
            expected="a registered name or a model in the Hugging Face cache",
            found="a plain folder, which holds one state only",
            next_step="leave the revision out, or give the folder of that revision",
        )
