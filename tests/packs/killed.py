"""A process that packs and is killed at several moments; prints what each death left.

Run as `python -m tests.packs.killed FOLDER`. Imports once, then a fork for each moment.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mergepipe_pipeline.progress import Advance
from mergepipe_pipeline.storage import atomic
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.warehouse import Warehouse
from tests.packs.models import warehouse_of


class Deadly:
    """Progress that ends the process, as kill -9 does, when `left` steps are done."""

    def __init__(self, left: int) -> None:
        self._left = left

    @contextmanager
    def task(self, label: str, total_nbytes: int) -> Iterator[Advance]:
        """Count the steps of the packing alone."""
        yield self.step if label.startswith("pack ") else lambda nbytes: None

    def warn(self, *warnings: str) -> None:
        """Say nothing."""

    def step(self, _: object) -> None:
        """One step: a run of chunks that is written, or a change of the file system."""
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def killed_after(warehouse: Warehouse, steps: int) -> bool:
    """Whether a packing in a process of its own came so far and was killed."""
    child = os.fork()
    if child == 0:
        deadly = Deadly(steps)
        atomic.crash_hook = deadly.step
        pack(warehouse, ["e0"], progress=deadly)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def main(tmp: Path) -> None:
    """Kill at one moment after the other, until a packing comes to its end."""
    # A death of the process, not of the machine.
    os.fsync = os.fstat  # type: ignore[assignment]
    warehouse, steps = warehouse_of(tmp, experts=2), 4
    analyze(warehouse)
    pack(warehouse, ["e1"])  # so that a fork has nothing to load
    while killed_after(warehouse, steps):
        for pack_id in warehouse.packs.ids():  # published: then it is whole
            list(warehouse.packs.open(pack_id).tensors.values())
        print(steps, len(warehouse.packs.ids()), len(list(warehouse.staging.iterdir())))
        steps += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
