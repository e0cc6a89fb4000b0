"""The verbs `compare` and `diff`: how far a merge is from the full one, and what changed.

Both check two snapshots where they differ, and stream them. What `compare` finds is remembered as
facts of the catalog, by the plans that determine both snapshots, so that `explain` can show it
beside what was predicted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergepipe_pipeline.catalog.pairs import Fact
from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.decoding import values_of
from mergepipe_pipeline.domain.layers import layer_count, layer_name, layer_order
from mergepipe_pipeline.domain.plan import MergePlan, Source, TensorTask
from mergepipe_pipeline.domain.snapshot import Manifest, Snapshot
from mergepipe_pipeline.domain.view import TensorView, moved, renumbered, sources_of
from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.errors import (
    IncompatibleCheckpointsError,
    MergePipeError,
    NotFoundError,
)
from mergepipe_pipeline.execution.lookup import (
    load_plan,
    provenance_of,
    snapshot_named,
    snapshot_of,
)
from mergepipe_pipeline.facts.offline import present_root
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.snapshots.commit import verify_shard
from mergepipe_pipeline.snapshots.find import list_snapshots, load_snapshot
from mergepipe_pipeline.warehouse import Warehouse

if TYPE_CHECKING:
    from mergepipe_pipeline.analysis.distance import Change as TensorChange

#: The catalog's name for what is remembered: per tensor ‖W_part − W_full‖² and, if the base was
#: there, ‖W_full − W_base‖². The owner is the part's plan, the base the full one's.
FACT = "realised-error"
#: Figures of a plan that a user decides on.
_ASKED = ("budget_bytes", "strategy", "block_elems")


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
class _CheckedPair:
    """The weights of two snapshots; `equal` are the tensors of files that both have alike.

    `old` and `new` are their tensors by name, and the values of codes.
    """

    before: Checkpoint
    after: Checkpoint
    old: Mapping[str, TensorView]
    new: Mapping[str, TensorView]
    equal: frozenset[str]


def _checked_pair(
    before: Snapshot, after: Snapshot, progress: Progress, *, reads_equal: bool
) -> _CheckedPair:
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
    alike = {name for s in after.manifest.shards if s.sha256 in same for name, _ in s.tensors}
    one, other = (open_checkpoint(s.path, s.snapshot_id[:12]) for s in (before, after))
    old, new = values_of(one), values_of(other)
    equal = (n for n, view in new.items() if {e.name for e in view.stored[0].entries} <= alike)
    return _CheckedPair(one, other, old, new, frozenset(equal))


def _measure(
    warehouse: Warehouse, part: Snapshot, full: Snapshot, progress: Progress
) -> dict[str, Fact]:
    pair = _checked_pair(part, full, progress, reads_equal=True)
    _refuse_unlike(pair)
    bases = _bases(warehouse, full)
    found = _changes(f"compare {pair.before.name}", pair, pair.old, progress, bases)
    return {
        name: (change.l2sq, change.update_l2sq) if has_base else (change.l2sq,)
        for name, (change, has_base) in found.items()
    }


def _refuse_unlike(pair: _CheckedPair) -> None:
    """Raise IncompatibleCheckpointsError for two that have not the same tensors of one shape."""
    ours, theirs = pair.old, pair.new
    expected = found = ""
    for name in sorted(ours.keys() ^ theirs.keys())[:1]:
        expected, found = "the same tensors in both", f"only one has {name}"
    for name, view in ours.items() if not found else ():
        if view.shape != theirs[name].shape:
            expected, found = f"{name} of shape {view.shape}", f"shape {theirs[name].shape}"
    if found:
        raise IncompatibleCheckpointsError(
            "Two snapshots cannot be compared",
            where=f"{pair.before.name}, {pair.after.name}",
            expected=expected,
            found=found,
            next_step="compare merges of one recipe",
        )


@dataclass(frozen=True)
class _Bases:
    """Checkpoints that a plan merges on, and their tensors by output tensor."""

    checkpoints: tuple[Checkpoint, ...] = ()
    views: Mapping[str, TensorView] = field(default_factory=dict)


def _changes(
    label: str, pair: _CheckedPair, names: Iterable[str], progress: Progress, bases: _Bases
) -> dict[str, tuple[TensorChange, bool]]:
    """The changes of those tensors that both have in one shape as floating-point numbers.

    With each, whether its distance to a base was measured, too.
    """
    from mergepipe_pipeline.analysis.distance import Triple, changes

    triples = {}
    for name in names:
        one, other = pair.old.get(name), pair.new.get(name)
        if not one or not other or one.shape != other.shape:
            continue
        if {one.dtype, other.dtype} <= FLOATING:
            base = bases.views.get(name)
            triples[name] = Triple(
                None if name in pair.equal else one,
                moved(other, 1),
                moved(base, 2) if base and base.shape == other.shape else None,
            )
    checkpoints = [pair.before, pair.after, *bases.checkpoints]
    with progress.task(label, sum(t.nbytes for t in triples.values())) as advance:
        found = zip(
            triples.items(), changes(checkpoints, [*triples.values()], advance), strict=True
        )
        return {name: (change, triple.base is not None) for (name, triple), change in found}


def _bases(warehouse: Warehouse, full: Snapshot) -> _Bases:
    """The bases of the full plan; nothing where it or one is gone or is not what it was."""
    try:
        plan = load_plan(warehouse, full.manifest.plan_id)
    except NotFoundError:
        return _Bases()
    tasks = (task for layer in plan.layers for task in layer.tasks)
    views = {task.name: task.base.view for task in tasks if task.base}
    used = sorted({source for view in views.values() for source in sources_of(view)})
    opened = [_unchanged(warehouse, plan.sources[number]) for number in used]
    checkpoints = tuple(c for c in opened if c is not None)
    if len(checkpoints) < len(used):
        return _Bases()
    places = {source: place for place, source in enumerate(used)}
    return _Bases(checkpoints, {n: renumbered(view, places) for n, view in views.items()})


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
    """The comparison of a plan's result with the full merge, if there was one. Reads no weight."""
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


@dataclass(frozen=True, slots=True)
class Changed:
    """Something that one side lacks (None) or that both have differently.

    `kind` is "input" (role and name; digests of contents), "setting", or "file" (digests).
    """

    kind: str
    name: str
    state: str  # added, removed or changed
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class Change:
    """How much a tensor of a changed layer differs, or (`tensor` None) all of a layer's together.

    The layer "all" has those of all changed ones. `l2` is ‖after − before‖₂, `before_l2` ‖before‖₂,
    as written; both None, like `max_abs`, where one side lacks a tensor or has another shape, where
    dtypes have no arithmetic, and where what changed is not finite.
    """

    tensor: str | None
    layer: str
    state: str  # same, changed, added, removed, or of a tensor reshaped
    numel: int
    changed_elems: int
    l2: float | None = None
    before_l2: float | None = None
    max_abs: float | None = None
    tensors: int = 1
    tensors_changed: int = 1

    @property
    def relative(self) -> float | None:
        """The change as a share of what was there; None where there is none."""
        return self.l2 / self.before_l2 if self.l2 is not None and self.before_l2 else None

    @property
    def record(self) -> dict[str, Any]:
        """All figures as one flat record."""
        return {**asdict(self), "relative": self.relative}


@dataclass(frozen=True)
class Difference:
    """All that differs between two snapshots; `recipe` is a unified diff of their texts."""

    before: str
    after: str
    inputs: tuple[Changed, ...]
    settings: tuple[Changed, ...]
    recipe: tuple[str, ...]
    files: tuple[Changed, ...]
    layers: tuple[Change, ...]
    tensors: tuple[Change, ...]

    @property
    def whole(self) -> Change:
        """All layers that are not the same, together."""
        return _together("all", self.tensors, len(self.tensors))


def diff(
    warehouse: Warehouse, before: str, after: str, progress: Progress | None = None
) -> Difference:
    """The changes between two snapshots, each named as `snapshot_named` says.

    Raises NotFoundError, CorruptionError, CheckpointChangedError.
    """
    one, other = snapshot_named(warehouse, before), snapshot_named(warehouse, after)
    made = provenance_of(one), provenance_of(other)
    ours, theirs = (str(p.get("recipe", "")).splitlines() for p in made)
    progress = progress or Silent()
    pair = _checked_pair(one, other, progress, reads_equal=False)
    stored = _tensor_layers(one.manifest, other.manifest)
    views = {**pair.old, **pair.new}
    layers = {name: stored[view.stored[0].entry.name] for name, view in views.items()}
    tensors = tuple(_tensors(pair, layers, progress))
    manifests = one.manifest, other.manifest
    inputs = [{f"{i.role} {i.name}": i.content_sha256 for i in m.inputs} for m in manifests]
    files = [{f.file: f.sha256 for f in m.side_files} for m in manifests]
    return Difference(
        one.snapshot_id,
        other.snapshot_id,
        _changed("input", *inputs),
        _changed("setting", *map(_settings, manifests, made)),
        tuple(unified_diff(ours, theirs, before, after, lineterm="", n=1)),
        _changed("file", *files),
        tuple(_layers(layers, tensors)),
        tensors,
    )


def _changed(kind: str, one: Mapping[str, str], other: Mapping[str, str]) -> tuple[Changed, ...]:
    changed = []
    for name in dict.fromkeys((*one, *other)):
        before, after = one.get(name), other.get(name)
        state = "added" if before is None else "removed" if after is None else "changed"
        if before != after:
            changed.append(Changed(kind, name, state, before, after))
    return tuple(changed)


def _settings(manifest: Manifest, provenance: Mapping[str, Any]) -> dict[str, str]:
    asked = provenance.get("estimates") or {}
    made = ", ".join(f"{n} {name} {kind}".rstrip() for name, kind, n in manifest.operators)
    figures = {name: str(asked[name]) for name in _ASKED if asked.get(name) is not None}
    engine = str(provenance.get("engine_version") or "not recorded")
    return {
        "engine": engine,
        "method": manifest.method,
        "operators": made,
        **figures,
        "plan": manifest.plan_id,
    }


def _layers(layers: Mapping[str, str], tensors: Sequence[Change]) -> Iterator[Change]:
    counts = Counter(layers.values())
    for name in sorted(counts, key=layer_order):
        yield _together(name, [t for t in tensors if t.layer == name], counts[name])


def _together(layer: str, tensors: Sequence[Change], count: int) -> Change:
    """The change of a layer of `count` tensors, of which these are not known to be the same."""
    changed = [t for t in tensors if t.state != "same"]
    states = {t.state for t in changed} if len(changed) == count else {"changed"}
    state = states.pop() if states in ({"added"}, {"removed"}) else "changed"
    l2 = [t.l2 for t in changed if t.l2 is not None]
    before_l2 = [t.before_l2 for t in tensors if t.before_l2 is not None]
    largest = [t.max_abs for t in changed if t.max_abs is not None]
    return Change(
        None,
        layer,
        state if changed else "same",
        sum(t.numel for t in tensors),
        sum(t.changed_elems for t in changed),
        math.hypot(*l2) if len(l2) == len(changed) else None,
        math.hypot(*before_l2) if len(before_l2) == len(tensors) else None,
        max(largest, default=0.0) if len(largest) == len(changed) else None,
        count,
        len(changed),
    )


def _tensors(pair: _CheckedPair, layers: Mapping[str, str], progress: Progress) -> Iterator[Change]:
    """The tensors of all shards that are not the same, in the order of layers."""
    from mergepipe_pipeline.analysis.distance import changed_elements

    before, after = pair.old, pair.new
    names = [n for n in dict.fromkeys((*before, *after)) if n not in pair.equal]
    names.sort(key=lambda n: layer_order(layers[n]))
    label = f"diff {pair.before.name} {pair.after.name}"
    measured = _changes(label, pair, names, progress, _Bases())
    for name in names:
        ours, theirs = before.get(name), after.get(name)
        numel = max(e.numel for e in (ours, theirs) if e)
        if name in measured:
            of_floats, _ = measured[name]
            squares = of_floats.l2sq, of_floats.before_l2sq
            norms = *map(math.sqrt, squares), of_floats.max_abs
            l2, before_l2, largest = (x if math.isfinite(x) else None for x in norms)
            changed = of_floats.changed
        elif ours and theirs and (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype):
            l2 = before_l2 = largest = None
            changed = changed_elements(pair.before, pair.after, name)
        else:
            state = "added" if ours is None else "removed" if theirs is None else "reshaped"
            yield Change(name, layers[name], state, numel, numel)
            continue
        state = "changed" if changed else "same"
        figures = l2, before_l2, largest, 1, int(changed > 0)
        yield Change(name, layers[name], state, numel, changed, *figures)


def _tensor_layers(one: Manifest, other: Manifest) -> dict[str, str]:
    """Each tensor's layer: what its shard is called, or its own name tells where shards are files
    of some size.
    """
    ours, theirs = _in_shards(one), _in_shards(other)
    layers = ours | theirs
    if all(layers[name] == layer for name, layer in ours.items()):
        return layers
    count = layer_count(layers)
    return {name: layer_name(name, count) for name in layers}


def _in_shards(manifest: Manifest) -> dict[str, str]:
    return {name: s.layer for s in manifest.shards for name, _ in s.tensors}
