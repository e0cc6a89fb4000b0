"""The verb `compare`: how far a merge under a budget really is from the full one.

Checks and streams two snapshots, and remembers the result as facts of the catalog, by the plans
that determine both, so that `explain` can show it beside what was predicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mergepipe_pipeline.catalog.pairs import Fact
from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.domain.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.domain.layers import layer_count, layer_name, layer_order
from mergepipe_pipeline.domain.plan import MergePlan, Source, TensorTask
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.domain.view import TensorView, moved, renumbered, sources_of, view_of
from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.errors import (
    IncompatibleCheckpointsError,
    MergePipeError,
    NotFoundError,
)
from mergepipe_pipeline.execution.lookup import load_plan, snapshot_of
from mergepipe_pipeline.facts.offline import present_root
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.snapshots.commit import verify_shard
from mergepipe_pipeline.snapshots.find import list_snapshots, load_snapshot
from mergepipe_pipeline.warehouse import Warehouse

#: The catalog's name for what is remembered: per tensor ‖W_part − W_full‖² and, if the base was
#: there, ‖W_full − W_base‖². The owner is the part's plan, the base the full one's.
FACT = "realised-error"


@dataclass(frozen=True, slots=True)
class LayerDistance:
    """One layer: ‖W_part − W_full‖₂, and ‖W_full − W_base‖₂ where the base was there."""

    layer: str
    error: float
    update: float | None

    @property
    def relative(self) -> float | None:
        """The error as a share of the update; None where there is none."""
        return self.error / self.update if self.update else None


@dataclass(frozen=True)
class Comparison:
    """How far one plan's result is from another's, as written: after the cast to their dtype."""

    plan_id: str
    full_plan_id: str
    layers: tuple[LayerDistance, ...]

    @property
    def whole(self) -> LayerDistance:
        """All layers together."""
        updates = [x.update for x in self.layers if x.update is not None]
        update = math.hypot(*updates) if len(updates) == len(self.layers) else None
        return LayerDistance("all", math.hypot(*(x.error for x in self.layers)), update)

    @property
    def records(self) -> list[dict[str, Any]]:
        """One flat record per layer, and one for all."""
        return [{**asdict(x), "relative": x.relative} for x in (*self.layers, self.whole)]


def compare(
    warehouse: Warehouse, what: str, full: str | None = None, progress: Progress | None = None
) -> Comparison:
    """Stream a snapshot and another one (default: the full merge of its recipe).

    Both are given by id, unique prefix or ref. Raises NotFoundError if there is no full merge yet,
    IncompatibleCheckpointsError for snapshots with other tensors, CorruptionError.
    """
    part, *others = (
        load_snapshot(warehouse.snapshots, snapshot_of(warehouse, text))
        for text in (what, full)
        if text is not None
    )
    whole = others[0] if others else _full_snapshot(warehouse, part)
    ids = part.manifest.plan_id, whole.manifest.plan_id
    known = warehouse.catalog.facts(ids[1], ids[0])
    facts = known.fact(FACT)
    if not facts:
        facts = _measure(warehouse, part, whole, progress or Silent())
        known.put_fact(FACT, facts)
    return _comparison(*ids, facts)


def _full_snapshot(warehouse: Warehouse, part: Snapshot) -> Snapshot:
    wanted = full_plan_id(load_plan(warehouse, part.manifest.plan_id))
    for snapshot in list_snapshots(warehouse.snapshots):
        if snapshot.manifest.plan_id == wanted:
            return snapshot
    raise NotFoundError(
        "The full merge to compare with is not there",
        where=str(warehouse.snapshots),
        expected=f"a snapshot of plan {wanted[:16]}",
        found=f"none beside {part.snapshot_id[:12]}",
        next_step="make it with `mergepipe merge RECIPE --budget none`, or name another snapshot",
    )


@dataclass(frozen=True)
class CheckedPair:
    """The weights of two snapshots; `equal` are the tensors of files that both have alike."""

    before: Checkpoint
    after: Checkpoint
    equal: frozenset[str]


def checked_pair(
    before: Snapshot, after: Snapshot, progress: Progress, *, reads_equal: bool
) -> CheckedPair:
    """Open two snapshots once every byte that differs is checked, all of `after` if `reads_equal`.

    Raises CorruptionError.
    """
    same = {s.sha256 for s in before.manifest.shards} & {s.sha256 for s in after.manifest.shards}
    for snapshot in (before, after):
        is_whole = reads_equal and snapshot is after
        shards = [s for s in snapshot.manifest.shards if is_whole or s.sha256 not in same]
        nbytes = sum(s.nbytes for s in shards)
        with progress.task(f"verify {snapshot.snapshot_id[:12]}", nbytes) as advance:
            for shard in shards:
                verify_shard(Path(snapshot.path) / shard.file, shard, advance)
    equal = (name for s in after.manifest.shards if s.sha256 in same for name, _ in s.tensors)
    one, other = (open_checkpoint(s.path, s.snapshot_id[:12]) for s in (before, after))
    return CheckedPair(one, other, frozenset(equal))


def _measure(
    warehouse: Warehouse, part: Snapshot, full: Snapshot, progress: Progress
) -> dict[str, Fact]:
    from mergepipe_pipeline.analysis.distance import Triple, changes

    pair = checked_pair(part, full, progress, reads_equal=True)
    bases, views = _bases(warehouse, full)
    triples = {}
    for name, one, other in _paired(pair.before, pair.after):
        base = views.get(name)
        triples[name] = Triple(
            None if name in pair.equal else view_of(one),
            moved(view_of(other), 1),
            moved(base, 2) if base and base.shape == other.shape else None,
        )
    nbytes = sum(t.nbytes for t in triples.values())
    with progress.task(f"compare {part.snapshot_id[:12]}", nbytes) as advance:
        found = changes([pair.before, pair.after, *bases], [*triples.values()], advance)
        return {
            name: (change.l2sq, change.update_l2sq) if triples[name].base else (change.l2sq,)
            for name, change in zip(triples, found, strict=True)
        }


def _paired(part: Checkpoint, full: Checkpoint) -> Iterator[tuple[str, TensorEntry, TensorEntry]]:
    """The floating-point tensors of two checkpoints that must have the same ones."""
    theirs = full.by_name
    if theirs.keys() != part.by_name.keys():
        missing = sorted(theirs.keys() ^ part.by_name.keys())
        raise _unlike(part, full, "the same tensors in both", f"only one has {missing[0]}")
    for entry in part.tensors:
        other = theirs[entry.name]
        if entry.shape != other.shape:
            raise _unlike(
                part, full, f"{entry.name} of shape {entry.shape}", f"shape {other.shape}"
            )
        if entry.dtype in FLOATING and other.dtype in FLOATING:
            yield entry.name, entry, other


def _unlike(
    part: Checkpoint, full: Checkpoint, expected: str, found: str
) -> IncompatibleCheckpointsError:
    return IncompatibleCheckpointsError(
        "Two snapshots cannot be compared",
        where=f"{part.name}, {full.name}",
        expected=expected,
        found=found,
        next_step="compare merges of one recipe",
    )


def _bases(
    warehouse: Warehouse, full: Snapshot
) -> tuple[tuple[Checkpoint, ...], Mapping[str, TensorView]]:
    """What the full plan merges on: checkpoints, and their tensors by output tensor.

    Nothing where the plan or a base is gone or is not what it was.
    """
    try:
        plan = load_plan(warehouse, full.manifest.plan_id)
    except NotFoundError:
        return (), {}
    tasks = (task for layer in plan.layers for task in layer.tasks)
    views = {task.name: task.base.view for task in tasks if task.base}
    used = sorted({source for view in views.values() for source in sources_of(view)})
    opened = [_unchanged(warehouse, plan.sources[number]) for number in used]
    checkpoints = tuple(c for c in opened if c is not None)
    if len(checkpoints) < len(used):
        return (), {}
    places = {source: place for place, source in enumerate(used)}
    return checkpoints, {name: renumbered(view, places) for name, view in views.items()}


def _unchanged(warehouse: Warehouse, source: Source) -> Checkpoint | None:
    """A plan's source, or None if it is gone or is not what it was."""
    root = present_root(warehouse, source.checkpoint_id, source.root)
    try:
        checkpoint = open_checkpoint(root, source.name, probes=False)
    except MergePipeError:
        return None
    return checkpoint if checkpoint.stamp == source.stamp else None


def full_plan_id(plan: MergePlan) -> str:
    """The id of the plan that reads everything and is otherwise the same."""

    def full(task: TensorTask) -> TensorTask:
        whole = (replace(e, covered=((0, e.view.numel),), packed=None) for e in task.experts)
        return replace(task, experts=tuple(whole))

    layers = (replace(layer, tasks=tuple(map(full, layer.tasks))) for layer in plan.layers)
    return replace(plan, layers=tuple(layers)).plan_id


def known_comparison(warehouse: Warehouse, plan: MergePlan) -> Comparison | None:
    """What `compare` found for a plan's result and the full merge, or None. Reads no weight."""
    full = full_plan_id(plan)
    facts = warehouse.catalog.facts(full, plan.plan_id).fact(FACT)
    return _comparison(plan.plan_id, full, facts) if facts else None


def _comparison(plan_id: str, full_id: str, facts: Mapping[str, Fact]) -> Comparison:
    """Tensors' squares summed by layer."""
    count = layer_count(facts)
    layers: dict[str, list[Fact]] = {}
    for name, fact in facts.items():
        layers.setdefault(layer_name(name, count), []).append(fact)
    distances = []
    for layer in sorted(layers, key=layer_order):
        updates = [fact[1] for fact in layers[layer] if len(fact) > 1]
        update = math.sqrt(sum(updates)) if len(updates) == len(layers[layer]) else None
        error = math.sqrt(sum(fact[0] for fact in layers[layer]))
        distances.append(LayerDistance(layer, error, update))
    return Comparison(plan_id, full_id, tuple(distances))
