"""Makes tiny real merges: one or two shards as objects, their manifest, their side files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mergepipe_pipeline.checkpoints.writer import ShardWriter
from mergepipe_pipeline.domain.outcome import StoredObject
from mergepipe_pipeline.domain.plan import Estimates
from mergepipe_pipeline.domain.snapshot import (
    LineageEntry,
    Manifest,
    ShardEntry,
    SideFile,
    Snapshot,
)
from mergepipe_pipeline.snapshots.commit import commit_snapshot, stage_snapshot
from mergepipe_pipeline.snapshots.stores import ObjectStore, RefStore
from mergepipe_pipeline.storage import atomic
from mergepipe_pipeline.storage.atomic import remove_tree

#: What a provenance says at least.
PROVENANCE: dict[str, Any] = {
    "created": "2026-01-01T00:00:00+00:00",
    "recipe": "merge_method: ties\n",
    "recipe_name": "tiny",
    "ref": "tiny",
    "sources": [{"name": "b", "root": "/models/b", "checkpoint_id": "0" * 24}],
    "estimates": asdict(
        Estimates(
            budget_bytes=None,
            strategy="full",
            block_elems=1,
            expert_bytes_total=38,
            expert_bytes_planned=38,
            blocks_total=1,
            blocks_bought=1,
            blocks_zero=0,
            reads=1,
            error_bound=0.0,
            bound_note="",
            predicted_error=0.0,
            predicted_margin=None,
            update_norm=1.0,
        )
    ),
    "realised": None,
}


class Crash(Exception):
    """The power went."""


def crash_at(step: int) -> None:
    """Crash before the `step`-th change of the file system from now on, and ever after."""
    left = [step]

    def hook(name: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Crash(name)

    atomic.crash_hook = hook


def count_steps(work: Callable[[], object]) -> int:
    """How many changes of the file system `work` makes."""
    names: list[str] = []
    atomic.crash_hook = names.append
    work()
    atomic.crash_hook = None
    return len(names)


@dataclass(frozen=True)
class Store:
    """The folders of a warehouse that snapshots use, and the whole way to a snapshot."""

    root: Path

    @property
    def objects(self) -> ObjectStore:
        return ObjectStore(self.root / "objects", self.root / "actions")

    @property
    def staging(self) -> Path:
        return self.root / "staging"

    @property
    def snapshots(self) -> Path:
        return self.root / "snapshots"

    @property
    def refs(self) -> RefStore:
        return RefStore(self.root / "refs")

    def shard(self, content: int) -> ShardEntry:
        """A layer of two tensors that holds `content`; made unless the action cache knows it."""
        key = hashlib.sha256(b"layer %d" % content).hexdigest()
        stored = self.objects.lookup(key)
        if stored is None:
            self.staging.mkdir(parents=True, exist_ok=True)
            temp = self.staging / f"layer-{content}.tmp"
            remove_tree(temp)
            tensors = [(f"l{content}.w", "F32", (4,)), (f"l{content}.b", "I8", (3,))]
            with ShardWriter(temp, tensors, {"format": "pt"}) as writer:
                writer.write(memoryview(bytes([content]) * 19))
                sha256, nbytes = writer.finish()
            stored = StoredObject(sha256, nbytes, writer.prefix_digests)
            self.objects.adopt(temp, stored)
            self.objects.record(key, stored)
        return ShardEntry(
            f"model-{content}.safetensors",
            f"layer {content}",
            key,
            stored.sha256,
            stored.nbytes,
            stored.tensors,
        )

    def stage(self, contents: tuple[int, ...], run: int = 0) -> Path:
        """A staged snapshot; `run` is what differs between two runs with one result."""
        sides = {"config.json": b'{"dtype": "float32"}\n', "README.md": b"# merged\n"}
        manifest = Manifest(
            plan_id="a1" * 32,
            method="ties",
            inputs=(LineageEntry("base", "b", "0" * 64),),
            operators=(("ties", "", 2 * len(contents)),),
            shards=tuple(self.shard(c) for c in contents),
            side_files=tuple(
                SideFile(n, hashlib.sha256(d).hexdigest(), len(d)) for n, d in sides.items()
            ),
        )
        remove_tree(self.staging / str(run))
        told = {**PROVENANCE, "run": run, "cost": 1}
        return stage_snapshot(self.staging / str(run), manifest, self.objects, sides, told)

    def commit(self, contents: tuple[int, ...], run: int = 0) -> Snapshot:
        """The whole way from numbers to a committed snapshot."""
        return commit_snapshot(self.stage(contents, run), self.snapshots)
