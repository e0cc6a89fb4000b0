"""The verb `repair`: take away what is wrong and can be found again, and find it again.

Nothing is destroyed: files go to the warehouse's quarantine. Damaged versions of names and refs are
set aside, so that good ones count (`repair_names`). Snapshots are never touched; what is
wrong with them is listed. Inputs are not read. A damaged object loses only its name in the store,
so that no later merge takes it for a layer; a snapshot that links to it stays as it is, until its
recipe is merged again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.catalog.formats import CHECKPOINTS, CONTENTS, FACTS
from mergepipe_pipeline.catalog.seals import find_sealed
from mergepipe_pipeline.contents.tensor_digests import ensure_digests
from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.integrity.auditor import Finding, Scope
from mergepipe_pipeline.integrity.records import action_of
from mergepipe_pipeline.packs.contents import holds
from mergepipe_pipeline.packs.index import read_contents
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.storage.atomic import adopt_file
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.verbs.repair_names import set_aside
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
    damaged, files = tuple(a.summary for a in aside), {file for a in aside for file in a.files}
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
    catalog, names = warehouse.catalog, _names(warehouse)
    made: dict[str, None] = {}
    not_made: dict[str, None] = {}
    for path in lacking:
        for label, learn in _lessons(warehouse, catalog, names, path, progress):
            try:
                if label not in made:
                    learn()
                made[label] = None
            except (MergePipeError, OSError) as error:
                not_made[f"{label}: {error}"] = None
    return tuple(made), tuple(not_made)


def _names(warehouse: Warehouse) -> dict[str, str]:
    """Checkpoint id to a name that stands for it now."""
    catalog, names = warehouse.catalog, {}
    for name in catalog.names():
        with suppress(MergePipeError):  # a damaged name is left for a person
            names[catalog.get(name).checkpoint.checkpoint_id] = name
    return names


def _lessons(
    warehouse: Warehouse,
    catalog: Catalog,
    names: Mapping[str, str],
    path: Path,
    progress: Progress | None,
) -> Iterator[tuple[str, Callable[[], object]]]:
    """What to do so that a file of the catalog is written again: a label, and the work."""
    is_fact = path.is_relative_to(warehouse.catalog_dir / FACTS)
    name = names.get(path.parent.name if is_fact else path.name.partition(".")[0])
    if name is None:
        return
    if path.is_relative_to(warehouse.catalog_dir / CHECKPOINTS):
        yield f"record of {name}", partial(catalog.get, name)
    elif path.is_relative_to(warehouse.catalog_dir / CONTENTS):
        checkpoint = catalog.get(name).checkpoint
        yield f"digests of {name}", partial(ensure_digests, warehouse, checkpoint, progress)
    elif is_fact:
        match, base = _STATS.match(path.name), names.get(path.parent.parent.name)
        if match and base:
            n = int(match["block_elems"])
            again = partial(
                analyze, warehouse, (name,), base=base, block_elems=n, progress=progress
            )
            yield f"analysis of {name} against {base}", again
