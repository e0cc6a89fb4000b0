"""The verb `repair`: take away what is wrong and can be found again, and find it again.

Nothing is destroyed: files are set aside. Damaged versions of names, tags and refs are as well, so
that the newest good one counts; a name without one is registered again from its folder of the inbox
or the record of an expert in cold storage, of others it is said where they were read. Snapshots are
never touched; what is wrong with them is listed. Inputs are not read. A damaged object loses only
its name in the store, so that no later merge takes it for a layer; a snapshot that links to it
stays as it is, until its recipe is merged again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mergepipe_pipeline.catalog.formats import CHECKPOINTS, CONTENTS, FACTS
from mergepipe_pipeline.catalog.seals import find_sealed
from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.domain.checkpoint import PACKED
from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.execution.lookup import provenance_of
from mergepipe_pipeline.facts.offline import open_offline
from mergepipe_pipeline.facts.tensor_digests import Contents
from mergepipe_pipeline.integrity.auditor import Finding, Scope
from mergepipe_pipeline.integrity.records import action_of, readable_snapshots
from mergepipe_pipeline.packs.contents import holds
from mergepipe_pipeline.packs.index import read_contents
from mergepipe_pipeline.packs.offline import OfflineExpert
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.storage.atomic import adopt_file
from mergepipe_pipeline.storage.chain import VersionChain, chain_names, is_chain
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse

_SCOPES: tuple[Scope, ...] = ("structure", "digests", "lineage")
_STATS = re.compile(r"b(?P<block_elems>\d+)\.")


@dataclass(frozen=True, slots=True)
class Repair:
    """What was, or would be, taken away and made again; `left` are findings for a person.

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
    """Verify records and results, take away what is derivable and wrong, learn it again."""
    findings = verify_all(warehouse, _SCOPES, fresh=True, progress=progress).findings
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
    made, not_made = _learn_again(warehouse, list(_lacking(warehouse)), progress)
    where = str(folder) if taken else None
    return Repair(names, where, made, (*not_made, *packs), left, damaged)


def _packs_to_make(warehouse: Warehouse, taken: Collection[Path]) -> Iterator[str]:
    """What to run for each pack that is taken away: packing takes too long to do it unasked."""
    names = _names(warehouse)
    for path in taken:
        if path.parent != warehouse.packs_dir:
            continue
        of: list[str] = []
        with suppress(CorruptionError, OSError):  # whose index is damaged
            contents = read_contents(path)
            known = ((name, warehouse.catalog.digests(i)) for i, name in names.items())
            of = sorted(name for name, digests in known if digests and holds(contents, digests))
        yield (
            f"pack {path.name[:16]} of {' and '.join(of) or 'an expert that it does not tell'}: "
            f"`mergepipe pack {' '.join(of) or 'NAME'}` makes it again; until then merges read the "
            "original, and choose other blocks of it under a budget"
            + ("" if of else "; `mergepipe ls` shows which expert has no pack")
        )


def _actions_of(warehouse: Warehouse, objects: Collection[str]) -> Iterator[Path]:
    """The actions that name one of these objects."""
    for path in warehouse.objects.all_actions():
        entry = action_of(path)
        if entry is not None and entry.sha256 in objects:
            yield path


def _lacking(warehouse: Warehouse) -> Iterator[Path]:
    """Files of the catalog that lie in quarantine and of which there is none of the same facts.

    A repair that was killed has not learned all that it took away.
    """
    for folder in sorted(warehouse.aside.glob("*")):
        for path in sorted((folder / warehouse.catalog_dir.name).rglob("*.*.*")):
            was = warehouse.root / path.relative_to(folder)
            if not find_sealed(was.parent, was.name.rsplit(".", 2)[0]):
                yield was


def _learn_again(
    warehouse: Warehouse, lacking: Collection[Path], progress: Progress | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Records, digests and statistics of registered checkpoints; what was made, and what not."""
    names = _names(warehouse)
    work: dict[str, Callable[[], object]] = {}
    for path in lacking:
        work |= _to_learn(warehouse, names, path, progress)
    made: list[str] = []
    not_made: list[str] = []
    for label, learn in work.items():
        try:
            learn()
            made.append(label)
        except (MergePipeError, OSError) as error:
            not_made.append(f"{label}: {error}")
    return tuple(made), tuple(not_made)


def _names(warehouse: Warehouse) -> dict[str, str]:
    """Checkpoint id to a name that stands for it now."""
    catalog, names = warehouse.catalog, {}
    for name in catalog.names():
        with suppress(MergePipeError):  # a damaged name is left for a person
            names[catalog.get(name).checkpoint.checkpoint_id] = name
    return names


def _to_learn(
    warehouse: Warehouse, names: Mapping[str, str], path: Path, progress: Progress | None
) -> dict[str, Callable[[], object]]:
    """What to do so that a file of the catalog is written again, by a label; often nothing."""
    catalog, kinds = warehouse.catalog, (CHECKPOINTS, CONTENTS, FACTS)
    kind = next((k for k in kinds if path.is_relative_to(warehouse.catalog_dir / k)), None)
    name = names.get(path.parent.name if kind == FACTS else path.name.partition(".")[0])
    if name is None:
        return {}
    if kind == CHECKPOINTS:
        return {f"record of {name}": partial(catalog.get, name)}
    if kind == CONTENTS:
        checkpoint = catalog.get(name).checkpoint
        return {f"digests of {name}": Contents(warehouse, checkpoint, progress).digests}
    match, base = _STATS.match(path.name), names.get(path.parent.parent.name)
    if kind != FACTS or not match or not base:
        return {}
    n = int(match["block_elems"])
    again = partial(analyze, warehouse, (name,), base=base, block_elems=n, progress=progress)
    return {f"analysis of {name} against {base}": again}


class _Chains(NamedTuple):
    """Chains of one kind, by name in a folder.

    `counts` says of a good version what it stands for; `lost` what to do without one, given NAME.
    """

    kind: str
    folder: Path
    counts: Callable[[int, Mapping[str, Any]], str]
    lost: str = ""


def _chains(warehouse: Warehouse) -> tuple[_Chains, ...]:
    catalog, lost = warehouse.catalog_dir, "no version is left: `mergepipe {}`"
    return (
        _Chains("name", catalog / "names", lambda n, of: f"version {n} counts: {of['root']}"),
        _Chains(
            "tags of",
            catalog / "tags",
            lambda n, of: f"version {n} counts: {', '.join(of['tags']) or 'none'}",
            lost.format("tag NAME --add TAG"),
        ),
        _Chains(
            "ref",
            warehouse.refs_dir,
            lambda n, of: f"version {n} counts: snapshot {of['snapshot_id']}",
            lost.format("publish SNAPSHOT --ref NAME"),
        ),
        _Chains(
            "quarantine of",
            warehouse.quarantined_dir,
            lambda n, of: "the other decisions count; see `mergepipe ls`",
            "no decision is left: `mergepipe quarantine NAME` decides anew",
        ),
    )


def set_aside(warehouse: Warehouse, *, dry_run: bool = False) -> dict[str, list[str]]:
    """Set the damaged versions of every chain of the warehouse aside, each chain's at once.

    Gives, by a sentence that says what counts now, the files of each chain that had some. A name
    without any version, whose files somebody removed, is named as well.
    """
    aside = {}
    for chains in _chains(warehouse):
        for name in sorted({*chain_names(chains.folder), *_empty(chains)}):
            with suppress(CorruptionError):  # a folder that cannot be listed is left for a person
                chain = VersionChain(chains.folder / name)
                damaged = chain.damaged()
                if not damaged and chain.versions():
                    continue
                good = max(set(chain.versions()).difference(damaged), default=0)
                for number in () if dry_run else damaged:
                    chain.set_aside(number)
                if good:
                    counts = chains.counts(good, chain.get(good))
                else:
                    counts = chains.lost.replace("NAME", name) or _again(
                        warehouse, name, dry_run=dry_run
                    )
                versions = ", ".join(map(str, damaged))
                what = f"version {versions} damaged, set aside; " if damaged else ""
                files = [str(chains.folder / name / f"{n:08d}.json") for n in damaged]
                aside[f"{chains.kind} {name}: {what}{counts}"] = files
    return aside


def _empty(chains: _Chains) -> list[str]:
    """The names of checkpoints that have a folder and no version that counts."""
    folders = chains.folder.iterdir() if chains.kind == "name" and chains.folder.is_dir() else ()
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
