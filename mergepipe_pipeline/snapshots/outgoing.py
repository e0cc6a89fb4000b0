"""The files of a snapshot as they go to an address: those of `--out`, in an order for readers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mergepipe_pipeline.checkpoints.open_checkpoint import INDEX
from mergepipe_pipeline.digest import seal, sha256_hex
from mergepipe_pipeline.domain.snapshot import MANIFEST, PROVENANCE, Manifest, Snapshot
from mergepipe_pipeline.remote.outgoing import OutgoingFile
from mergepipe_pipeline.snapshots.folder_export import exported_provenance, recipe_of
from mergepipe_pipeline.snapshots.model_folder import RECIPE_FILE, exported_card, has_own_card
from mergepipe_pipeline.storage.side_files import CARD, CONFIG

#: What readers open first, in the order in which it is made.
FIRST_OPENED = (CONFIG, INDEX)


def outgoing_files(
    snapshot: Snapshot, evaluations: Sequence[Mapping[str, Any]], *, with_provenance: bool
) -> tuple[OutgoingFile, ...]:
    """The manifest, then weights and side files, then what readers open first.

    The card is that of `--out`. Provenance and recipe, which name folders
    of this machine, go only `with_provenance`. Raises CorruptionError.
    """
    files = {file.name: file for file in _files(snapshot, evaluations, with_provenance)}
    last = [files.pop(name) for name in FIRST_OPENED if name in files]
    return (files.pop(MANIFEST), *files.values(), *last)


def files_named(manifest: Manifest) -> list[str]:
    """The files of a pushed snapshot, by its manifest."""
    own = [MANIFEST, PROVENANCE, RECIPE_FILE]
    return [*own, *(s.file for s in manifest.shards), *(f.file for f in manifest.side_files)]


def _files(
    snapshot: Snapshot, evaluations: Sequence[Mapping[str, Any]], with_provenance: bool
) -> Iterator[OutgoingFile]:
    manifest, folder = snapshot.manifest, Path(snapshot.path)
    yield _made(MANIFEST, seal(manifest.to_json()))
    for shard in manifest.shards:
        yield OutgoingFile(shard.file, shard.sha256, shard.nbytes, folder / shard.file)
    provenance = exported_provenance(folder, evaluations)
    for side in manifest.side_files:
        if side.file == CARD and has_own_card(provenance):
            yield _made(CARD, exported_card((folder / CARD).read_bytes(), provenance))
        else:
            yield OutgoingFile(side.file, side.sha256, side.nbytes, folder / side.file)
    if with_provenance:
        yield _made(PROVENANCE, seal(provenance))
        yield _made(RECIPE_FILE, recipe_of(provenance))


def _made(name: str, data: bytes) -> OutgoingFile:
    return OutgoingFile(name, sha256_hex(data), len(data), data)
