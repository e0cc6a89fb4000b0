"""The verbs that only look: `ls`, `verify`, `explain`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.errors import MergePipeError, NotFoundError
from mergepipe_pipeline.pipeline.plan import load_plan
from mergepipe_pipeline.pipeline.progress import Progress, Silent
from mergepipe_pipeline.snapshots.load import load_snapshot, scan_snapshots
from mergepipe_pipeline.snapshots.refs import RefStore
from mergepipe_pipeline.snapshots.verify import Verification, verify_snapshot
from mergepipe_pipeline.spec.blocks import total_elems
from mergepipe_pipeline.spec.plan import ExpertInput, MergePlan
from mergepipe_pipeline.spec.snapshot import Snapshot
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Listing:
    """What a warehouse holds, as rows for people and machines.

    Rows of `damaged` have the kind (checkpoint, snapshot, ref), the name and the reason.
    """

    checkpoints: tuple[dict[str, Any], ...]
    snapshots: tuple[dict[str, Any], ...]
    refs: tuple[dict[str, Any], ...]
    damaged: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Share:
    """What a plan reads of one expert in one place (a layer, a tensor, or all of it), in bytes."""

    expert: str
    place: str
    nbytes_total: int
    nbytes_read: int
    nbytes_known_zero: int


@dataclass(frozen=True, slots=True)
class Making:
    """What makes one output tensor; `variant` "" for none, `reason` "" where the recipe says it."""

    tensor: str
    layer: str
    operator: str
    variant: str
    reason: str


def ls(home: Warehouse) -> Listing:
    """Registered checkpoints, snapshots and refs; what is damaged is listed as damaged."""
    catalog, refs, damaged = Catalog(home.catalog), RefStore(home.refs), _Damaged()
    whole, broken = scan_snapshots(home.snapshots)
    for snapshot in broken:
        damaged.add("snapshot", snapshot.folder.name, snapshot.error)
    return Listing(
        damaged.rows("checkpoint", catalog.names(), partial(_checkpoint_row, catalog)),
        tuple(map(_snapshot_row, whole)),
        damaged.rows("ref", refs.names(), partial(_ref_row, refs)),
        tuple(damaged.found),
    )


def escaped(text: str) -> str:
    """Text that can be printed though it has a name that is not UTF-8."""
    return text.encode(errors="backslashreplace").decode()


class _Damaged:
    """Collects what cannot be told, so that it hides nothing else."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def add(self, kind: str, name: str, error: MergePipeError) -> None:
        """Remember one."""
        told = {"kind": kind, "name": name, "reason": str(error)}
        self.found.append({k: escaped(v) for k, v in told.items()})

    def rows(
        self, kind: str, names: Iterable[str], row_of: Callable[[str], dict[str, Any]]
    ) -> tuple[dict[str, Any], ...]:
        """The rows that `row_of` can give."""
        rows = []
        for name in names:
            try:
                rows.append(row_of(name))
            except MergePipeError as error:
                self.add(kind, name, error)
        return tuple(rows)


def _checkpoint_row(catalog: Catalog, name: str) -> dict[str, Any]:
    r = catalog.get(name)
    return {
        "name": r.name,
        "version": r.version,
        "base": r.base,
        "tensors": len(r.checkpoint.tensors),
        "nbytes": r.checkpoint.nbytes,
        "analysed": catalog.digests(r.checkpoint.checkpoint_id) is not None,
        "root": r.checkpoint.root,
    }


def _snapshot_row(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "snapshot_id": snapshot.snapshot_id,
        "method": snapshot.manifest.method,
        "nbytes": sum(x.nbytes for x in snapshot.manifest.shards),
        "inputs": [i.name for i in snapshot.manifest.inputs],
        "path": snapshot.path,
    }


def _ref_row(refs: RefStore, name: str) -> dict[str, Any]:
    r = refs.current(name)
    return {"ref": r.name, "version": r.number, "snapshot_id": r.snapshot_id, "reason": r.reason}


def verify(home: Warehouse, what: str, progress: Progress | None = None) -> Verification:
    """Re-hash every byte of a snapshot, given by id, unique prefix, ref, or `REF@VERSION`.

    Raises CorruptionError naming the file and tensor that is wrong, NotFoundError for an unknown
    name.
    """
    snapshot_id = snapshot_of(home, what)
    manifest = load_snapshot(home.snapshots, snapshot_id).manifest
    total = sum(s.nbytes for s in manifest.shards)
    with (progress or Silent()).task(f"verify {snapshot_id[:12]}", total) as advance:
        return verify_snapshot(home.snapshots / snapshot_id, advance)


def snapshot_of(home: Warehouse, what: str) -> str:
    """The id that a ref, `REF@VERSION`, an id or a unique prefix means. Raises NotFoundError."""
    refs = RefStore(home.refs)
    names = refs.names()
    if what in names:
        return refs.current(what).snapshot_id
    ref, _, number = what.rpartition("@")
    if ref in names and number.isdecimal():
        return refs.target(ref, int(number)).snapshot_id
    return load_snapshot(home.snapshots, what).snapshot_id


def explain(home: Warehouse, what: str, by: str = "expert") -> tuple[MergePlan, tuple[Share, ...]]:
    """Which bytes of which expert a plan reads: `by` expert, layer or tensor.

    Raises NotFoundError for an unknown plan, snapshot or ref.
    """
    plan = plan_of(home, what)
    return plan, tuple(shares(plan, by))


def plan_of(home: Warehouse, what: str) -> MergePlan:
    """The plan that an id, a unique prefix, a snapshot or a ref means. Raises NotFoundError."""
    return load_plan(home, _plan_id(home, what))


def shares(plan: MergePlan, by: str) -> Iterable[Share]:
    """The shares of a plan in plan order."""
    sums: dict[tuple[str, str], list[int]] = {}
    for layer in plan.layers:
        for task in layer.tasks:
            place = {"expert": "", "layer": layer.name, "tensor": task.name}[by]
            for e in task.experts:
                size = e.view.stored_nbytes // max(1, e.view.numel)
                row = sums.setdefault((_name(plan, e), place), [0, 0, 0])
                row[0] += e.view.nbytes
                row[1] += e.read_nbytes
                row[2] += (total_elems(e.covered) - total_elems(e.read)) * size
    return [Share(expert, place, *counts) for (expert, place), counts in sums.items()]


def makings(plan: MergePlan) -> tuple[Making, ...]:
    """What makes each output tensor, in plan order; `copy` takes it as it is."""
    return tuple(
        Making(task.name, layer.name, task.operator, task.variant, task.reason)
        for layer in plan.layers
        for task in layer.tasks
    )


def _name(plan: MergePlan, e: ExpertInput) -> str:
    """The names of the checkpoints that an input is read from, joined by `+`."""
    parts = list(e.view.stored)
    if e.view.low_rank:
        parts.append(e.view.low_rank.a)
    names = dict.fromkeys(plan.sources[p.source].name for p in parts)
    return "+".join(names) or "unchanged"


def _plan_id(home: Warehouse, what: str) -> str:
    plans = sorted(p.stem for p in home.plans.glob("*.json"))
    stored = [p for p in plans if what and p.startswith(what)]
    if len(stored) == 1:
        return stored[0]
    try:
        return load_snapshot(home.snapshots, snapshot_of(home, what)).manifest.plan_id
    except NotFoundError as error:
        raise NotFoundError(
            "Neither a plan, a snapshot nor a ref",
            where=str(home.root),
            found=repr(what),
            expected="an id, a unique prefix of one, or a ref",
            next_step="see `mergepipe ls`, or make a plan with `mergepipe plan RECIPE`",
        ) from error
