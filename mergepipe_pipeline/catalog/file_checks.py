"""Whether a catalog file is as it was written, whatever it holds; changes nothing."""

from __future__ import annotations

from pathlib import Path

from mergepipe_pipeline.catalog.row_groups import RowGroups
from mergepipe_pipeline.catalog.seals import damaged, is_sealed, name_parts, warn_once
from mergepipe_pipeline.errors import CorruptionError


def verify_sealed(path: Path) -> None:
    """Check every byte of a file of facts. Raises CorruptionError, with the part if it has any."""
    if is_sealed(path):
        return
    try:
        groups = RowGroups(path, None)
    except CorruptionError:  # a file that is read in parts has another seal, and this has neither
        raise damaged(path, f"BLAKE3 {name_parts(path)[1]}", "another") from None
    with groups as file:
        for key in file.keys:
            file.read(key)


def is_good(path: Path) -> bool:
    """Whether a file of facts is as it was written; says it if not, and leaves it."""
    try:
        verify_sealed(path)
    except FileNotFoundError:
        return False
    except CorruptionError as error:
        warn_once(path, error)
        return False
    return True
