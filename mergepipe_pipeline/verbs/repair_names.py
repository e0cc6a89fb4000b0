"""What `repair` does with damaged versions of names, tags and refs: it sets them aside and says so.

The newest good version counts then. A name without one is registered again from its folder of the
inbox, or from the record of an expert in cold storage; of others it is said where they were read.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mergepipe_pipeline.catalog.formats import FACTS
from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.contents.offline import open_offline
from mergepipe_pipeline.domain.checkpoint import PACKED
from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.execution.lookup import provenance_of
from mergepipe_pipeline.integrity.records import readable_snapshots
from mergepipe_pipeline.packs.offline import OfflineExpert
from mergepipe_pipeline.storage.chain import VersionChain, chain_names, is_chain
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse

Kind = Literal["name", "ref", "tags of", "quarantine of"]


@dataclass(frozen=True, slots=True)
class SetAside:
    """The damaged versions (their files) of one chain; `summary` says what counts now."""

    files: tuple[str, ...]
    summary: str


def set_aside(warehouse: Warehouse, *, dry_run: bool = False) -> tuple[SetAside, ...]:
    """Set the damaged versions of every chain of the warehouse aside, each chain's at once.

    A name without any version, whose files somebody removed, is named as well.
    """
    aside = []
    folders: tuple[tuple[Kind, Path], ...] = (
        ("name", warehouse.catalog_dir / "names"),
        ("tags of", warehouse.catalog_dir / "tags"),
        ("ref", warehouse.refs_dir),
        ("quarantine of", warehouse.quarantined_dir),
    )
    for kind, folder in folders:
        for name in sorted({*chain_names(folder), *_empty(kind, folder)}):
            with suppress(CorruptionError):  # a folder that cannot be listed is left for a person
                chain = VersionChain(folder / name)
                if (damaged := chain.damaged()) or not chain.versions():
                    good = max(set(chain.versions()).difference(damaged), default=0)
                    files = tuple(str(folder / name / f"{n:08d}.json") for n in damaged)
                    if not dry_run:
                        for number in damaged:
                            chain.set_aside(number)
                    counts = _counts(chain, kind, good) or _again(
                        warehouse, kind, name, dry_run=dry_run
                    )
                    versions = ", ".join(map(str, damaged))
                    what = f"version {versions} damaged, set aside; " if damaged else ""
                    sentence = f"{kind} {name}: {what}{counts}"
                    aside.append(SetAside(files, sentence))
    return tuple(aside)


def _empty(kind: Kind, folder: Path) -> list[str]:
    """The names of checkpoints that have a folder and no version that counts."""
    folders = folder.iterdir() if kind == "name" and folder.is_dir() else ()
    return [p.name for p in folders if p.is_dir() and not is_chain(p)]


def _counts(chain: VersionChain, kind: Kind, number: int) -> str:
    """What a chain stands for; empty for a chain without a good version."""
    if not number:
        return ""
    value = chain.get(number)
    if kind == "tags of":
        return f"version {number} counts: {', '.join(value['tags']) or 'none'}"
    if kind == "quarantine of":
        return "the other decisions count; see `mergepipe ls`"
    stands_for = f"snapshot {value['snapshot_id']}" if kind == "ref" else value["root"]
    return f"version {number} counts: {stands_for}"


def _again(warehouse: Warehouse, kind: Kind, name: str, *, dry_run: bool) -> str:
    """Register a name without a good version again, or say what a person can do."""
    if kind == "ref":
        return f"no version is left: `mergepipe publish SNAPSHOT --ref {name}`"
    if kind == "tags of":
        return f"no version is left: `mergepipe tag {name} --add TAG`"
    if kind == "quarantine of":
        return f"no decision is left: `mergepipe quarantine {name}` decides anew"
    folder = warehouse.inbox / name
    if folder.is_dir():
        with suppress(MergePipeError):
            if not dry_run:
                there = open_checkpoint(str(folder), name)
                register(warehouse, folder, name, _base_of(warehouse, there.checkpoint_id))
            return f"registered again: {folder}"
    record = _record_of(warehouse, name)
    if record is not None and record.is_offline:
        with suppress(MergePipeError):
            checkpoint = replace(open_offline(warehouse, record, name), root=record.root)
            if not dry_run:
                warehouse.catalog.register(checkpoint, record.base)
            return f"registered again, in cold storage: {record.cold}"
    path, base = (record.root, record.base) if record is not None else _merged(warehouse, name)
    from_base = f" --base {base}" if base else ""
    return f"no version is left: `mergepipe register {path or 'PATH'} --name {name}{from_base}`"


def _record_of(warehouse: Warehouse, name: str) -> OfflineExpert | None:
    """The record of what was moved to cold storage under a name last."""
    store, newest = warehouse.offline, None
    for checkpoint_id in sorted(store.ids(), key=lambda i: store.path(i).stat().st_mtime):
        with suppress(MergePipeError):
            record = store.find(checkpoint_id)
            newest = record if record is not None and record.name == name else newest
    return newest


def _merged(warehouse: Warehouse, name: str) -> tuple[str, str | None]:
    """Where the newest snapshot that was merged from a name read it, "" if none was; its base."""
    created, root, checkpoint_id = "", "", ""
    for snapshot in readable_snapshots(warehouse):
        with suppress(MergePipeError):
            provenance = provenance_of(snapshot)
            for source in provenance["sources"]:
                is_named = source["name"] == name and not source["root"].startswith(PACKED)
                if is_named and provenance["created"] > created:
                    created, root = provenance["created"], source["root"]
                    checkpoint_id = source["checkpoint_id"]
    return root, _base_of(warehouse, checkpoint_id)


def _base_of(warehouse: Warehouse, checkpoint_id: str) -> str | None:
    """The name of the base that a checkpoint was analysed against, if it is registered."""
    stats = (warehouse.catalog_dir / FACTS).glob(f"*/{checkpoint_id or '-'}/b*")
    bases = {path.parent.parent.name for path in stats}
    registered = warehouse.catalog.registrations()
    return next((name for name, _, checkpoint, *_ in registered if checkpoint in bases), None)
