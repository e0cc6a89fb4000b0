"""What the verbs lease while they work: a plan's layers, the results it reads, a recipe's turn.

A run has a lease, too: `run_lives` tells whether its process still lives. `staging` and `scratch`
are the folders that work happens in.
"""

from __future__ import annotations

import atexit
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from mergepipe_pipeline.domain.plan import LayerTask, MergePlan
from mergepipe_pipeline.errors import BusyError, MergePipeError, StorageFullError
from mergepipe_pipeline.snapshots.leases import Need
from mergepipe_pipeline.storage.atomic import full_disk_named, locked_file, remove_tree, turn
from mergepipe_pipeline.storage.locks import claimed, is_held, this_process
from mergepipe_pipeline.text import size
from mergepipe_pipeline.warehouse import Warehouse

_FREE_SPACE = (
    "free space and run the same command again; `mergepipe gc --older-than 0` removes what no "
    "snapshot needs"
)
_until_exit = ExitStack()
atexit.register(_until_exit.close)


def lease(warehouse: Warehouse, plan: MergePlan) -> AbstractContextManager[str]:
    """Keep what a plan needs, and its own snapshot, until the context ends."""
    return warehouse.leases.hold(need_of(warehouse, plan))


def lease_until_exit(warehouse: Warehouse, plan: MergePlan) -> None:
    """Keep a stage's result for the plans after it, which this process makes and merges."""
    _until_exit.enter_context(warehouse.leases.hold(need_of(warehouse, plan), "stage"))


def need_of(warehouse: Warehouse, plan: MergePlan) -> Need:
    """A plan's layers, the snapshot it gives, and the snapshots and packs here that it reads."""
    return Need(
        frozenset(layer.layer_key for layer in plan.layers),
        frozenset([plan.plan_id]),
        frozenset(
            path.relative_to(warehouse.snapshots).parts[0]
            for path in (Path(source.root) for source in plan.sources)
            if path.is_relative_to(warehouse.snapshots) and path != warehouse.snapshots
        ),
        frozenset(pack.pack_id for pack in plan.packs),
    )


def lease_run(warehouse: Warehouse, run_id: str) -> AbstractContextManager[None]:
    """Say until the context ends that the process of this run lives. It keeps nothing else."""
    path = warehouse.leases_dir / f"run-{run_id}-{_process()}.json"
    return locked_file(path, Need().sealed())


def run_lives(warehouse: Warehouse, run_id: str) -> bool | None:
    """Whether a process of the run lives; None if it has no lease.

    True where the file system has no locks: nobody can know.
    """
    lives = None
    for path in warehouse.leases_dir.glob(f"run-{run_id}-*.json"):
        if is_held(path) is not False:
            return True
        if path.exists():  # else it has just ended well
            lives = False
    return lives


@contextmanager
def lease_layers(warehouse: Warehouse, layers: Iterable[LayerTask]) -> Iterator[None]:
    """Merge these layers alone, until the context ends.

    Waits while another process merges one of them; what that has finished is known then, even if it
    was killed. All take their turns in one order, so that no two wait for each other.
    """
    with ExitStack() as stack:
        for layer in sorted(layers, key=lambda x: x.action_key):
            path = warehouse.leases_dir / f"layer-{layer.action_key}.json"
            stack.enter_context(turn(path, Need(frozenset([layer.layer_key])).sealed()))
        yield


@contextmanager
def lease_recipe(warehouse: Warehouse, recipe: str, *, shared: bool = False) -> Iterator[None]:
    """Work alone on what is current of a recipe, until the context ends.

    Or `shared`, with others who only read what is current. Raises BusyError at once, if somebody
    works on it alone already: to wait would take a place from a run that can work. It says who.
    Raises StorageFullError.
    """
    path = warehouse.leases_dir / f"recipe-{recipe}.lock"
    with ExitStack() as stack:
        with full_disk_named(path):
            holder = stack.enter_context(claimed(path, _myself(warehouse).encode(), shared=shared))
        if holder is not None:
            raise BusyError(
                "Somebody else works on this recipe",
                where=recipe,
                found=holder.decode(errors="replace"),
                next_step="let it end; then run this again, if the release is not current yet",
            )
        yield


def _myself(warehouse: Warehouse) -> str:
    """This process for people, with the run that it executes, if it does."""
    leases = warehouse.leases_dir.glob(f"run-*-{_process()}.json")
    runs = sorted(p.name.removeprefix("run-")[:8] for p in leases)
    run = f"run {', '.join(runs)}, " if runs else ""
    return run + this_process()


def _process() -> str:
    """This process among those of all machines that share the warehouse, as part of a name."""
    return f"{re.sub(r'[^A-Za-z0-9.]', '_', platform.node())}-{os.getpid()}"


@contextmanager
def staging(warehouse: Warehouse, label: str) -> Iterator[Path]:
    """A fresh folder in staging, leased under its own name, gone when the context ends."""
    with warehouse.leases.hold(Need(), label) as name:
        path = warehouse.staging / name
        path.mkdir(parents=True)
        try:
            yield path
        finally:
            remove_tree(path)


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
        refuse_full_disk(kept_warehouse.root, nbytes, "free space, or choose another --keep")
        yield kept_warehouse
    elif _may_write(warehouse):
        with staging(warehouse, "replay") as folder:
            refuse_full_disk(folder, nbytes, "free space, or say with --keep where there is room")
            yield Warehouse.at(folder).ensure()
    else:
        with _temporary() as folder:
            refuse_full_disk(
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


def refuse_full_disk(folder: Path, nbytes: int, next_step: str = _FREE_SPACE) -> None:
    """Raise StorageFullError if a result of so many bytes has no room, before any is written."""
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise StorageFullError(
            "The disk has no room for the result",
            where=str(folder),
            expected=f"{size(nbytes)} free",
            found=size(free),
            next_step=next_step,
        )
