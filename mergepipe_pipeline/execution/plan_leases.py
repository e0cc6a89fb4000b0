"""What the verbs lease while they work: a plan's layers, the results it reads, a recipe's turn.

A run has a lease, too: `run_lives` tells whether its process still lives.
"""

from __future__ import annotations

import atexit
import os
import platform
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from mergepipe_pipeline.digest import seal
from mergepipe_pipeline.errors import BusyError
from mergepipe_pipeline.snapshots.leases import Need
from mergepipe_pipeline.spec.plan import MergePlan
from mergepipe_pipeline.storage.atomic import locked_file, remove_tree
from mergepipe_pipeline.storage.locks import claimed, is_held
from mergepipe_pipeline.warehouse import Warehouse

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
    nothing: dict[str, list[str]] = {"layer_keys": [], "plan_ids": [], "snapshot_ids": []}
    return locked_file(warehouse.leases_dir / f"run-{run_id}-{os.getpid()}.json", seal(nothing))


def run_lives(warehouse: Warehouse, run_id: str) -> bool | None:
    """Whether a process of the run lives; None if it has no lease.

    True where the file system has no locks: nobody can know.
    """
    found = None
    for path in warehouse.leases_dir.glob(f"run-{run_id}-*.json"):
        if is_held(path) is not False:
            return True
        if path.exists():  # else it has just ended well
            found = False
    return found


@contextmanager
def lease_recipe(warehouse: Warehouse, recipe: str) -> Iterator[None]:
    """Work alone on what is current of a recipe, until the context ends.

    Raises BusyError at once, if somebody does so already: to wait would take a place from a run
    that can work. It says who.
    """
    with claimed(
        warehouse.leases_dir / f"recipe-{recipe}.lock", _myself(warehouse).encode()
    ) as other:
        if other is not None:
            raise BusyError(
                "Somebody else works on this recipe",
                where=recipe,
                found=other.decode(errors="replace"),
                next_step="let it end; then run this again, if the release is not current yet",
            )
        yield


def _myself(warehouse: Warehouse) -> str:
    """This process for people, with the run that it executes, if it does."""
    process = os.getpid()
    runs = [
        p.name.removeprefix("run-")[:8] for p in warehouse.leases_dir.glob(f"run-*-{process}.json")
    ]
    run = f"run {', '.join(runs)}, " if runs else ""
    return f"{run}process {process} on {platform.node()} since {time.strftime('%F %T')}"


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
