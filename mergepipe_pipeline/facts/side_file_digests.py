"""Whether files beside weights are those that were registered: tokenizers, configs, templates.

A file with another size or time is a new version, which the next registration records. A file that
differs under the same size and time is damaged, and its bytes go into no result.
"""

from __future__ import annotations

from collections.abc import Iterable

from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.storage.side_files import SideStamp, gone, side_sha256, side_stamps
from mergepipe_pipeline.storage.source import open_source
from mergepipe_pipeline.warehouse import Warehouse


def refuse_changed_file(
    warehouse: Warehouse, checkpoint_id: str, root: str, stamp: SideStamp, sha256: str
) -> None:
    """Raise CorruptionError if a side file that was read is not what was registered as this."""
    recorded = warehouse.catalog.side_digests(checkpoint_id).get(stamp, sha256)
    if recorded != sha256:
        raise CorruptionError(
            "A file's bytes are not those that were registered, though size and time are",
            where=f"{root}, {stamp.file}",
            expected=f"sha256 {recorded[:16]}",
            found=f"sha256 {sha256[:16]}",
            next_step="copy the file again; if the change is meant, `touch` it, and run again",
        )


def missing_files(warehouse: Warehouse, checkpoint_id: str, there: Iterable[str]) -> list[str]:
    """Side files of a checkpoint that are not `there` and were when it was registered; sorted."""
    recorded = warehouse.catalog.side_digests(checkpoint_id)
    return sorted({s.file for s in recorded if gone(s.file) not in recorded}.difference(there))


def refuse_changed_files(warehouse: Warehouse, checkpoint: Checkpoint) -> None:
    """Raise CorruptionError if a side file of a checkpoint is not what was registered as it."""
    with open_source(checkpoint.root) as source:
        for stamp in side_stamps(source, checkpoint.root):
            sha256 = side_sha256(source, stamp)
            refuse_changed_file(warehouse, checkpoint.checkpoint_id, checkpoint.root, stamp, sha256)
