"""The verb `diff`: what changed from one snapshot to another, by input, setting, layer and tensor.

Layers that both have as the same bytes are not read; the others are checked, then streamed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.domain.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.domain.layers import layer_count, layer_name, layer_order
from mergepipe_pipeline.domain.snapshot import Manifest, Snapshot
from mergepipe_pipeline.domain.view import moved, view_of
from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.execution.lookup import provenance_of, snapshot_named
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.snapshots.commit import verify_shard
from mergepipe_pipeline.warehouse import Warehouse

if TYPE_CHECKING:
    from mergepipe_pipeline.analysis.distance import Change

#: A tensor before and after.
Pair = tuple[TensorEntry, TensorEntry]
#: Figures of a plan that a user decides on.
_ASKED = ("budget_bytes", "strategy", "block_elems")


@dataclass(frozen=True, slots=True)
class Changed:
    """Something that one side lacks (None) or that both have differently.

    `kind` is "input" (role and name; digests of contents), "setting", or "file" (digests).
    """

    kind: str
    name: str
    before: str | None
    after: str | None

    @property
    def state(self) -> str:
        """added, removed or changed."""
        return "added" if self.before is None else "removed" if self.after is None else "changed"


@dataclass(frozen=True, slots=True)
class TensorChange:
    """How much one tensor of a changed layer differs.

    `l2` is ‖after − before‖₂, `before_l2` ‖before‖₂, as written; both None, like `max_abs`, where
    one side lacks the tensor or has another shape, where dtypes have no arithmetic, and where what
    changed is not finite.
    """

    tensor: str
    layer: str
    state: str  # same, changed, added, removed, or reshaped
    numel: int
    changed_elems: int
    l2: float | None = None
    before_l2: float | None = None
    max_abs: float | None = None

    @property
    def relative(self) -> float | None:
        """The change as a share of what was there; None where there is none."""
        return self.l2 / self.before_l2 if self.l2 is not None and self.before_l2 else None


@dataclass(frozen=True, slots=True)
class LayerChange:
    """One layer, or "all" changed ones together; the figures are those of its tensors."""

    layer: str
    state: str  # same, changed, added, removed
    tensors_changed: int
    tensors: int
    numel: int
    changed_elems: int
    l2: float | None
    before_l2: float | None
    max_abs: float | None

    @property
    def relative(self) -> float | None:
        """The change as a share of what was there; None where there is none."""
        return self.l2 / self.before_l2 if self.l2 is not None and self.before_l2 else None


@dataclass(frozen=True)
class Difference:
    """All that differs between two snapshots; `recipe` is a unified diff of their texts."""

    before: str
    after: str
    inputs: tuple[Changed, ...]
    settings: tuple[Changed, ...]
    recipe: tuple[str, ...]
    files: tuple[Changed, ...]
    layers: tuple[LayerChange, ...]
    tensors: tuple[TensorChange, ...]

    @property
    def whole(self) -> LayerChange:
        """All layers that are not the same, together."""
        return _layer("all", "changed" if self.tensors else "same", self.tensors)


def diff(
    warehouse: Warehouse, before: str, after: str, progress: Progress | None = None
) -> Difference:
    """What changed between two snapshots, each named as `snapshot_named` says.

    Raises NotFoundError, CorruptionError, CheckpointChangedError.
    """
    one, other = snapshot_named(warehouse, before), snapshot_named(warehouse, after)
    made = provenance_of(one), provenance_of(other)
    ours, theirs = (str(p.get("recipe", "")).splitlines() for p in made)
    layers = _tensor_layers(one.manifest, other.manifest)
    tensors = tuple(_tensors(one, other, layers, progress or Silent()))
    return Difference(
        one.snapshot_id,
        other.snapshot_id,
        _changed("input", _inputs(one.manifest), _inputs(other.manifest)),
        _changed("setting", _settings(one.manifest, made[0]), _settings(other.manifest, made[1])),
        tuple(unified_diff(ours, theirs, before, after, lineterm="", n=1)),
        _changed("file", _files(one.manifest), _files(other.manifest)),
        tuple(_layers(one.manifest, other.manifest, layers, tensors)),
        tensors,
    )


def _changed(kind: str, one: Mapping[str, str], other: Mapping[str, str]) -> tuple[Changed, ...]:
    return tuple(
        Changed(kind, name, one.get(name), other.get(name))
        for name in dict.fromkeys((*one, *other))
        if one.get(name) != other.get(name)
    )


def _inputs(manifest: Manifest) -> dict[str, str]:
    return {f"{i.role} {i.name}": i.content_sha256 for i in manifest.inputs}


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


def _files(manifest: Manifest) -> dict[str, str]:
    return {f.file: f.sha256 for f in manifest.side_files}


def _layers(
    one: Manifest,
    other: Manifest,
    layers: Mapping[str, str],
    tensors: Sequence[TensorChange],
) -> Iterator[LayerChange]:
    ours, theirs = ({s.layer: s.sha256 for s in m.shards} for m in (one, other))
    counts = Counter(layers.values())
    is_cut_alike = counts.keys() == ours.keys() | theirs.keys()
    for name in sorted(counts, key=layer_order):
        of = [t for t in tensors if t.layer == name]
        if is_cut_alike:
            is_same = ours.get(name) == theirs.get(name)
        else:  # of shards of some size no digest tells
            is_same = all(t.state == "same" for t in of)
        if is_same:
            yield LayerChange(name, "same", 0, counts[name], 0, 0, 0.0, None, 0.0)
        else:
            added, removed = is_cut_alike and name not in ours, is_cut_alike and name not in theirs
            yield _layer(name, "added" if added else "removed" if removed else "changed", of)


def _layer(name: str, state: str, tensors: Sequence[TensorChange]) -> LayerChange:
    measured = [t for t in tensors if t.max_abs is not None and t.l2 is not None]
    known = len(measured) == len(tensors) and all(t.before_l2 is not None for t in measured)
    return LayerChange(
        name,
        state,
        sum(t.state != "same" for t in tensors),
        len(tensors),
        sum(t.numel for t in tensors),
        sum(t.changed_elems for t in tensors),
        math.hypot(*(t.l2 or 0.0 for t in tensors)) if known else None,
        math.hypot(*(t.before_l2 or 0.0 for t in tensors)) if known else None,
        max((t.max_abs or 0.0 for t in tensors), default=0.0) if known else None,
    )


def _tensors(
    one: Snapshot, other: Snapshot, layers: Mapping[str, str], progress: Progress
) -> Iterator[TensorChange]:
    """The tensors of all shards that are not the same, in the order of layers."""
    from mergepipe_pipeline.analysis.distance import changed_elements

    before, after = (open_checkpoint(s.path, s.snapshot_id[:12]) for s in (one, other))
    same = {s.sha256 for s in one.manifest.shards} & {s.sha256 for s in other.manifest.shards}
    for snapshot in (one, other):
        shards = [s for s in snapshot.manifest.shards if s.sha256 not in same]
        total = sum(s.nbytes for s in shards)
        with progress.task(f"verify {snapshot.snapshot_id[:12]}", total) as advance:
            for shard in shards:
                verify_shard(Path(snapshot.path) / shard.file, shard, advance)
    equal = {t for s in other.manifest.shards if s.sha256 in same for t, _ in s.tensors}
    names = [n for n in dict.fromkeys((*before.by_name, *after.by_name)) if n not in equal]
    names.sort(key=lambda n: layer_order(layers[n]))
    pairs = {n: pair for n in names if (pair := _pair(before, after, n))}
    measured = _measured(before, after, pairs, progress)
    for name in names:
        ours, theirs = before.by_name.get(name), after.by_name.get(name)
        numel = max(e.numel for e in (ours, theirs) if e)
        if name not in pairs:
            state = "added" if ours is None else "removed" if theirs is None else "reshaped"
            yield TensorChange(name, layers[name], state, numel, numel)
        elif change := measured.get(name):
            figures = (math.sqrt(change.l2sq), math.sqrt(change.before_l2sq), change.max_abs)
            finite = [x if math.isfinite(x) else None for x in figures]
            yield _tensor(name, layers[name], numel, change.changed, *finite)
        else:
            changed = changed_elements(before, after, name)
            yield _tensor(name, layers[name], numel, changed)


def _measured(
    before: Checkpoint, after: Checkpoint, pairs: Mapping[str, Pair], progress: Progress
) -> dict[str, Change]:
    """The changes of those pairs that hold floating-point numbers, by name."""
    from mergepipe_pipeline.analysis.distance import changes

    views = {
        name: (view_of(ours), moved(view_of(theirs), 1))
        for name, (ours, theirs) in pairs.items()
        if ours.dtype in FLOATING
    }
    nbytes = sum(v.nbytes for pair in views.values() for v in pair)
    with progress.task(f"diff {before.name} {after.name}", nbytes) as advance:
        measured = changes(before, after, list(views.values()), advance)
        return dict(zip(views, measured, strict=True))


def _tensor(
    name: str, layer: str, numel: int, changed: int, *figures: float | None
) -> TensorChange:
    return TensorChange(name, layer, "changed" if changed else "same", numel, changed, *figures)


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


def _pair(before: Checkpoint, after: Checkpoint, name: str) -> Pair | None:
    """A tensor that both have in one shape, and of kinds that can be compared."""
    ours, theirs = before.by_name.get(name), after.by_name.get(name)
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return None
    floats = {ours.dtype in FLOATING, theirs.dtype in FLOATING}
    return (ours, theirs) if floats == {True} or ours.dtype == theirs.dtype else None
