"""The verb `repair`: take away what is wrong and can be found again, and find it again.

Nothing is destroyed: files are set aside. Damaged versions of names, tags and refs are as well, so
that the newest good one counts; a name without one is registered again from its folder of the inbox
or the record of an expert in cold storage, of others it is said where they were read. Snapshots are
never touched; what is wrong with them is listed. Inputs are not read. A damaged object loses only
its name in the store, so that no later merge takes it for a layer; a snapshot that links to it
stays as it is, until its recipe is merged again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe_pipeline.catalog.formats import FACTS
from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.domain.checkpoint import PACKED
from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.execution.lookup import provenance_of
from mergepipe_pipeline.facts.offline import open_offline
from mergepipe_pipeline.integrity.auditor import Finding, Scope
from mergepipe_pipeline.integrity.records import Chains, chains
from mergepipe_pipeline.packs.offline import OfflineExpert
from mergepipe_pipeline.packs.store import indexed_pack
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.snapshots.find import list_snapshots
from mergepipe_pipeline.snapshots.stores import stored_by
from mergepipe_pipeline.storage.atomic import adopt_file
from mergepipe_pipeline.storage.chain import VersionChain, chain_names, is_chain
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse

_SCOPES: tuple[Scope, ...] = ("structure", "digests", "lineage")


@dataclass(frozen=True, slots=True)
class Repair:
    """The things that were, or would be, taken away and made again; `left` is for a person.

    `scopes` are those that were looked at.
    `aside` tells of each name and ref that had damaged versions.
    `made` and `not_made` say what, and why not, in a line each; what is not made again now is made
    where it is needed.
    """

    taken: tuple[str, ...]
    quarantine: str | None
    made: tuple[str, ...]
    not_made: tuple[str, ...]
    left: tuple[Finding, ...]
    aside: tuple[str, ...]
    scopes: tuple[Scope, ...] = _SCOPES


def repair(
    warehouse: Warehouse, *, dry_run: bool = False, progress: Progress | None = None
) -> Repair:
    """Verify records and results, take away what is derivable and wrong, analyse anew."""
    findings = verify_all(warehouse, _SCOPES, progress=progress).findings
    aside = set_aside(warehouse, dry_run=dry_run)
    damaged, files = tuple(aside), {file for some in aside.values() for file in some}
    left = tuple(f for f in findings if not f.is_derivable and f.file not in files)
    wrong = {Path(f.file) for f in findings if f.is_derivable}
    wrong |= set(_actions_of(warehouse, {p.name for p in wrong}))
    taken = sorted(p for p in wrong if p.is_relative_to(warehouse.root))
    names = tuple(map(str, taken))
    if dry_run:
        return Repair(names, None, (), (), left, damaged)
    packs = tuple(_packs_to_make(warehouse, taken))
    folder = warehouse.new_aside()
    for path in taken:
        adopt_file(path, folder / path.relative_to(warehouse.root))
    made, not_made = _analysed_again(warehouse, taken, progress)
    where = str(folder) if taken else None
    return Repair(names, where, made, (*not_made, *packs), left, damaged)


def _packs_to_make(warehouse: Warehouse, taken: Collection[Path]) -> Iterator[str]:
    """The command for each pack that is taken away: packing takes too long to do it unasked."""
    names = _names(warehouse)
    for path in taken:
        if path.parent != warehouse.packs_dir:
            continue
        of: list[str] = []
        with suppress(CorruptionError, OSError):  # whose index is damaged
            pack = indexed_pack(path)
            known = ((name, warehouse.catalog.digests(i)) for i, name in names.items())
            of = sorted(name for name, digests in known if digests and pack.holds(digests))
        yield (
            f"pack {path.name[:16]} of {' and '.join(of) or 'an expert that it does not tell'}: "
            f"`mergepipe pack {' '.join(of) or 'NAME'}` makes it again; until then merges read the "
            "original, and choose other blocks of it under a budget"
            + ("" if of else "; `mergepipe ls` shows which expert has no pack")
        )


def _actions_of(warehouse: Warehouse, objects: Collection[str]) -> Iterator[Path]:
    """The actions that name one of these objects."""
    for path in warehouse.objects.all_actions():
        entry = stored_by(path)
        if entry is not None and entry.sha256 in objects:
            yield path


def _analysed_again(
    warehouse: Warehouse, taken: Collection[Path], progress: Progress | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Analyse those of whom files of the catalog were taken away; of which it was done, and why not
    of others.
    """
    of = [p.relative_to(warehouse.catalog_dir) for p in taken if warehouse.catalog_dir in p.parents]
    ids = {part.partition(".")[0] for path in of for part in path.parts}
    made: list[str] = []
    not_made: list[str] = []
    for name in sorted(name for i, name in _names(warehouse).items() if i in ids):
        try:
            analyze(warehouse, (name,), progress=progress)
            made.append(f"what is known of {name}")
        except (MergePipeError, OSError) as error:
            not_made.append(f"what is known of {name}: {error}")
    return tuple(made), tuple(not_made)


def _names(warehouse: Warehouse) -> dict[str, str]:
    """Checkpoint id to a name that stands for it now."""
    catalog, names = warehouse.catalog, {}
    for name in catalog.names():
        with suppress(MergePipeError):  # a damaged name is left for a person
            names[catalog.get(name).checkpoint.checkpoint_id] = name
    return names


def set_aside(warehouse: Warehouse, *, dry_run: bool = False) -> dict[str, list[str]]:
    """Set the damaged versions of every chain of the warehouse aside, each chain's at once.

    Gives, by a sentence that says what counts now, the files of each chain that had some. A name
    without any version, whose files somebody removed, is named as well.
    """
    aside = {}
    for of in chains(warehouse):
        for name in sorted({*chain_names(of.folder), *_empty(of)}):
            with suppress(CorruptionError):  # a folder that cannot be listed is left for a person
                chain = VersionChain(of.folder / name)
                damaged = chain.damaged()
                if not damaged and chain.versions():
                    continue
                good = max(set(chain.versions()).difference(damaged), default=0)
                for number in () if dry_run else damaged:
                    chain.set_aside(number)
                if good:
                    counts = f"version {good} counts: {of.counts(chain.get(good))}"
                else:
                    counts = of.lost.replace("NAME", name) or _again(
                        warehouse, name, dry_run=dry_run
                    )
                versions = ", ".join(map(str, damaged))
                what = f"version {versions} damaged, set aside; " if damaged else ""
                files = [str(of.folder / name / f"{n:08d}.json") for n in damaged]
                aside[f"{of.kind} {name}: {what}{counts}"] = files
    return aside


def _empty(of: Chains) -> list[str]:
    """The names of checkpoints that have a folder and no version that counts."""
    folders = of.folder.iterdir() if of.kind == "name" and of.folder.is_dir() else ()
    return [p.name for p in folders if p.is_dir() and not is_chain(p)]


def _again(warehouse: Warehouse, name: str, *, dry_run: bool) -> str:
    """Register a name without a good version again, or say what a person can do."""
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
    for snapshot in list_snapshots(warehouse.snapshots):
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
