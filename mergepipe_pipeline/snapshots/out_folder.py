"""Whether a folder can take an export: judged before the merge, so that no work is lost."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from mergepipe_pipeline.domain.snapshot import MANIFEST
from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.remote.address import SCHEMES
from mergepipe_pipeline.snapshots.find import read_manifest

#: As long as any name in an exported folder.
_LONGEST_NAME = "model-00000-of-00000.safetensors.index.json"


def staging_name(out: Path, run: str) -> str:
    """The name beside `out` of a folder that becomes it; `run` tells exports apart."""
    return f".{out.name}.{run}.tmp"


def check_out(out: str | Path, warehouse: Path) -> Path:
    """The absolute path of an output folder, `~` expanded, if a folder can be made there.

    Raises MergePipeError for an address, for a folder that cannot be, that is a link or the current
    one, that holds something else, or where one of it and the warehouse would be inside the other.
    Makes nothing.
    """
    if not str(out):
        raise _refused(str(out), "an empty name")
    scheme, is_after, _ = str(out).partition(":/")  # a path keeps one slash of two
    if is_after and scheme in SCHEMES:
        raise _refused(str(out), "an address: `mergepipe push` sends a snapshot there")
    try:
        path = Path(out).expanduser()
        if path.is_symlink():
            raise _refused(str(path), "a link")
        chosen, home = path.resolve(), warehouse.resolve()
        if chosen == Path.cwd():
            raise _refused(str(chosen), "the current folder")
        if chosen.is_relative_to(home) or home.is_relative_to(chosen):
            raise _refused(str(chosen), f"the warehouse at {home}, in it or around it")
        check_folder(chosen)
        _try(chosen)
    except OSError as error:
        raise _refused(str(out), error.strerror or str(error)) from error
    except RuntimeError as error:  # from pathlib, for ~ of a user that is not there, and loops
        raise _refused(str(out), str(error)) from error
    return chosen


def check_folder(out: Path) -> str | None:
    """The id of the snapshot that the folder says it holds; None if it is empty or not there.

    Raises MergePipeError if it holds anything else.
    """
    if not os.path.lexists(out):
        return None
    if out.is_dir() and not out.is_symlink():
        if not any(out.iterdir()):
            return None
        try:
            if (out / MANIFEST).is_file():  # a pipe would keep its reader waiting
                return read_manifest(out).snapshot_id
        except CorruptionError:
            pass
    is_folder = out.is_dir()
    raise MergePipeError(
        "The output folder is not empty"
        if is_folder
        else "Something else is in the output folder's place",
        where=str(out),
        expected="no such folder, an empty one, or one written by mergepipe",
        found="other files" if is_folder else "no folder",
        next_step="choose another --out" + (", or empty the folder" if is_folder else ""),
    )


def refuse_full(out: Path) -> None:
    """Raise MergePipeError for a folder that holds anything, also an earlier export."""
    if check_folder(out) is not None:
        raise MergePipeError(
            "The output folder holds a snapshot already",
            where=str(out),
            expected="no such folder, or an empty one, for shards of another size",
            found="an earlier export",
            next_step="choose another --out, or remove the folder",
        )


def _try(out: Path) -> None:
    """Make and remove a folder where the first new one would be. Raises OSError if it cannot be."""
    run = uuid.uuid4().hex[:8]
    (out.parent / staging_name(out, run) / _LONGEST_NAME).exists()  # raises for names too long
    (out / _LONGEST_NAME).exists()
    above = out.parent
    while not above.exists():
        above = above.parent
    for part in out.relative_to(above).parts:
        (above / part).exists()
    probe = above / staging_name(out, run)
    probe.mkdir()
    probe.rmdir()


def _refused(where: str, found: str) -> MergePipeError:
    return MergePipeError(
        "The output folder cannot be there",
        where=f"--out {where}".rstrip(),
        expected="a folder of its own that can be made, outside the warehouse, by no link",
        found=found,
        next_step="choose another --out; nothing was merged",
    )
