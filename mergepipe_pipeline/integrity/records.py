"""The scopes *structure* and *lineage* of `verify --all`: records are whole and agree.

Structure: seals hold, names say what is inside, chains have no gap. Lineage: snapshots agree with
the plans and actions they came from and with the contents of their inputs; refs and releases name
snapshots that are there. No weight is read.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mergepipe_pipeline.catalog import formats
from mergepipe_pipeline.catalog.places import read_place
from mergepipe_pipeline.catalog.seals import verify_sealed
from mergepipe_pipeline.digest import unseal
from mergepipe_pipeline.domain.plan import ENGINE_VERSION
from mergepipe_pipeline.domain.snapshot import MANIFEST, PROVENANCE, Snapshot
from mergepipe_pipeline.errors import CorruptionError, MergePipeError, NotFoundError
from mergepipe_pipeline.execution.lookup import (
    load_plan,
    provenance_of,
    refuse_other_plan,
    working_plans,
)
from mergepipe_pipeline.integrity.auditor import Auditor
from mergepipe_pipeline.quality.measure import read as read_evaluation
from mergepipe_pipeline.quality.measure import records
from mergepipe_pipeline.snapshots.commit import present, unexpected_files
from mergepipe_pipeline.snapshots.find import list_snapshots, load_snapshot
from mergepipe_pipeline.snapshots.stores import Marks, layer_key_of, stored_by
from mergepipe_pipeline.storage.chain import VersionChain, read_chains
from mergepipe_pipeline.warehouse import Warehouse

_SHA256 = re.compile(r"[0-9a-f]{64}")
#: Folders of sealed files in the catalog.
_FORMATS = (formats.CHECKPOINTS, formats.CONTENTS, formats.FACTS, formats.SIDE_FILES)
#: Staging of a merge that runs is younger than this, in seconds.
_OLD_S = 3600.0


class Chains(NamedTuple):
    """Chains of one kind, by name in a folder, each version with these keys.

    `counts` says of a good version what it stands for; `lost` what to do without one, given NAME.
    """

    kind: str
    folder: Path
    keys: frozenset[str]
    counts: Callable[[Mapping[str, Any]], str]
    lost: str = ""


def chains(warehouse: Warehouse) -> tuple[Chains, ...]:
    """All chains of a warehouse."""
    catalog, lost = warehouse.catalog_dir, "no version is left: `mergepipe {}`"
    return (
        Chains(
            "name",
            catalog / "names",
            frozenset({"checkpoint_id", "root", "base"}),
            lambda of: str(of["root"]),
        ),
        Chains(
            "tags of",
            catalog / "tags",
            frozenset({"tags"}),
            lambda of: ", ".join(of["tags"]) or "none",
            lost.format("tag NAME --add TAG"),
        ),
        Chains(
            "ref",
            warehouse.refs_dir,
            frozenset({"snapshot_id", "reason"}),
            lambda of: f"snapshot {of['snapshot_id']}",
            lost.format("publish SNAPSHOT --ref NAME"),
        ),
        Chains(
            "quarantine of",
            warehouse.quarantined_dir,
            frozenset({"content", "reason", "decided", "is_kept_out"}),
            lambda of: "and all other good ones; see `mergepipe ls`",
            "no decision is left: `mergepipe quarantine NAME` decides anew",
        ),
    )


def verify_structure(warehouse: Warehouse, audit: Auditor) -> None:
    """Look at every file but weights."""
    _verify_facts(warehouse, audit)
    for of in chains(warehouse):
        _verify_chains(of.folder, of.keys, audit)
    derivable: list[tuple[Iterable[Path], Callable[[Path], object]]] = [
        (_files(warehouse.plans, "*.json"), lambda path: load_plan(warehouse, path.stem)),
        (_files(warehouse.actions_dir, "*.json"), _check_action),
        (_files(warehouse.objects_dir, "*/*"), _check_object_name),
        (working_plans(warehouse), lambda p: refuse_other_plan(p, p.stem.rpartition(".")[2])),
        (_files(warehouse.stages, "*.json"), _unsealed),  # a stage without one stays as a result
        (_files(warehouse.stages, "*.read"), _unsealed),  # the files are read once more
        (records(warehouse), read_evaluation),
        (_files(warehouse.arrivals, "*.json"), _unsealed),  # without its record a folder is new
    ]
    for paths, check in derivable:
        for path in paths:
            audit.check("structure", path, partial(check, path), is_derivable=True)
    for path in _files(warehouse.releases, "*.json"):
        audit.check("structure", path, partial(_unsealed, path))
    for path in _files(warehouse.search_ledgers, "*/*.json"):
        is_derivable = path.name != "search.json"
        act, remade = partial(_unsealed, path), "the search finds it, or another candidate, again"
        audit.check("structure", path, act, is_derivable=is_derivable, remade=remade)
    for folder in snapshot_folders(warehouse):
        load = partial(load_snapshot, warehouse.snapshots, folder.name)
        snapshot = audit.check("structure", folder, load)
        if snapshot is not None:
            audit.check("structure", folder, partial(_check_files, snapshot, audit))
    _note_leftovers(warehouse, audit)


def _verify_facts(warehouse: Warehouse, audit: Auditor) -> None:
    for folder in (
        *(warehouse.catalog_dir / version for version in _FORMATS),
        warehouse.token_rows,
    ):
        for path in _files(folder, "*.*.*"):
            audit.check("structure", path, partial(verify_sealed, path), is_derivable=True)
    for path in _files(warehouse.catalog_dir / formats.PLACES, "*/*.json"):
        audit.check("structure", path, partial(read_place, path), is_derivable=True)


def snapshot_folders(warehouse: Warehouse) -> list[Path]:
    """The folders of all snapshots, damaged or not."""
    folders = warehouse.snapshots.iterdir() if warehouse.snapshots.is_dir() else ()
    return sorted(p for p in folders if not p.name.startswith("."))


def _check_action(path: Path) -> None:
    value = _unsealed(path)
    if stored_by(path) is None:
        raise _misnamed(path, f"action_key {path.stem}", str(value.get("action_key")))


def _files(folder: Path, pattern: str) -> list[Path]:
    """Entries named as writers name files, at any depth; a folder fails when it is read."""
    return sorted(p for p in folder.rglob(pattern) if not p.name.startswith("."))


def _verify_chains(folder: Path, keys: Collection[str], audit: Auditor) -> None:
    for chain in sorted(p for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else ():
        versions = audit.check("structure", chain, VersionChain(chain).versions) or []
        aside = audit.check("structure", chain, VersionChain(chain).aside) or []
        for number in versions:
            path = chain / f"{number:08d}.json"
            audit.check("structure", path, partial(_check_version, chain, number, keys))
        if not versions and not aside:
            audit.notes.append(
                f"without a version, after a killed write or as its files were removed: {chain}; "
                "`mergepipe repair` tells of names what can be done"
            )
        if aside:
            numbers = ", ".join(map(str, aside))
            audit.notes.append(f"set aside by repair: version {numbers} of {chain}")
        present = {*versions, *aside}
        missing = sorted(set(range(1, max(present, default=0) + 1)) - present)
        if missing:
            error = CorruptionError(
                "A version of a name is missing",
                where=str(chain),
                expected=f"versions 1 to {max(versions)}",
                found=f"none with number {missing[0]}",
                next_step="restore the file from a backup; newer versions are not affected",
            )
            audit.report("structure", chain, error)


def _check_version(chain: Path, number: int, keys: Collection[str]) -> None:
    value = VersionChain(chain).get(number)
    if not set(keys) <= value.keys():
        raise _misnamed(chain, f"keys {', '.join(sorted(keys))}", ", ".join(sorted(value)))


def _unsealed(path: Path) -> dict[str, Any]:
    return unseal(path.read_bytes(), str(path))


def _check_object_name(path: Path) -> None:
    if not _SHA256.fullmatch(path.name) or path.parent.name != path.name[:2]:
        raise _misnamed(path, "the SHA-256 of its bytes as the name", path.name)


def _check_files(snapshot: Snapshot, audit: Auditor) -> None:
    """Provenance is sealed, and the folder holds what the manifest names and nothing else."""
    folder, manifest = Path(snapshot.path), snapshot.manifest
    audit.check("structure", folder / PROVENANCE, partial(provenance_of, snapshot))
    named = {s.file for s in manifest.shards} | {f.file for f in manifest.side_files}
    for name in sorted(named):
        try:
            present(folder / name)
        except CorruptionError as error:
            audit.report("structure", folder / name, error)
    for odd in unexpected_files(folder, {*named, MANIFEST, PROVENANCE}):
        audit.report("structure", Path(str(odd.where)), odd)


def _note_leftovers(warehouse: Warehouse, audit: Auditor) -> None:
    old = [p for p in (*warehouse.staging.glob("*"), *warehouse.unnamed()) if _age_s(p) > _OLD_S]
    if old:
        audit.notes.append(f"{len(old)} leftovers of killed runs: `mergepipe gc` removes them")


def _age_s(path: Path) -> float:
    """Seconds since a file was written; 0 for one that is gone meanwhile."""
    try:
        return time.time() - path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def _misnamed(path: Path, expected: str, found: str) -> CorruptionError:
    return CorruptionError(
        "A file is not what its name says",
        where=str(path),
        expected=expected,
        found=found,
        next_step="remove it, or restore it from a backup",
    )


def verify_lineage(warehouse: Warehouse, audit: Auditor) -> None:
    """Compare every record with those that it names."""
    actions: dict[str, list[Path]] = {}
    for path in warehouse.objects.all_actions():
        actions.setdefault(layer_key_of(path.stem), []).append(path)
    for snapshot in list_snapshots(warehouse.snapshots):
        manifest = Path(snapshot.path) / MANIFEST
        audit.check("lineage", manifest, partial(_check_plan, warehouse, snapshot))
        audit.check("lineage", manifest, partial(_check_inputs, warehouse, snapshot))
        _check_actions(actions, snapshot, audit)
    snapshot_ids = {folder.name for folder in snapshot_folders(warehouse)}
    marks = Marks(warehouse.stages)
    versions = list(read_chains(warehouse.refs_dir))
    newest = {name: number for name, number, _ in versions}
    for name, number, value in versions:
        if not isinstance(value, CorruptionError):  # those are structure's findings
            path = warehouse.refs_dir / name / f"{number:08d}.json"
            snapshot_id = str(value.get("snapshot_id"))
            if number == newest[name] or not marks.is_collected(snapshot_id):
                _check_named(snapshot_id, snapshot_ids, path, audit)
    for path in sorted(warehouse.releases.glob("*.released.json")):
        with suppress(MergePipeError, OSError):
            released = unseal(path.read_bytes(), str(path)).get("snapshot_id", "")
            _check_named(str(released), snapshot_ids, path, audit)


def refuse_other_lineage(warehouse: Warehouse, snapshot: Snapshot) -> None:
    """Raise CorruptionError for a snapshot that tells of plans and inputs what is not so here."""
    _check_plan(warehouse, snapshot)
    _check_inputs(warehouse, snapshot)


def _check_plan(warehouse: Warehouse, snapshot: Snapshot) -> None:
    """The plan, where it is still there, has the layer keys of the manifest."""
    try:
        plan = load_plan(warehouse, snapshot.manifest.plan_id)
    except (NotFoundError, CorruptionError):
        return
    keys = {layer.name: layer.layer_key for layer in plan.layers}
    for shard in snapshot.manifest.shards:
        if keys.get(shard.layer) != shard.layer_key:
            raise CorruptionError(
                "A snapshot's layer is not the one of its plan",
                where=f"{snapshot.path}, layer {shard.layer}",
                expected=f"layer key {str(keys.get(shard.layer))[:16]}",
                found=shard.layer_key[:16],
                next_step="`mergepipe replay` tells whether its bits are right",
            )


def _check_inputs(warehouse: Warehouse, snapshot: Snapshot) -> None:
    """The contents in the manifest are those that the catalog knows now."""
    catalog = warehouse.catalog
    try:
        provenance = provenance_of(snapshot)
    except MergePipeError:
        return
    if provenance.get("engine_version") != ENGINE_VERSION:  # contents were digested otherwise
        return
    for source, entry in zip(provenance["sources"], snapshot.manifest.inputs, strict=False):
        try:
            content = catalog.content_sha256(source["checkpoint_id"])
        except NotFoundError:
            continue
        if content != entry.content_sha256:
            raise CorruptionError(
                "A snapshot tells another content of an input than the catalog",
                where=f"{snapshot.path}, input {entry.name}",
                expected=f"content {content[:16]}",
                found=f"content {entry.content_sha256[:16]}",
                next_step="`mergepipe verify --all --scope inputs` tells whether the catalog is "
                "right, `mergepipe replay` whether the snapshot is",
            )


def _check_actions(
    actions: Mapping[str, Sequence[Path]], snapshot: Snapshot, audit: Auditor
) -> None:
    """The actions of its layer keys give the objects of the manifest."""
    pairs = ((s, path) for s in snapshot.manifest.shards for path in actions.get(s.layer_key, ()))
    for shard, path in pairs:
        action = stored_by(path)
        if action and action.sha256 != shard.sha256:
            error = CorruptionError(
                "An action gives another object than a snapshot has for the same layer key",
                where=f"{path}, layer {shard.layer} of {snapshot.snapshot_id}",
                expected=f"object {shard.sha256[:16]}",
                found=f"object {action.sha256[:16]}",
            )
            audit.report("lineage", path, error, is_derivable=True)


def _check_named(snapshot_id: str, snapshot_ids: set[str], path: Path, audit: Auditor) -> None:
    if snapshot_id not in snapshot_ids:
        error = CorruptionError(
            "A name stands for a snapshot that is not there",
            where=str(path),
            expected=f"snapshot {snapshot_id}",
            found="no such folder",
            next_step="restore it, merge its recipe again, or `mergepipe rollback` to another",
        )
        audit.report("lineage", path, error)
