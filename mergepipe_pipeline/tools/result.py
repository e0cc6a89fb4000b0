"""A result that no recipe made: written in staging, then a snapshot or a plain folder at once.

Its manifest names every byte and every input, as that of a merge does; its provenance says which
verb made it, with which parameters, and what the verb measured. It has no plan: `plan_id` is the
digest of verb, parameters and inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mergepipe_pipeline.checkpoints.header import Described
from mergepipe_pipeline.checkpoints.open_checkpoint import INDEX, open_checkpoint
from mergepipe_pipeline.checkpoints.writer import ShardWriter
from mergepipe_pipeline.digest import digest_json, seal, sha256_hex
from mergepipe_pipeline.domain.outcome import StoredObject
from mergepipe_pipeline.domain.plan import ENGINE_VERSION, Source
from mergepipe_pipeline.domain.snapshot import (
    MANIFEST,
    PROVENANCE,
    LineageEntry,
    Manifest,
    ShardEntry,
    SideFile,
)
from mergepipe_pipeline.execution.plan_leases import staging
from mergepipe_pipeline.progress import Advance
from mergepipe_pipeline.snapshots.commit import (
    commit_snapshot,
    damage_of,
    made_here,
    stage_snapshot,
)
from mergepipe_pipeline.snapshots.export import check_folder, check_out, refuse_full, staging_beside
from mergepipe_pipeline.snapshots.find import read_manifest
from mergepipe_pipeline.snapshots.model_folder import index_json, tool_card
from mergepipe_pipeline.snapshots.stores import Marks
from mergepipe_pipeline.storage.atomic import publish_dir, write_atomic
from mergepipe_pipeline.storage.side_files import CARD
from mergepipe_pipeline.warehouse import Warehouse

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Origin:
    """Which verb makes a result, with which parameters (plain JSON), from which inputs.

    `sources` say where each of the `inputs` lay; one that is no checkpoint has no id.
    """

    verb: str
    parameters: Mapping[str, Any]
    inputs: tuple[LineageEntry, ...]
    sources: tuple[Source, ...]

    @property
    def origin_id(self) -> str:
        """64 hex that stand for the plan."""
        inputs = [[i.role, i.name, i.content_sha256] for i in self.inputs]
        return digest_json([ENGINE_VERSION, self.verb, dict(self.parameters), inputs])


@dataclass(frozen=True)
class Made:
    """A finished result: its id, its folder, its bytes, and what the verb says of it."""

    snapshot_id: str
    path: str
    nbytes: int
    details: Mapping[str, Any]

    def summary(self) -> dict[str, Any]:
        """The figures of `--json`."""
        named = {"snapshot_id": self.snapshot_id, "path": self.path, "nbytes": self.nbytes}
        return {**named, **self.details}


class Draft:
    """A result that is being written to a folder in staging; `publish` gives it its place."""

    def __init__(
        self, folder: Path, publish: Callable[[Draft, Manifest, dict[str, Any]], Path]
    ) -> None:
        self.folder = folder
        self.objects: list[tuple[str, StoredObject]] = []
        self.side_files: dict[str, bytes] = {}
        self._publish = publish
        self._n_tensors = self._data_nbytes = 0

    def shard(
        self,
        file: str,
        tensors: Sequence[Described],
        read: Callable[[str], Bytes],
        advance: Advance = lambda nbytes: None,
    ) -> None:
        """Write a weight file; `read` gives the little-endian bytes of a tensor by its name.

        Raises StorageFullError.
        """
        with ShardWriter(self.folder / file, tensors, {"format": "pt"}) as writer:
            for name in writer.order:
                data = memoryview(read(name)).cast("B")
                writer.write(data)
                advance(data.nbytes)
                self._data_nbytes += data.nbytes
            sha256, nbytes = writer.finish()
        self.objects.append((file, StoredObject(sha256, nbytes, writer.prefix_digests)))
        self._n_tensors += len(tensors)

    def finish(self, origin: Origin, details: Mapping[str, Any]) -> Made:
        """Give the whole result its place by one rename; `details` go to its provenance.

        Raises StorageFullError, MergePipeError if something has come into its place.
        """
        origin_id = origin.origin_id
        shards = tuple(
            ShardEntry(
                file=file,
                layer=Path(file).stem,
                layer_key=digest_json([origin_id, file]),
                sha256=stored.sha256,
                nbytes=stored.nbytes,
                tensors=stored.tensors,
            )
            for file, stored in self.objects
        )
        if len(shards) > 1:
            self.side_files[INDEX] = index_json(shards, self._data_nbytes)
        card = tool_card(origin.verb, origin.parameters, origin.inputs)
        self.side_files.setdefault(CARD, card)
        side = sorted(self.side_files.items())
        manifest = Manifest(
            plan_id=origin_id,
            method=origin.verb,
            inputs=origin.inputs,
            operators=((origin.verb, "", self._n_tensors),),
            shards=shards,
            side_files=tuple(SideFile(name, sha256_hex(d), len(d)) for name, d in side),
        )
        path = self._publish(self, manifest, _provenance(origin, details))
        nbytes = sum(s.nbytes for s in shards)
        return Made(manifest.snapshot_id, str(path), nbytes, details)


def check_place(out: str | Path, warehouse: Path, again: tuple[str, str] | None = None) -> Path:
    """The absolute path of a folder for a result; nothing, or an empty folder, is there.

    Or what the verb and the input of these names, `again`, have given: a run may have been killed
    at its very end, and whether that is the same shows when it is made once more. Raises
    MergePipeError as `check_out`, and for a folder that holds another result.
    """
    chosen = check_out(out, warehouse)
    if again is None or check_folder(chosen) is None or _names(chosen) != again:
        refuse_full(chosen)
    return chosen


def _names(out: Path) -> tuple[str, ...]:
    manifest = read_manifest(out)
    return manifest.method, *(entry.name for entry in manifest.inputs)


@contextmanager
def drafted(warehouse: Warehouse, verb: str, out: Path | None) -> Iterator[Draft]:
    """A draft of a snapshot of the warehouse, or of the plain folder `out`; gone afterwards."""
    if out is None:
        warehouse.ensure()
        with staging(warehouse, verb) as folder:
            yield Draft(folder, partial(_to_warehouse, warehouse))
    else:
        with staging_beside(out) as folder:
            yield Draft(folder, partial(_to_folder, out))


def _to_warehouse(
    warehouse: Warehouse, draft: Draft, manifest: Manifest, provenance: dict[str, Any]
) -> Path:
    """Make the draft a snapshot, its weight files objects."""
    for file, stored in draft.objects:
        warehouse.objects.adopt(draft.folder / file, stored)
    staged = stage_snapshot(draft.folder, manifest, warehouse.objects, draft.side_files, provenance)
    _refuse_unreadable(staged, manifest)
    is_new = not (warehouse.snapshots / manifest.snapshot_id).exists()
    snapshot = commit_snapshot(staged, warehouse.snapshots, warehouse.new_aside)
    Marks(warehouse.stages).mark(snapshot.snapshot_id, is_stage=False, is_new=is_new)
    return Path(snapshot.path)


def _to_folder(out: Path, draft: Draft, manifest: Manifest, provenance: dict[str, Any]) -> Path:
    """Make the draft the folder `out`."""
    for name, data in draft.side_files.items():
        write_atomic(draft.folder / name, data)
    write_atomic(draft.folder / PROVENANCE, seal(provenance))
    write_atomic(draft.folder / MANIFEST, seal(manifest.to_json()))
    _refuse_unreadable(draft.folder, manifest)
    if publish_dir(draft.folder, out):
        return out
    if check_folder(out) != manifest.snapshot_id or damage_of(out, is_copy=True):
        refuse_full(out)
    return out


def _refuse_unreadable(folder: Path, manifest: Manifest) -> None:
    """Open what was written as any reader will. Raises CheckpointError."""
    open_checkpoint(str(folder), manifest.method, probes=False)


def _provenance(origin: Origin, details: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that no id covers: who, when, where, and what the verb says of its result."""
    return {
        "recipe_name": origin.verb,
        "made_by": {
            "verb": origin.verb,
            "parameters": dict(origin.parameters),
            "told": dict(details),
        },
        "sources": [asdict(s) for s in origin.sources],
        **made_here(),
    }
