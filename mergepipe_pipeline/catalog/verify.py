"""Whether a catalog file is as it was written, whatever it holds; changes and says nothing."""

from __future__ import annotations

from pathlib import Path

from mergepipe_pipeline.catalog.row_groups import RowGroups
from mergepipe_pipeline.catalog.seals import damaged, name_parts, readable, seal_of
from mergepipe_pipeline.errors import CorruptionError


def verify_sealed(path: Path) -> None:
    """Check every byte of a file of facts. Raises CorruptionError, with the part if it has any."""
    _, seal = name_parts(path)
    with readable(path):
        found = seal_of(path.read_bytes())
    if found == seal:
        return
    try:
        groups = RowGroups(path, None)
    except CorruptionError:  # a file that is read in parts has another seal, and this has neither
        raise damaged(path, f"BLAKE3 {seal}", found) from None
    with groups as file:
        for key in file.keys:
            file.read(key)
