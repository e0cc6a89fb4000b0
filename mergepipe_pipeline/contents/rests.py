"""Names the damaged file beside a pack, where an expert that is away does not read as it should.

A reader of such an expert knows only the names of its own files, and its errors say to copy these
again. The damaged file may be the rest of one of them, beside the pack. Rests are checked only
after an error: one may be as long as the expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mergepipe_pipeline.domain.checkpoint import AWAY
from mergepipe_pipeline.errors import CheckpointError, CorruptionError
from mergepipe_pipeline.packs.replaced import came_back
from mergepipe_pipeline.warehouse import Warehouse

#: The root of a checkpoint that is away, in the place that an error names.
_ROOT = re.compile(re.escape(AWAY) + r"(.+?/[0-9a-f]{24})(?![0-9a-f])")


@contextmanager
def damaged_rest_named() -> Iterator[None]:
    """Raise CorruptionError naming a damaged rest, instead of an error about what it gives."""
    try:
        yield
    except (CheckpointError, CorruptionError) as error:
        match = _ROOT.search(error.where or "")
        if match:
            refuse_damaged_rest(Path(match[1]), error)
        raise


def refuse_damaged_rest(folder: Path, cause: Exception | None = None) -> None:
    """Raise CorruptionError if a rest in the folder of a record is not what was written.

    Raises CheckpointError if there is no record: the files came back meanwhile.
    """
    store = Warehouse(folder.parents[1]).replaced
    record = store.find(folder.name)
    if record is None:
        raise came_back(folder) from cause
    try:
        store.refuse_damaged_rest(record)
    except CorruptionError as damaged:
        raise damaged from cause
