"""The stored figures of this machine, one sealed file: read by planning, written by `calibrate`."""

from __future__ import annotations

from pathlib import Path

from mergepipe_pipeline.digest import seal, unseal
from mergepipe_pipeline.domain.machine_profile import MachineProfile
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.storage.atomic import write_atomic


def load_profile(path: Path) -> MachineProfile | None:
    """The profile at `path`; None if there is none. Raises CorruptionError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return MachineProfile.from_json(unseal(data, str(path))["storage"])
    except (KeyError, TypeError) as error:
        raise CorruptionError(
            "A storage profile has another form than this version writes",
            where=str(path),
            found=str(error),
            next_step="run `mergepipe calibrate` again",
        ) from error


def store_profile(path: Path, profile: MachineProfile) -> None:
    """Write a profile in place of the one at `path`. Raises StorageFullError."""
    write_atomic(path, seal({"storage": profile.to_json()}))
