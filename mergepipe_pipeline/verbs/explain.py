"""The verb `explain`: what a plan reads, what that was expected to lose, and what came of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mergepipe_pipeline.domain.blocks import total_elems
from mergepipe_pipeline.domain.pack import TIERS
from mergepipe_pipeline.domain.plan import ExpertInput, MergePlan
from mergepipe_pipeline.domain.selector import Selected
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.errors import NotFoundError
from mergepipe_pipeline.execution.lookup import load_plan, plan_of, provenance_of, snapshot_of
from mergepipe_pipeline.pictures import HeatMap, heat_maps
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.text import percent, size
from mergepipe_pipeline.verbs.compare import Comparison, full_plan_id, known_comparison
from mergepipe_pipeline.warehouse import Warehouse

#: Headers and rows.
Table = tuple[Sequence[str], Sequence[Sequence[str]]]
#: What the checkpoints of rows made for another tokenizer are called.
_TOKEN_ROWS = re.compile(r"token-rows-[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class ReadShare:
    """The bytes that a plan reads of one expert in one place: a layer, a tensor, or all of it.

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
    """The reads of a plan at one level, "stored" for experts' stored elements.

    `blocks` of the plan's grid, elements, and bytes.
    """

    level: str
    blocks: int
    elems: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class OperatorChoice:
    """The operator of an output tensor; `reason` is "" where the recipe names it."""

    tensor: str
    layer: str
    operator: str
    variant: str
    reason: str


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure as it was expected and as it came: bytes, L2 norms, seconds; None for unknown."""

    figure: str
    expected: float | None
    realised: float | None


@dataclass(frozen=True)
class Explanation:
    """A plan, the snapshot that was asked about (None: the plan itself), and how far that is off.

    `plan` is None where it is gone, and where no recipe made the snapshot.
    """

    plan: MergePlan | None
    snapshot: Snapshot | None
    provenance: dict[str, Any]
    comparison: Comparison | None

    @property
    def is_full(self) -> bool | None:
        """Whether it is the full merge itself; None where nobody knows."""
        return full_plan_id(self.plan) == self.plan.plan_id if self.plan else None

    @property
    def warnings(self) -> list[str]:
        """Says that a snapshot was merged from other bytes than its plan reads now.

        Plans with the same result have one id, whether they read packs or originals, and the last
        one made is kept.
        """
        if self.plan is None or self.snapshot is None:
            return []
        e, now = self.provenance["estimates"], self.plan.estimates
        read = e["expert_bytes_planned"], e["expert_bytes_packed"]
        if read == (now.expert_bytes_planned, now.expert_bytes_packed):
            return []
        return [
            f"{self.snapshot.snapshot_id[:12]} was merged from {size(read[0])} of expert bytes "
            f"({size(read[1])} from packs); its plan was made again since, and reads what is shown "
            "here"
        ]


def explain(warehouse: Warehouse, what: str) -> Explanation:
    """Explain a snapshot, a ref or a plan; reads no weight.

    Raises NotFoundError, CorruptionError.
    """
    try:
        snapshot = load_snapshot(warehouse.snapshots, snapshot_of(warehouse, what))
    except NotFoundError:
        return Explanation(plan_of(warehouse, what), None, {}, None)
    made = provenance_of(snapshot)
    try:
        plan = load_plan(warehouse, snapshot.manifest.plan_id)
    except NotFoundError:
        return Explanation(None, snapshot, made, None)
    return Explanation(plan, snapshot, made, known_comparison(warehouse, plan))


def figures(explanation: Explanation) -> list[Figure]:
    """The figures of a plan or snapshot, expected and realised; nothing where no recipe made it."""
    made, plan = explanation.provenance, explanation.plan
    e = asdict(plan.estimates) if plan and not made else made.get("estimates")
    if e is None:
        return []
    came, rounding = made.get("realised") or {}, made.get("rounding_error")
    whole = explanation.comparison.whole if explanation.comparison else None
    error, update = (whole.error, whole.update) if whole else (None, None)
    return [
        Figure("expert_bytes", e["expert_bytes_planned"], came.get("expert_bytes_read")),
        Figure("error", e["predicted_error"], error),
        Figure("error_margin", e["predicted_margin"], None),
        Figure("error_bound", e["error_bound"], error),
        *([Figure("fp8_rounding", None, rounding)] if rounding is not None else []),
        Figure("update_norm", e["update_norm"], update),
        Figure("base_bytes", None, came.get("base_bytes_read")),
        Figure("bytes_written", None, came.get("bytes_written")),
        Figure("layers_executed", None, came.get("layers_executed")),
        Figure("layers_reused", None, came.get("layers_reused")),
        Figure("seconds", None, came.get("layers_s")),
    ]


def read_shares(plan: MergePlan, by: str) -> list[ReadShare]:
    """The reads of a plan of each expert, by "expert", "layer" or "tensor", in plan order."""
    sums: dict[tuple[str, str], list[int]] = {}
    for layer in plan.layers:
        for task in layer.tasks:
            place = {"expert": "", "layer": layer.name, "tensor": task.name}[by]
            for e in task.experts:
                row = sums.setdefault((_name(plan, e), place), [0, 0, 0, 0])
                row[0] += e.view.nbytes
                row[1] += e.read_nbytes
                if e.differing != e.covered:
                    itemsize = e.view.stored_nbytes // max(1, e.view.numel)
                    row[2] += (total_elems(e.covered) - total_elems(e.differing)) * itemsize
                row[3] += e.packed.nbytes if e.packed else 0
    return [ReadShare(expert, place, *counts) for (expert, place), counts in sums.items()]


def shares_table(shares: Sequence[ReadShare]) -> Table:
    """A table of read shares by expert, and by place if there are places."""
    by_place = any(s.place for s in shares)
    rows = [
        (
            s.expert,
            *([s.place] * by_place),
            size(s.nbytes_total),
            size(s.nbytes_read),
            percent(s.nbytes_read / max(1, s.nbytes_total)),
            size(s.nbytes_known_zero),
        )
        for s in shares
    ]
    return ("expert", *(["place"] * by_place), "size", "read", "share", "known zero"), rows


def selected_table(selected: Sequence[Selected]) -> Table:
    """Which experts each selector takes, and which it leaves and why."""
    rows = [(s.label, plain_name(name), why) for s in selected for name, why in s.answers]
    return ("selector", "expert", "taken, or why not"), rows


def level_shares(plan: MergePlan) -> list[LevelShare]:
    """The reads of a plan at each level, from coarse to exact; nothing of a plan without packs.

    Low-rank updates are read besides. A rung's bytes are of all levels that go on from it, too.
    """
    if not plan.packs:
        return []
    elems = plan.estimates.pack_block_elems
    sums = {level: [0, 0, 0] for level in (*TIERS, "stored")}
    for e in (e for layer in plan.layers for task in layer.tasks for e in task.experts):
        itemsize = e.view.stored_nbytes // max(1, e.view.numel)
        read = [(a, b, "stored", (b - a) * itemsize) for a, b in e.read]
        ranges = e.packed.ranges if e.packed else ()
        if e.packed and e.packed.factor_nbytes:
            sums[e.packed.factor_tiers[-1]][2] += e.packed.factor_nbytes
        read += [(r.start_elem, r.stop_elem, r.level, r.nbytes) for r in ranges]
        for start, stop, level, nbytes in read:
            row = sums[level]
            row[0] += -(-(stop - start) // elems)
            row[1] += stop - start
            row[2] += nbytes
    return [LevelShare(level, *row) for level, row in sums.items() if any(row)]


def operator_choices(plan: MergePlan) -> list[OperatorChoice]:
    """The operator of each output tensor, in plan order; `copy` takes it as it is."""
    return [
        OperatorChoice(task.name, layer.name, task.operator, task.variant, task.reason)
        for layer in plan.layers
        for task in layer.tasks
    ]


def shares_picture(plan: MergePlan) -> bytes:
    """Draw the share of each expert's bytes that is read, layer by layer, as PNG."""
    shares = read_shares(plan, "layer")
    layers = list(dict.fromkeys(s.place for s in shares))
    experts = list(dict.fromkeys(s.expert for s in shares))
    values = np.full((len(layers), len(experts)), np.nan)
    for s in shares:
        read = 100 * s.nbytes_read / max(1, s.nbytes_total)
        values[layers.index(s.place), experts.index(s.expert)] = read
    title = f"{plan.recipe_name}: % of bytes read"
    # Packs give skill from a thousandth of the bytes on: colours span what is read.
    limits = 0.0, float(np.nanmax(values, initial=0.0)) or 100.0
    return heat_maps([HeatMap(layers, experts, values, title, limits, text="{:.3g}")])


def _name(plan: MergePlan, e: ExpertInput) -> str:
    """The names of the checkpoints that an input is read from, joined by `+`."""
    parts = list(e.view.stored)
    if e.view.low_rank:
        parts.append(e.view.low_rank.parts[0])
    names = dict.fromkeys(plan.sources[p.source].name for p in parts)
    return "+".join(map(plain_name, names)) or "unchanged"


def plain_name(name: str) -> str:
    """A source's name for people: rows made for another tokenizer are named as what they are."""
    return _TOKEN_ROWS.sub("new token rows", name)
