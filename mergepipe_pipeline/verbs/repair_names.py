"""What `repair` does with damaged versions of names, tags and refs: it sets them aside and says so.

What a damaged version named cannot be found again. The newest good version counts then; a name
without one is registered again from its folder of the inbox where there is one.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.storage.chain import VersionChain, chain_names
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse

Kind = Literal["name", "ref", "tags of", "quarantine of"]


@dataclass(frozen=True, slots=True)
class SetAside:
    """The damaged versions (their files) of one chain; `told` says what counts now."""

    files: tuple[str, ...]
    told: str


def set_aside(warehouse: Warehouse, *, dry_run: bool = False) -> tuple[SetAside, ...]:
    """Set the damaged versions of every chain of the warehouse aside, each chain's at once."""
    found = []
    folders: tuple[tuple[Kind, Path], ...] = (
        ("name", warehouse.catalog_dir / "names"),
        ("tags of", warehouse.catalog_dir / "tags"),
        ("ref", warehouse.refs_dir),
        ("quarantine of", warehouse.quarantined_dir),
    )
    for kind, folder in folders:
        for name in chain_names(folder):
            with suppress(CorruptionError):  # a folder that cannot be listed is left for a person
                chain = VersionChain(folder / name)
                if damaged := chain.damaged():
                    good = max(set(chain.versions()).difference(damaged), default=0)
                    files = tuple(str(folder / name / f"{n:08d}.json") for n in damaged)
                    if not dry_run:
                        for number in damaged:
                            chain.set_aside(number)
                    counts = _counts(chain, kind, good) or _again(
                        warehouse, kind, name, dry_run=dry_run
                    )
                    versions = ", ".join(map(str, damaged))
                    told = f"{kind} {name}: version {versions} damaged, set aside; {counts}"
                    found.append(SetAside(files, told))
    return tuple(found)


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
    """Register a name without a good version from the inbox, or say what a person can do."""
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
                register(warehouse, folder, name)
            return f"registered again: {folder}"
    return f"no version is left: `mergepipe register PATH --name {name}`"
