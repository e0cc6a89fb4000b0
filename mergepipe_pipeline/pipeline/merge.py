"""The verb `merge`: run what the action cache does not know, then commit a snapshot.

A layer whose key is known is not read, not computed, not written. A crash loses at most the layers
that were running; everything before is found again by key.
"""

from __future__ import annotations

import platform
import time
from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.digest import sha256_hex
from mergepipe_pipeline.errors import NotFoundError
from mergepipe_pipeline.pipeline.progress import Advance, Progress, Silent
from mergepipe_pipeline.snapshots.commit import commit_snapshot
from mergepipe_pipeline.snapshots.model_folder import (
    config_json,
    index_json,
    model_card,
    shard_name,
)
from mergepipe_pipeline.snapshots.objects import ObjectStore, StoredObject
from mergepipe_pipeline.snapshots.stage import stage_snapshot
from mergepipe_pipeline.spec.plan import LayerTask, MergePlan
from mergepipe_pipeline.spec.snapshot import LineageEntry, Manifest, ShardEntry, SideFile, Snapshot
from mergepipe_pipeline.storage.atomic import remove_tree
from mergepipe_pipeline.storage.checkpoint import side_files
from mergepipe_pipeline.storage.source import open_source
from mergepipe_pipeline.tokenizer.model import FILE_NAMES as TOKENIZER_FILES
from mergepipe_pipeline.warehouse import Warehouse

if TYPE_CHECKING:
    from mergepipe_pipeline.engine.execute import LayerRunner


@dataclass(frozen=True, slots=True)
class EngineKnobs:
    """Speed and memory of a merge; never its bits. None means the engine's default."""

    threads: int | None = None
    window_elems: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class LayerOutcome:
    """One layer after `merge_layers`: reused from the action cache, or what it cost."""

    name: str
    layer_key: str
    stored: StoredObject
    reused: bool
    expert_bytes_read: int
    base_bytes_read: int
    wall_s: float
    bytes_written: int


@dataclass(frozen=True, slots=True)
class Realised:
    """What running layers cost, in bytes and seconds; reused layers cost nothing."""

    expert_bytes_read: int
    base_bytes_read: int
    bytes_written: int
    layers_executed: int
    layers_reused: int
    layers_s: float

    @staticmethod
    def of(layers: Iterable[LayerOutcome]) -> Realised:
        """The sum over layers."""
        return Realised.total(
            Realised(
                x.expert_bytes_read,
                x.base_bytes_read,
                x.bytes_written,
                int(not x.reused),
                int(x.reused),
                x.wall_s,
            )
            for x in layers
        )

    @staticmethod
    def total(costs: Iterable[Realised]) -> Realised:
        """The sum of costs."""
        rows = list(costs)
        return Realised(
            sum(c.expert_bytes_read for c in rows),
            sum(c.base_bytes_read for c in rows),
            sum(c.bytes_written for c in rows),
            sum(c.layers_executed for c in rows),
            sum(c.layers_reused for c in rows),
            round(sum(c.layers_s for c in rows), 3),
        )


@dataclass(frozen=True, slots=True)
class MergeOutcome:
    """A finished merge: the snapshot, its plan, what it cost, and the time it took."""

    snapshot: Snapshot
    plan: MergePlan
    realised: Realised
    wall_s: float

    def summary(self) -> dict[str, Any]:
        """The figures of `merge --json`; bytes are bytes, `error_bound` an L2 norm."""
        e = self.plan.estimates
        return {
            "snapshot_id": self.snapshot.snapshot_id,
            "plan_id": self.plan.plan_id,
            "path": self.snapshot.path,
            "budget_bytes": e.budget_bytes,
            "strategy": e.strategy,
            "expert_bytes_total": e.expert_bytes_total,
            "expert_bytes_planned": e.expert_bytes_planned,
            **asdict(self.realised),
            "error_bound": e.error_bound,
            "error_bound_note": e.bound_note,
            "update_norm_estimate": e.update_norm,
            "wall_s": round(self.wall_s, 3),
            "warnings": list(self.plan.warnings),
        }


def merge(
    home: Warehouse,
    plan: MergePlan,
    *,
    knobs: EngineKnobs | None = None,
    progress: Progress | None = None,
) -> MergeOutcome:
    """Execute a plan and commit its snapshot; publishes nothing.

    Raises CheckpointChangedError when an input is not the planned one any more, StorageFullError on
    a full disk; staging is removed, finished layers stay for the next try.
    """
    started = time.monotonic()
    realised = Realised.of(merge_layers(home, plan, knobs=knobs, progress=progress))
    snapshot = commit(home, plan, realised)
    return MergeOutcome(snapshot, plan, realised, time.monotonic() - started)


def merge_layers(
    home: Warehouse,
    plan: MergePlan,
    names: Sequence[str] | None = None,
    *,
    knobs: EngineKnobs | None = None,
    progress: Progress | None = None,
) -> Iterator[LayerOutcome]:
    """Run or reuse the named layers (default: all) in plan order, yielding each as it is done."""
    wanted = [layer for layer in plan.layers if names is None or layer.name in names]
    store = object_store(home)
    unknown = [layer for layer in wanted if store.lookup(layer.layer_key) is None]
    total = sum(task.out_nbytes for layer in unknown for task in layer.tasks)
    with (
        (progress or Silent()).task(f"merge {plan.recipe_name}", total) as advance,
        _LayerMerger(home, plan, knobs or EngineKnobs(), advance) as merger,
    ):
        for layer in wanted:
            yield merger.merge(layer)


class _LayerMerger:
    """Looks a layer up, or runs it and records it.

    The engine starts with the first layer it is needed for.
    """

    def __init__(
        self, home: Warehouse, plan: MergePlan, knobs: EngineKnobs, advance: Advance
    ) -> None:
        self._home, self._plan, self._knobs, self._advance = home, plan, knobs, advance
        self._store = object_store(home)
        self._stack = ExitStack()
        self._runner: LayerRunner | None = None
        self._staging: Path | None = None

    def __enter__(self) -> _LayerMerger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def merge(self, layer: LayerTask) -> LayerOutcome:
        """One layer, from the action cache or by the engine."""
        known = self._store.lookup(layer.layer_key)
        if known is not None:
            return LayerOutcome(layer.name, layer.layer_key, known, True, 0, 0, 0.0, 0)
        runner, staging = self._engine()
        path = staging / f"{layer.name}.safetensors"
        result = runner.run(layer, path, self._advance)
        stored = StoredObject(result.sha256, result.nbytes, result.tensors)
        self._store.adopt(path, stored)
        self._store.record(layer.layer_key, stored)
        return LayerOutcome(
            layer.name,
            layer.layer_key,
            stored,
            False,
            result.expert_bytes_read,
            result.base_bytes_read,
            result.wall_s,
            result.nbytes,
        )

    def _engine(self) -> tuple[LayerRunner, Path]:
        if self._runner is None or self._staging is None:
            from mergepipe_pipeline.engine.execute import LayerRunner
            from mergepipe_pipeline.engine.windows import EngineOptions

            given = {k: v for k, v in asdict(self._knobs).items() if v is not None}
            self._staging = self._home.new_staging("merge")
            self._stack.callback(remove_tree, self._staging)
            self._runner = self._stack.enter_context(
                LayerRunner(self._plan, EngineOptions(**given))
            )
        return self._runner, self._staging


def commit(home: Warehouse, plan: MergePlan, realised: Realised | None = None) -> Snapshot:
    """Build the snapshot of a plan whose layers are all in the object store, and commit it.

    `realised` goes to the provenance. Raises NotFoundError naming the first layer
    that is not merged yet.
    """
    store = object_store(home)
    shards = []
    for number, layer in enumerate(plan.layers, 1):
        stored = store.lookup(layer.layer_key)
        if stored is None:
            raise NotFoundError(
                "A layer of the plan is not merged yet",
                where=layer.name,
                expected=f"an object for layer key {layer.layer_key[:16]}",
                found="none",
                next_step="run `mergepipe merge` on the recipe",
            )
        shards.append(
            ShardEntry(
                shard_name(number, len(plan.layers)),
                layer.name,
                layer.layer_key,
                stored.sha256,
                stored.nbytes,
                stored.tensors,
            )
        )
    inputs = _lineage(home, plan)
    files = _side_files(plan, shards, inputs)
    manifest = Manifest(
        plan_id=plan.plan_id,
        method=plan.method,
        inputs=inputs,
        shards=tuple(shards),
        side_files=tuple(
            SideFile(name, sha256_hex(data), len(data)) for name, data in sorted(files.items())
        ),
    )
    staging = home.new_staging("commit")
    try:
        staged = stage_snapshot(staging, manifest, store, files, _provenance(plan, realised))
        return commit_snapshot(staged, home.snapshots)
    finally:
        remove_tree(staging)


def object_store(home: Warehouse) -> ObjectStore:
    """The warehouse's objects and action cache."""
    return ObjectStore(home.objects, home.actions)


def _lineage(home: Warehouse, plan: MergePlan) -> tuple[LineageEntry, ...]:
    catalog = Catalog(home.catalog)
    return tuple(
        LineageEntry(role, s.name, catalog.content_sha256(s.checkpoint_id))
        for role, s in zip(plan.roles, plan.sources, strict=True)
    )


def _side_files(
    plan: MergePlan, shards: Sequence[ShardEntry], inputs: Sequence[LineageEntry]
) -> dict[str, bytes]:
    """Everything beside weights: the template's files, changed config, tokenizer, index, card."""
    root = plan.sources[plan.side.template].root
    files = {}
    replaced = dict(plan.side.files) if plan.side.files is not None else None
    with open_source(root) as source:
        for name in side_files(root):
            if replaced is None or name not in TOKENIZER_FILES:
                files[name] = source.read_range(name, 0, source.size(name))
    files |= {name: b64decode(text) for name, text in (replaced or {}).items()}
    dtypes = {t.out_dtype for layer in plan.layers for t in layer.tasks if t.experts}
    if "config.json" in files:
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        files["config.json"] = config_json(files["config.json"], dtype, plan.side.config)
    total = sum(task.out_nbytes for layer in plan.layers for task in layer.tasks)
    files["model.safetensors.index.json"] = index_json(shards, total)
    files["README.md"] = model_card(plan.method, plan.plan_id, inputs)
    return files


def _provenance(plan: MergePlan, realised: Realised | None) -> dict[str, Any]:
    """What no id covers: who, when, where, how asked for, what it cost."""
    return {
        "recipe_name": plan.recipe_name,
        "recipe": plan.recipe_text,
        "ref": plan.ref,
        "estimates": asdict(plan.estimates),
        "warnings": list(plan.warnings),
        "realised": realised and asdict(realised),
        "sources": [asdict(s) for s in plan.sources],
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "python": platform.python_version(),
        "versions": {p: version(p) for p in ("mergepipe-pipeline", "torch", "numpy")},
    }
