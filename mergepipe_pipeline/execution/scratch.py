"""An empty warehouse for a merge that is made anew: it is kept, or it goes at the end."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mergepipe_pipeline.errors import MergePipeError, StorageFullError
from mergepipe_pipeline.execution.plan_leases import staging
from mergepipe_pipeline.text import size
from mergepipe_pipeline.warehouse import Warehouse


@contextmanager
def scratch(warehouse: Warehouse, keep: Path | None, nbytes: int) -> Iterator[Warehouse]:
    """A new warehouse with room for a result of so many bytes.

    It is the folder `keep`, which stays; else one in staging, which goes at the end. Where the
    warehouse cannot be written, that one is made where TMPDIR says, and nothing is leased.

    Raises MergePipeError for a folder that cannot be `keep`, StorageFullError without room.
    """
    if keep is not None:
        _refuse(warehouse, keep)
        kept_warehouse = Warehouse.at(keep).ensure()
        _refuse_full_disk(kept_warehouse.root, nbytes, "free space, or choose another --keep")
        yield kept_warehouse
    elif _may_write(warehouse):
        with staging(warehouse, "replay") as folder:
            _refuse_full_disk(folder, nbytes, "free space, or say with --keep where there is room")
            yield Warehouse.at(folder).ensure()
    else:
        with _temporary() as folder:
            _refuse_full_disk(
                folder,
                nbytes,
                "the warehouse cannot be written, so set TMPDIR to a folder with room, or say with "
                "--keep where there is some",
            )
            yield Warehouse.at(folder).ensure()


def _may_write(warehouse: Warehouse) -> bool:
    """Whether a folder in staging can be made and leased."""
    return all(os.access(f, os.W_OK | os.X_OK) for f in (warehouse.staging, warehouse.leases_dir))


@contextmanager
def _temporary() -> Iterator[Path]:
    try:
        temporary = tempfile.TemporaryDirectory(
            prefix="mergepipe-replay-", ignore_cleanup_errors=True
        )
    except OSError as error:
        raise MergePipeError(
            "There is no place for a replay",
            where=f"the warehouse, which cannot be written, and {tempfile.tempdir or 'TMPDIR'}",
            expected="a folder that can be written",
            found=error.strerror or str(error),
            next_step="set TMPDIR to a folder with room, or say with --keep where there is some",
        ) from error
    with temporary as folder:
        yield Path(folder)


def _refuse(warehouse: Warehouse, keep: Path) -> None:
    if keep.expanduser().resolve().is_relative_to(warehouse.root):
        raise MergePipeError(
            "The folder for a replay lies inside the warehouse",
            where=str(keep),
            expected=f"a folder outside {warehouse.root}",
            next_step="choose another --keep",
        )
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise MergePipeError(
            "The folder for a replay is not empty",
            where=str(keep),
            expected="no such folder, or an empty one",
            next_step="choose another --keep",
        )


def _refuse_full_disk(folder: Path, nbytes: int, next_step: str) -> None:
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise StorageFullError(
            "There is no room for a replay",
            where=str(folder),
            expected=f"{size(nbytes)} free, as much as the result that is made again",
            found=size(free),
            next_step=next_step,
        )
