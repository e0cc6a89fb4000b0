"""The verb `gc`: free the space of what nobody needs; safe at any moment, at any age.

All snapshots but stages and those that a gate refused are needed. These are needed if a ref has
ever named one, if a registered checkpoint lies in it, if it is on the front of a search, or if the
current plan of a standing recipe reads or makes it. The layers of such plans are needed, and what
living processes lease. What was measured of a snapshot goes with it, and its mark. A pack stays
while the expert that it holds is what some registered name means, or is offline. Who keeps only so
many versions of each ref says so: results that older ones alone name go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from mergepipe_pipeline.digest import unseal
from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.execution.lookup import load_working_plan, working_plan
from mergepipe_pipeline.execution.plan_leases import need_of
from mergepipe_pipeline.facts.damaged_packs import irreplaceable_packs
from mergepipe_pipeline.search.front import front
from mergepipe_pipeline.search.ledger import Ledger, searches
from mergepipe_pipeline.snapshots.collection import GcReport, Roots
from mergepipe_pipeline.snapshots.collection import collect as run
from mergepipe_pipeline.snapshots.find import scan_snapshots
from mergepipe_pipeline.snapshots.leases import Living, Need
from mergepipe_pipeline.snapshots.stores import Marks
from mergepipe_pipeline.storage.atomic import remove_tree
from mergepipe_pipeline.text import escaped
from mergepipe_pipeline.verbs.land import half_landed
from mergepipe_pipeline.warehouse import Warehouse

__all__ = ["AGE_S", "BUCKET_AGE_S", "GcReport", "collect", "collect_bucket"]

#: For how long what nobody needs is kept after its last use, in seconds: here and in a bucket.
AGE_S, BUCKET_AGE_S = 3600.0, 7 * 86400.0
#: The least age of what people may still want to look at, in seconds: what `repair` took away, and
#: plans without a snapshot.
_LONG_S = 30 * 86400.0
#: Names of refs to the snapshots of their versions, by number.
_Versions = dict[str, dict[int, str]]


def collect(
    warehouse: Warehouse,
    *,
    older_than_s: float = AGE_S,
    keep_versions: int | None = None,
    unpublished: bool = False,
    dry_run: bool = False,
) -> GcReport:
    """Remove objects, actions, stages, packs and staging of no use, older than `older_than_s`.

    With `keep_versions` (from 1 up), results go that only versions of refs name which are not among
    the newest so many of any ref; if `unpublished`, those that no ref ever named; their layers with
    them.

    What `repair` took away, plans without a snapshot, and kept sums stay for 30 days at least.
    Waits for another collection; merges that begin meanwhile wait for this one. A `dry_run` writes
    nothing, so that the warehouse may be one that cannot be written.
    """
    leases = warehouse.leases
    published: _Versions = {}
    for _ in _published(warehouse, published):  # read while nobody has to wait
        pass
    with leases.watched() if dry_run else leases.alone():
        living = leases.living(older_than_s)
        roots = _roots(warehouse, living, published, keep_versions)
        named = frozenset(i for versions in published.values() for i in versions.values())
        outdated = named if keep_versions else frozenset()
        outdated |= _all_snapshots(warehouse) - named if unpublished else frozenset()
        expired = tuple(_expired(warehouse, roots, named, older_than_s))
        report = run(
            warehouse.objects,
            warehouse.snapshots,
            warehouse.staging,
            warehouse.unnamed(),
            replace(roots, expired=expired, outdated=outdated),
            older_than_s=older_than_s,
            dry_run=dry_run,
        )
        for snapshot_id in () if dry_run else report.snapshots:
            remove_tree(warehouse.evaluations / snapshot_id)
    return replace(
        report, paths=tuple(map(escaped, report.paths)), notes=tuple(map(escaped, report.notes))
    )


def collect_bucket(
    warehouse: Warehouse, *, older_than_s: float = BUCKET_AGE_S, dry_run: bool = False
) -> GcReport:
    """Remove what no version of a ref names from the bucket, older than `older_than_s`.

    Raises MergePipeError without a bucket, and as `snapshots.bucket_collection`.
    """
    mirror = warehouse.require_mirror("collect")
    from mergepipe_pipeline.snapshots.bucket_collection import collect_bucket as run_there

    return run_there(mirror, older_than_s=older_than_s, dry_run=dry_run)


def _expired(
    warehouse: Warehouse, roots: Roots, named: frozenset[str], older_than_s: float
) -> Iterator[Path]:
    """Everything old of no use beside snapshots, layers, staging; `named` are those of refs."""
    certain = roots.marks is not None
    yield from _older(half_landed(warehouse, roots.living.names), older_than_s)
    yield from _older(
        _idle_packs(warehouse, roots.need | roots.living.need, certain=certain), older_than_s
    )
    yield from _older(_orphans(warehouse, named), older_than_s)
    sums = sorted(warehouse.sums_dir.glob("*/*"))  # a merge renews them: its window stands still
    for paths in (sorted(warehouse.aside.glob("*")), _idle_plans(warehouse, roots), sums):
        yield from _older(paths, max(older_than_s, _LONG_S))


def _idle_packs(warehouse: Warehouse, need: Need, *, certain: bool) -> Iterator[Path]:
    """The folders of packs that nobody needs; none unless it is certain what is needed.

    They can be made again from the expert, as long as it is there.
    """
    store = warehouse.packs
    kept = need.pack_ids | irreplaceable_packs(warehouse).keys()
    current = list(_current_digests(warehouse))
    for pack_id in store.ids() if certain else ():
        try:
            pack = store.open(pack_id)
        except CorruptionError:  # which no merge reads
            pack = None
        is_used = pack is not None and any(map(pack.holds, current))
        if pack_id not in kept and not is_used:
            yield store.path(pack_id)
    for folder in (warehouse.packs_dir, warehouse.offline_dir):
        yield from folder.glob(".*.old-*")  # what a death while replacing left: see `replace_dir`


def _current_digests(warehouse: Warehouse) -> Iterator[Mapping[str, str]]:
    """Tensor to digest of what each registered name means now, where that is known."""
    catalog = warehouse.catalog
    for name in catalog.names():
        with suppress(MergePipeError):
            digests = catalog.digests(catalog.get(name).checkpoint.checkpoint_id)
            if digests is not None:
                yield digests


def _orphans(warehouse: Warehouse, named: frozenset[str]) -> Iterator[Path]:
    """The measurements of snapshots that are gone, and their marks.

    One that says why a version of a ref has no snapshot stays.
    """
    marks = Marks(warehouse.stages)
    kept = (warehouse.stages.glob(f"*.{kind}") for kind in ("json", "read"))
    for path in (*warehouse.evaluations.glob("*"), *chain.from_iterable(kept)):
        is_told = path.stem in named and marks.is_collected(path.stem)
        if not is_told and not (warehouse.snapshots / path.stem).exists():
            yield path


def _idle_plans(warehouse: Warehouse, roots: Roots) -> Iterator[Path]:
    """The plans of which nothing was made that is there; none where that is in doubt."""
    whole, damaged = scan_snapshots(warehouse.snapshots)
    if damaged or roots.marks is None:
        return
    used = {s.manifest.plan_id for s in whole} | roots.need.plan_ids | roots.living.need.plan_ids
    for path in sorted(warehouse.plans.glob("*.json")):
        if path.stem not in used:
            yield path


def _older(paths: Iterable[Path], older_than_s: float) -> Iterator[Path]:
    """The paths whose last change is longer ago; what is gone meanwhile is left out."""
    for path in paths:
        with suppress(FileNotFoundError):
            if time.time() - path.lstat().st_mtime >= older_than_s:
                yield path


def _roots(
    warehouse: Warehouse, living: Living, published: _Versions, keep_versions: int | None
) -> Roots:
    """Find the roots. Where a file that may name a stage cannot be read, all stages stay."""
    need, doubts = Need(), []
    files = (p for p in warehouse.recipes.iterdir() if p.suffix in {".yml", ".yaml"})
    planned = {p.stem for p in files if warehouse.current_plan_path(p.stem).exists()}
    for found in chain(
        _registered(warehouse),
        _published(warehouse, published, keep_versions),
        _found(_released, sorted(map(str, warehouse.releases.glob("*.released.json")))),
        _found(partial(_planned, warehouse), sorted(planned)),
        _found(partial(_searched, warehouse), searches(warehouse)),
    ):
        if isinstance(found, Need):
            need |= found
        else:
            doubts.append(f"stages stay, since this may name one: {found}")
    notes = [
        f"all layers stay, since a lease in use cannot be read: {p}" for p in living.unreadable
    ]
    if living.judged_by_age:
        notes.append(
            f"{warehouse.leases_dir} is on a file system without locks, so age alone says whether "
            "a merge lives: let --older-than be longer than any merge takes"
        )
    certain = not doubts and not living.unreadable
    return Roots(need, living, Marks(warehouse.stages) if certain else None, (*notes, *doubts))


def _all_snapshots(warehouse: Warehouse) -> frozenset[str]:
    return frozenset(path.name for path in warehouse.snapshots.iterdir())


def _found(find: Callable[[str], Need], names: Iterable[str]) -> Iterator[Need | MergePipeError]:
    """The need of each name, or why it cannot be known; what is gone needs nothing."""
    for name in names:
        try:
            yield find(name)
        except FileNotFoundError:
            continue
        except MergePipeError as error:
            yield error
        except OSError as error:
            where = str(error.filename)
            yield CorruptionError("A file cannot be read", where=where, found=str(error))


def _published(
    warehouse: Warehouse, known: _Versions, newest: int | None = None
) -> Iterator[Need | MergePipeError]:
    """The newest so many versions of every ref, or all: rollback may go back to each.

    Only versions that are not `known` are read; all are known then.
    """
    refs = warehouse.refs

    def find(name: str) -> Need:
        known[name] = refs.snapshot_ids(name, known.get(name, {}))
        return _named(list(known[name].values())[-newest if newest else 0 :])

    return _found(find, refs.names())


def _named(snapshot_ids: Iterable[str]) -> Need:
    return Need(snapshot_ids=frozenset(snapshot_ids))


def _released(path: str) -> Need:
    """The snapshot that a standing recipe has released last."""
    return _named([str(unseal(Path(path).read_bytes(), path).get("snapshot_id", ""))])


def _searched(warehouse: Warehouse, name: str) -> Need:
    """The front of a search; what another one dominates is never on it again."""
    best = front(warehouse, Ledger(warehouse, name).search()).best
    return _named(t.snapshot_id for t in best if t.snapshot_id)


def _planned(warehouse: Warehouse, recipe: str) -> Need:
    """The need of the current plan of a standing recipe between its steps."""
    working = working_plan(warehouse, recipe)
    return need_of(warehouse, load_working_plan(warehouse, recipe, working))


def _registered(warehouse: Warehouse) -> Iterator[Need | MergePipeError]:
    """Snapshots that somebody registered as checkpoints."""
    catalog = warehouse.catalog
    yield from catalog.damaged()
    for *_, root in catalog.registrations():
        path = Path(root)
        if path.is_relative_to(warehouse.snapshots) and path != warehouse.snapshots:
            yield _named(path.relative_to(warehouse.snapshots).parts[:1])
