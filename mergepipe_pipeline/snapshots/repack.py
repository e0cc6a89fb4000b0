"""A snapshot's weights in shards of another size: one file per layer becomes files of a size.

Tensors keep their order and their bytes, which are compared with the manifest as they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mergepipe_pipeline.checkpoints.open_checkpoint import INDEX, open_checkpoint
from mergepipe_pipeline.checkpoints.reader import BlockReader
from mergepipe_pipeline.checkpoints.writer import ShardWriter
from mergepipe_pipeline.digest import sha256_hex
from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.domain.snapshot import Manifest, ShardEntry, SideFile, Snapshot
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.snapshots.model_folder import index_json, shard_name
from mergepipe_pipeline.storage.atomic import write_atomic
from mergepipe_pipeline.storage.hashing import file_sha256
from mergepipe_pipeline.storage.source import open_source

_SINGLE = "model.safetensors"
_PIECE_ELEMS = 1 << 22


def repack(snapshot: Snapshot, folder: Path, shard_nbytes: int | None) -> Manifest:
    """Write a snapshot's weights to `folder` in shards of at most `shard_nbytes`; None: in one.

    A tensor larger than that has a shard of its own. Returns the manifest of what was written: of
    one file there is no index. Raises CorruptionError for a damaged file, StorageFullError.
    """
    checkpoint = open_checkpoint(snapshot.path, snapshot.snapshot_id[:12], probes=False)
    for shard in snapshot.manifest.shards:
        if (digest := file_sha256(Path(snapshot.path) / shard.file)) != shard.sha256:
            raise CorruptionError(
                "A file of the snapshot is damaged, and nothing was written",
                where=f"{snapshot.path}/{shard.file}",
                expected=f"sha256 {shard.sha256[:16]}",
                found=f"sha256 {digest[:16]}",
                next_step="run `mergepipe repair`, or merge its recipe again",
            )
    groups = list(_groups(checkpoint.tensors, shard_nbytes))
    shards = []
    with open_source(snapshot.path) as source:
        reader = BlockReader(source, checkpoint, None)
        for number, group in enumerate(groups, 1):
            name = _SINGLE if len(groups) == 1 else shard_name(number, len(groups))
            shards.append(_write(reader, group, folder, name))
    sides = [s for s in snapshot.manifest.side_files if s.file != INDEX]
    if len(groups) > 1:
        raw = index_json(shards, checkpoint.nbytes)
        write_atomic(folder / INDEX, raw)
        sides.append(SideFile(INDEX, sha256_hex(raw), len(raw)))
    old = snapshot.manifest
    return Manifest(
        old.plan_id,
        old.method,
        old.inputs,
        old.operators,
        tuple(shards),
        tuple(sorted(sides, key=lambda s: s.file)),
    )


def _groups(tensors: Sequence[TensorEntry], most: int | None) -> Iterator[list[TensorEntry]]:
    """Tensors that follow each other, as many as fit."""
    group: list[TensorEntry] = []
    nbytes = 0
    for tensor in tensors:
        if group and most is not None and nbytes + tensor.nbytes > most:
            yield group
            group, nbytes = [], 0
        group.append(tensor)
        nbytes += tensor.nbytes
    yield group


def _write(
    reader: BlockReader, group: Sequence[TensorEntry], folder: Path, name: str
) -> ShardEntry:
    by_name = {t.name: t for t in group}
    described = [(t.name, t.dtype, t.shape) for t in group]
    with ShardWriter(folder / name, described, {"format": "pt"}) as writer:
        for tensor in map(by_name.__getitem__, writer.order):
            size = tensor.nbytes // max(1, tensor.numel)
            for start in range(0, tensor.numel, _PIECE_ELEMS):
                stop = min(tensor.numel, start + _PIECE_ELEMS)
                piece = memoryview(bytearray((stop - start) * size))
                reader.read_into(tensor, start, stop, piece)
                writer.write(piece)
        sha256, nbytes = writer.finish()
    digests = tuple(writer.prefix_digests)
    return ShardEntry(name, name, sha256, sha256, nbytes, digests)
