"""Finds the checkpoint that a model text means: a registered name, a path, or an address.

This is the one place that decides so, for recipes and verbs alike: what it gives has its name, its
root and what lies there, and nothing below looks again. It reads headers alone.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mergepipe_pipeline.catalog.catalog import Catalog, Registration
from mergepipe_pipeline.checkpoints.open_checkpoint import is_complete, open_checkpoint
from mergepipe_pipeline.checkpoints.training_run import parse_run, run_root
from mergepipe_pipeline.digest import sha256_hex
from mergepipe_pipeline.domain.bounds import NAME
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.recipe import ModelRef
from mergepipe_pipeline.errors import (
    CheckpointChangedError,
    CheckpointError,
    IncompleteCheckpointError,
    RemoteError,
)
from mergepipe_pipeline.facts.offline import open_root
from mergepipe_pipeline.recipe.problems import suggest
from mergepipe_pipeline.recipe.references import ONE_BY_ONE, UnreadableReference, parse_reference
from mergepipe_pipeline.remote.address import (
    HUB,
    Address,
    cached_model,
    is_address,
    is_hub_name,
    parse_address,
)
from mergepipe_pipeline.storage.regular import text_of
from mergepipe_pipeline.storage.roots import refuse_unmounted, why_unmounted
from mergepipe_pipeline.warehouse import Warehouse

UNKNOWN_MODEL = "A model is neither a registered name nor a path that exists"


@dataclass(frozen=True)
class Places:
    """Where the model texts of one recipe or command are looked up.

    `folder` is the recipe's, where relative paths start besides the working directory. `pending`
    need no look-up, by the text (`model@revision` with one) that names them: results of earlier
    stages, and inputs of a merge that is replayed. What was `found` here, by text and revision, is
    not opened again, and keeps its name.
    """

    warehouse: Warehouse
    folder: Path | None = None
    pending: Mapping[str, Checkpoint] = field(default_factory=dict)
    found: dict[tuple[str, str | None], Checkpoint] = field(default_factory=dict)

    def of(self, ref: ModelRef) -> tuple[Checkpoint, ...]:
        """The checkpoint of a reference, and the adapter's if it names one. Raises as `locate`."""
        if ref.text in self.pending or self.has(ref.text):
            return (self._looked_up(ref.text, None),)
        model = self._looked_up(ref.model, ref.revision)
        if ref.lora is None:
            return (model,)
        adapter = self._looked_up(ref.lora, ref.lora_revision)
        if adapter.kind != "adapter":
            raise CheckpointError(
                "What stands behind the `+` is no adapter",
                where=ref.text,
                expected="a PEFT folder with adapter_config.json",
                found=f"a {adapter.kind} checkpoint at {adapter.root}",
                next_step="list the checkpoint as a model of its own",
            )
        return (model, adapter)

    def has(self, text: str) -> bool:
        """Whether a text as it stands is a registered name or a path."""
        return any(map(os.path.exists, self._paths(text))) or text in self.warehouse.catalog

    def locate(self, text: str, revision: str | None = None) -> Checkpoint:
        """The checkpoint that a model text means, as its files are now; writes nothing.

        A registered name wins over a path. A path may be absolute, below a named root
        (`models:chat`), relative to the working directory or to `folder`, `dcp://PATH?prefix=NAMES`
        of a training run, or an address (`hf://org/model`, `s3://bucket/prefix`). A hub name
        (`org/model`) is looked up in the local Hugging Face cache, then at the hub. `revision`
        picks a version of a registered name, or a commit of the hub. Raises CheckpointError when
        nothing fits, RemoteError for what cannot be reached, CheckpointChangedError for a revision
        whose files were replaced.
        """
        roots = self.warehouse.roots
        if text in self.warehouse.catalog:
            return self._registered(text, revision)
        if is_address(text):
            return self._at_address(parse_address(text, revision))
        plain, query = parse_run(text)
        place = roots.here(plain) if roots.means(plain) else plain
        for path in filter(os.path.exists, self._paths(place)):
            folder = path.resolve()
            root = run_root(folder, query) if query else folder
            checkpoint = self._opened(root, folder.name if query else None)
            _refuse_revision(checkpoint, revision)
            return checkpoint
        if why_unmounted(place):
            refuse_unmounted(place)
        found = self._cached(text, revision)
        if found is not None:
            return found
        if is_hub_name(text) and not is_offline():
            return self._on_hub(text, revision)
        _refuse_landed(self.warehouse, text)
        raise self._unknown(text)

    def _looked_up(self, text: str, revision: str | None) -> Checkpoint:
        pending = self.pending.get(text if revision is None else f"{text}@{revision}")
        if pending is not None:
            return pending
        if text in self.pending:
            raise CheckpointError(
                "The result of a stage has no revisions",
                where=f"{text}@{revision}",
                expected="the stage's name alone, or another model",
                found=f"the stage {text!r} of this file",
                next_step="leave the revision out, or rename the stage if another model is meant",
            )
        if (text, revision) not in self.found:
            self.found[text, revision] = self.locate(text, revision)
        return self.found[text, revision]

    def _paths(self, text: str) -> list[Path]:
        return [f / expanded(text) for f in (Path.cwd(), self.folder) if f is not None]

    def _opened(self, root: Path | str, text: str | None = None) -> Checkpoint:
        taken = {c.name: c.root for c in self.found.values()}
        name = free_name(self.warehouse.catalog, root, taken, text)
        return open_root(self.warehouse, str(root), name)

    def _registered(self, name: str, revision: str | None) -> Checkpoint:
        catalog = self.warehouse.catalog
        if revision is None:
            root = catalog.root(name)
            if is_address(root) and not root.startswith(f"{HUB}://"):  # commits never change
                from mergepipe_pipeline.remote.servers import PINS

                PINS.renewed(parse_address(root))
            return _open_registered(self.warehouse, root, name)
        return _as_registered(self.warehouse, _revision(catalog, name, revision), revision)

    def _at_address(self, address: Address) -> Checkpoint:
        """A model of the hub that lies whole in the hub's cache on this machine is read there."""
        from mergepipe_pipeline.remote.servers import PINS  # imported late: few merges need it

        is_hub = address.scheme == HUB
        if is_hub and is_offline():
            folder = cached_model(address.place, address.revision)
            if folder is not None:
                return self._opened(folder, address.name)
        root = PINS.renewed(address).listing.root
        cached = cached_model(address.place, root.rpartition("@")[2]) if is_hub else None
        if cached is not None and is_complete(str(cached)) is None:
            root = str(cached)
        return self._opened(root, address.name)

    def _on_hub(self, text: str, revision: str | None) -> Checkpoint:
        try:
            return self._at_address(Address(HUB, text, revision))
        except RemoteError as error:
            meant = self._suggested_path(text)
            raise CheckpointError(
                "A model is neither a registered name, nor a path that exists, nor one that the "
                "hub gives",
                where=text if revision is None else f"{text}@{revision}",
                expected="one of the names of `mergepipe ls`, a folder with safetensors, or "
                "org/model",
                found=f"no such name, nothing at {text!r}{meant}; the hub: {error.what}: "
                f"{error.found}",
                next_step=f"correct the path; {error.next_step}" if meant else error.next_step,
            ) from error

    def _cached(self, text: str, revision: str | None) -> Checkpoint | None:
        """A model in the hub's cache; None for one that is incomplete while the hub has it all."""
        folder = cached_model(text, revision)
        try:
            return None if folder is None else self._opened(folder, text)
        except IncompleteCheckpointError:
            if is_offline():
                raise
            return None

    def _suggested_path(self, text: str) -> str:
        """`; did you mean …?` for a path whose folder is there and holds one of a similar name."""
        parent = text[: text.rfind("/") + 1]
        for folder in self._paths(parent) if parent else ():
            with suppress(OSError):
                names = [f"{parent}{text_of(p.name)}" for p in folder.iterdir() if p.is_dir()]
                if suggestion := suggest(text, names):
                    return suggestion
        return ""

    def _unknown(self, text: str) -> CheckpointError:
        suggestion = suggest(text, self.warehouse.catalog.names()) or self._suggested_path(text)
        return CheckpointError(
            UNKNOWN_MODEL,
            where=text,
            expected="a folder with safetensors, a model in the Hugging Face cache, an address "
            "like hf://org/model or s3://bucket/prefix, or one of the names of `mergepipe ls`",
            found=f"no such name, and nothing at {text!r}{suggestion}",
            next_step=f"check the path; of several adapters on one model, {ONE_BY_ONE}"
            if text.count("+") > 1
            else "check the spelling, or give the model's folder or address",
        )


def locate_registered(warehouse: Warehouse, text: str) -> Registration:
    """The registration that a model text means, brought up to date with the files.

    See `Places.locate`.
    """
    return warehouse.catalog.register(Places(warehouse).locate(text), None)


def open_path(warehouse: Warehouse, path: str | Path, name: str | None = None) -> Checkpoint:
    """The checkpoint at a path, whatever names are registered; by default a `free_name` for it."""
    root = Path(os.path.realpath(expanded(path)))
    if is_hub_name(str(path)) and not root.exists():
        raise CheckpointError(
            "A checkpoint is not there",
            where=str(root),
            expected="a folder with safetensors files",
            found="nothing at this path that may be read",
            next_step=f"check the path, or write hf://{path} for a model of the Hugging Face hub",
        )
    return open_checkpoint(str(root), name or free_name(warehouse.catalog, root, {}))


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


def expanded(path: str | Path) -> Path:
    """The path with `~` replaced; as it is where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def is_offline() -> bool:
    """Whether the hub is not to be asked, as huggingface_hub understands it."""
    setting = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return setting.upper() in ("1", "ON", "YES", "TRUE")


def names_here(warehouse: Warehouse) -> list[str]:
    """The registered names but those whose files `pack --replace` moved away."""
    moved = warehouse.offline.roots()
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
    return place.parent.is_dir() and any(place.parent.iterdir())


def expected_place(warehouse: Warehouse, name: str, root: str) -> Path:
    """The place whose absence means that a registered name is gone; the inbox has no files of it.

    It is the name's root, or the link in the inbox by which it came, once that is removed. A link
    that leads to nothing is still there: its target may be on a disk that is not mounted.
    """
    link = warehouse.inbox / name
    is_withdrawn = warehouse.catalog.came_by_link(name) and not os.path.lexists(link)
    return link if is_withdrawn else Path(root)


def free_name(
    catalog: Catalog, root: Path | str, taken: Mapping[str, str], text: str | None = None
) -> str:
    """The folder's name (or `text`), or with a digest of the path if another checkpoint has it.

    The path is the recorded one: names are part of ids, which are the same on all machines. A model
    of the hub keeps its name whatever the commit, but for two of them in one recipe (`taken`).
    A name has letters A to Z, digits and `._-`, as models of the hub: letters lose their accents.
    """
    path = Path(root)
    plain = _plain(text or (path.stem if os.path.isfile(path) else path.name))
    owner, own_root = taken.get(plain), str(root)
    if owner is None and plain in catalog:
        owner, own_root = _unpinned(catalog.root(plain)), _unpinned(own_root)
    if owner not in (None, own_root):
        return f"{plain}-{sha256_hex(catalog.roots.recorded(str(root)).encode())[:6]}"
    return plain


def _plain(text: str) -> str:
    letters = "".join(
        c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c)
    )
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", letters).lstrip(".-_")
    return plain or f"checkpoint-{sha256_hex(os.fsencode(text))[:6]}"


def _unpinned(root: str) -> str:
    """An address without its commit; any other root as it is."""
    if not is_address(root):
        return root
    address = parse_address(root)
    return f"{address.scheme}://{address.place}"


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


def _open_registered(warehouse: Warehouse, root: str, name: str) -> Checkpoint:
    """Open the root of a registered name. Raises CheckpointError, also where it is gone."""
    if "://" not in root and not os.path.exists(root):
        raise CheckpointError(
            "The folder of a registered checkpoint is gone",
            where=f"{name}, registered at {root}",
            expected="a folder with safetensors files",
            found="nothing at this path that may be read",
            next_step="put it back, or say where it is now: "
            f"`mergepipe register NEWPATH --name {name}`",
        )
    return open_root(warehouse, root, name)


def _as_registered(warehouse: Warehouse, registered: Checkpoint, revision: str) -> Checkpoint:
    """The checkpoint, if its files are still those of that revision."""
    present = _open_registered(warehouse, registered.root, registered.name)
    if present.checkpoint_id != registered.checkpoint_id:
        pinned = f"{registered.name}@{revision}"
        is_moved = warehouse.offline.find(registered.checkpoint_id) is not None
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
