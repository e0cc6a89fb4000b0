"""What a plan reads of which expert, and what makes each tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mergepipe_pipeline.domain.blocks import total_elems
from mergepipe_pipeline.domain.pack import TIERS, PackedRange
from mergepipe_pipeline.domain.plan import ExpertInput, MergePlan
from mergepipe_pipeline.errors import NotFoundError
from mergepipe_pipeline.execution.lookup import plan_of, provenance_of, snapshot_of
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.text import size
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Share:
    """What a plan reads of one expert in one place (a layer, a tensor, or all of it), in bytes.

    Of what it reads, `nbytes_packed` are of packs.
    """

    expert: str
    place: str
    nbytes_total: int
    nbytes_read: int
    nbytes_known_zero: int
    nbytes_packed: int


@dataclass(frozen=True, slots=True)
class LevelShare:
    """What a plan reads at one level, "stored" for experts' stored elements.

    `blocks` of the plan's grid, elements, and bytes.
    """

    level: str
    blocks: int
    elems: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class OperatorChoice:
    """What makes one output tensor; `variant` "" for none, `reason` "" where the recipe says it."""

    tensor: str
    layer: str
    operator: str
    variant: str
    reason: str


def shares(plan: MergePlan, by: str) -> Iterable[Share]:
    """The shares of a plan in plan order."""
    sums: dict[tuple[str, str], list[int]] = {}
    for layer in plan.layers:
        for task in layer.tasks:
            place = {"expert": "", "layer": layer.name, "tensor": task.name}[by]
            for e in task.experts:
                itemsize = e.view.stored_nbytes // max(1, e.view.numel)
                row = sums.setdefault((_name(plan, e), place), [0, 0, 0, 0])
                row[0] += e.view.nbytes
                row[1] += e.read_nbytes
                row[2] += (total_elems(e.covered) - total_elems(e.differing)) * itemsize
                row[3] += e.packed.nbytes if e.packed else 0
    return [Share(expert, place, *counts) for (expert, place), counts in sums.items()]


def level_shares(plan: MergePlan) -> tuple[LevelShare, ...]:
    """What a plan reads at each level, from coarse to exact; nothing of a plan without packs.

    Low-rank updates are read besides.
    """
    if not plan.packs:
        return ()
    elems = plan.estimates.pack_block_elems
    sums = {level: [0, 0, 0] for level in (*TIERS, "stored")}
    for e in (e for layer in plan.layers for task in layer.tasks for e in task.experts):
        itemsize = e.view.stored_nbytes // max(1, e.view.numel)
        stored = [(a, b, "stored", (b - a) * itemsize) for a, b in e.read]
        packed = e.packed.ranges if e.packed else ()
        for start, stop, level, nbytes in (*stored, *map(_range, packed)):
            row = sums[level]
            row[0] += -(-(stop - start) // elems)
            row[1] += stop - start
            row[2] += nbytes
    return tuple(LevelShare(level, *row) for level, row in sums.items() if row[0])


def operator_choices(plan: MergePlan) -> tuple[OperatorChoice, ...]:
    """What makes each output tensor, in plan order; `copy` takes it as it is."""
    return tuple(
        OperatorChoice(task.name, layer.name, task.operator, task.variant, task.reason)
        for layer in plan.layers
        for task in layer.tasks
    )


def _range(r: PackedRange) -> tuple[int, int, str, int]:
    return r.start_elem, r.stop_elem, r.level, r.nbytes


def _name(plan: MergePlan, e: ExpertInput) -> str:
    """The names of the checkpoints that an input is read from, joined by `+`."""
    parts = list(e.view.stored)
    if e.view.low_rank:
        parts.append(e.view.low_rank.parts[0])
    names = dict.fromkeys(plan.sources[p.source].name for p in parts)
    return "+".join(names) or "unchanged"


def explain(
    warehouse: Warehouse, what: str, by: str = "expert"
) -> tuple[MergePlan, tuple[Share, ...]]:
    """Which bytes of which expert a plan reads: `by` expert, layer or tensor.

    Raises NotFoundError for an unknown plan, snapshot or ref.
    """
    plan = plan_of(warehouse, what)
    return plan, tuple(shares(plan, by))


def merged_otherwise(warehouse: Warehouse, what: str, plan: MergePlan) -> Iterator[str]:
    """Warns that a snapshot or ref was merged from other bytes than its plan reads now.

    Plans with the same result have one id, whether they read packs or originals, and the last one
    made is kept.
    """
    try:
        snapshot = load_snapshot(warehouse.snapshots, snapshot_of(warehouse, what))
    except NotFoundError:  # it is a plan
        return
    e = provenance_of(snapshot)["estimates"]
    read = e["expert_bytes_planned"], e.get("expert_bytes_packed", 0)
    if read != (plan.estimates.expert_bytes_planned, plan.estimates.expert_bytes_packed):
        yield (
            f"{what} was merged from {size(read[0])} of expert bytes ({size(read[1])} from packs); "
            "its plan was made again since, and reads what is shown here"
        )
