"""The error for a pack that is not as it was written."""

from __future__ import annotations

from pathlib import Path

from mergepipe_pipeline.errors import CorruptionError

#: The next step that brings a damaged pack back.
REMADE = (
    "copy the original back first if it is in cold storage; then run `mergepipe repair`, and "
    "`mergepipe pack` again; where the original is there, `--no-packs` reads it until then"
)


def damaged_pack(path: Path, expected: str, found: str) -> CorruptionError:
    """The error for a pack that is not as it was written."""
    return CorruptionError(
        "A pack was changed after it was written",
        where=str(path),
        expected=expected,
        found=found,
        next_step=REMADE,
    )
