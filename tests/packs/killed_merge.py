"""A process that merges and is killed at several moments; prints how often.

Run as `python -m tests.packs.killed_merge HOME RECIPE`. Imports once, then a fork for each moment.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.storage import atomic
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.warehouse import Warehouse
from tests.packs.killed import Deadly

#: Changes of the file system between two deaths.
_EVERY = 9


def killed_after(warehouse: Warehouse, recipe: Path, steps: int) -> bool:
    """Whether a merge in a process of its own came so far and was killed."""
    child = os.fork()
    if child == 0:
        atomic.crash_hook = Deadly(steps).step
        merge(warehouse, recipe, fresh=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert status == 0, f"the merge ended with {status}"
    return False


def main(home: Path, recipe: Path) -> None:
    """Kill at one moment after the other, until a merge comes to its end."""
    # A death of the process, not of the machine.
    os.fsync = os.fstat  # type: ignore[assignment]
    warehouse, steps = Warehouse.at(home), _EVERY
    text = recipe.read_text()
    merge(warehouse, parse(f"{text}seed: 1\n", name="other", where="other"))  # loads what forks use
    while killed_after(warehouse, recipe, steps):
        steps += _EVERY
    print(steps // _EVERY - 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
