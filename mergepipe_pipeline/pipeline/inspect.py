"""The verbs that only look: `ls`, `verify`, `explain`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.errors import NotFoundError
from mergepipe_pipeline.pipeline.plan import load_plan
from mergepipe_pipeline.pipeline.progress import Progress, Silent
from mergepipe_pipeline.snapshots.load import list_snapshots, load_snapshot
from mergepipe_pipeline.snapshots.refs import RefStore
from mergepipe_pipeline.snapshots.verify import Verification, verify_snapshot
from mergepipe_pipeline.spec.blocks import total_elems
from mergepipe_pipeline.spec.plan import ExpertInput, MergePlan
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Listing:
    """What a warehouse holds, as rows for people and machines."""

    checkpoints: tuple[dict[str, Any], ...]
    snapshots: tuple[dict[str, Any], ...]
    refs: tuple[dict[str, Any], ...]


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
    """Registered checkpoints, snapshots and refs."""
    catalog, refs = Catalog(home.catalog), RefStore(home.refs)
    checkpoints = [catalog.get(name) for name in catalog.names()]
    return Listing(
        tuple(
            {
                "name": r.name,
                "version": r.version,
                "base": r.base,
                "tensors": len(r.checkpoint.tensors),
                "nbytes": r.checkpoint.nbytes,
                "analysed": catalog.digests(r.checkpoint.checkpoint_id) is not None,
                "root": r.checkpoint.root,
            }
            for r in checkpoints
        ),
        tuple(
            {
                "snapshot_id": s.snapshot_id,
                "method": s.manifest.method,
                "nbytes": sum(x.nbytes for x in s.manifest.shards),
                "inputs": [i.name for i in s.manifest.inputs],
                "path": s.path,
            }
            for s in list_snapshots(home.snapshots)
        ),
        tuple(
            {"ref": r.name, "version": r.number, "snapshot_id": r.snapshot_id, "reason": r.reason}
            for r in (refs.current(name) for name in refs.names())
        ),
    )


def verify(home: Warehouse, what: str, progress: Progress | None = None) -> Verification:
    """Re-hash every byte of a snapshot, given by id, unique prefix, or ref.

    Raises CorruptionError naming the file and tensor that is wrong, NotFoundError for an unknown
    name.
    """
    snapshot_id = snapshot_of(home, what)
    manifest = load_snapshot(home.snapshots, snapshot_id).manifest
    total = sum(s.nbytes for s in manifest.shards)
    with (progress or Silent()).task(f"verify {snapshot_id[:12]}", total) as advance:
        return verify_snapshot(home.snapshots / snapshot_id, advance)


def snapshot_of(home: Warehouse, what: str) -> str:
    """The snapshot id that a ref, an id or a unique prefix of one means. Raises NotFoundError."""
    refs = RefStore(home.refs)
    if what in refs.names():
        return refs.current(what).snapshot_id
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
