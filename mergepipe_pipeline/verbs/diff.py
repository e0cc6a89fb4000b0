"""The verb `diff`: what changed from one snapshot to another, by input, setting, layer and tensor.

Layers that both have as the same bytes are not read; the others are checked, then streamed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import unified_diff
from typing import TYPE_CHECKING, Any

from mergepipe_pipeline.domain.layers import layer_count, layer_name, layer_order
from mergepipe_pipeline.domain.snapshot import Manifest, Snapshot
from mergepipe_pipeline.domain.view import moved, view_of
from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.execution.lookup import provenance_of, snapshot_named
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.verbs.compare import CheckedPair, checked_pair
from mergepipe_pipeline.warehouse import Warehouse

if TYPE_CHECKING:
    from mergepipe_pipeline.analysis.distance import Change as TensorChange

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
        tuple(_layers(layers, tensors)),
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


def _tensors(
    one: Snapshot, other: Snapshot, layers: Mapping[str, str], progress: Progress
) -> Iterator[Change]:
    """The tensors of all shards that are not the same, in the order of layers."""
    from mergepipe_pipeline.analysis.distance import changed_elements

    pair = checked_pair(one, other, progress, reads_equal=False)
    before, after = pair.before.by_name, pair.after.by_name
    names = [n for n in dict.fromkeys((*before, *after)) if n not in pair.equal]
    names.sort(key=lambda n: layer_order(layers[n]))
    measured = _measured(pair, names, progress)
    for name in names:
        ours, theirs = before.get(name), after.get(name)
        numel = max(e.numel for e in (ours, theirs) if e)
        if of_floats := measured.get(name):
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


def _measured(
    pair: CheckedPair, names: Sequence[str], progress: Progress
) -> dict[str, TensorChange]:
    """The changes of those tensors that both have in one shape as floating-point numbers."""
    from mergepipe_pipeline.analysis.distance import Triple, changes

    triples = {}
    for name in names:
        ours, theirs = pair.before.by_name.get(name), pair.after.by_name.get(name)
        if (
            ours
            and theirs
            and ours.shape == theirs.shape
            and {ours.dtype, theirs.dtype} <= FLOATING
        ):
            triples[name] = Triple(view_of(ours), moved(view_of(theirs), 1))
    nbytes = sum(t.nbytes for t in triples.values())
    with progress.task(f"diff {pair.before.name} {pair.after.name}", nbytes) as advance:
        found = changes([pair.before, pair.after], [*triples.values()], advance)
        return dict(zip(triples, found, strict=True))


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
