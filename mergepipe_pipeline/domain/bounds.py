"""What texts and numbers of records may be that somebody else may have written.

The types say nothing where a record is made; `storage.forms` holds what is read against them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Annotated, Any

#: What a chain of versions, and so a registered name, may be called.
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
#: The form of NAME, for people.
NAME_FORM = "up to 128 of a-z, A-Z, 0-9, '.', '_' and '-', a letter or digit first"
_LONGEST_NAME_NBYTES, _LONGEST_PATH_NBYTES, _LONGEST_TEXT = 255, 4000, 1 << 20
#: Above every side file: modules of sentence-transformers and tokenizers are the largest.
_MOST_SIDE_NBYTES = 256 << 20


class Bound:
    """Limits by the names that pydantic has for them, and a check that raises ValueError."""

    def __init__(self, check: Callable[[Any], Any] | None = None, **limits: object) -> None:
        self._check, self._limits = check, limits

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """The type's schema with the limits, and followed by the check."""
        schema = {**handler(source), **self._limits}
        if self._check is None:
            return schema
        check = {"type": "no-info", "function": self._check}
        return {"type": "function-after", "function": check, "schema": schema}


def _plain_name(name: str) -> str:
    """A name that a file has in its folder itself, and that can be shown."""
    if name in ("", ".", "..") or "/" in name or not name.isprintable():
        raise ValueError("expected a name in its folder")
    if len(name.encode()) > _LONGEST_NAME_NBYTES:
        raise ValueError(f"expected at most {_LONGEST_NAME_NBYTES} bytes")
    return name


def _path_below(path: str) -> str:
    """A path that stays below the folder that it is relative to, in its one spelling."""
    parts = PurePosixPath(path).parts
    if path != str(PurePosixPath(*parts)) or path.startswith("/") or "\0" in path:
        raise ValueError("expected a path below its folder")
    if ".." in parts or len(path.encode()) > _LONGEST_PATH_NBYTES:
        raise ValueError("expected a path below its folder")
    if any(len(part.encode()) > _LONGEST_NAME_NBYTES for part in parts):
        raise ValueError(f"expected names of at most {_LONGEST_NAME_NBYTES} bytes")
    return path


def _side_name(path: str) -> str:
    """A name in a folder, or in a folder of that, as those of sentence-transformers."""
    for part in path.split("/", 1):
        _plain_name(part)
    return path


Sha256 = Annotated[str, Bound(pattern="^[0-9a-f]{64}$")]
SnapshotId = Annotated[str, Bound(pattern="^[0-9a-f]{32}$")]
CheckpointId = Annotated[str, Bound(pattern="^[0-9a-f]{24}$")]
Size = Annotated[int, Bound(ge=0, lt=1 << 53)]
SideSize = Annotated[int, Bound(ge=0, le=_MOST_SIDE_NBYTES)]
Time = Annotated[int, Bound(gt=-(1 << 62), lt=1 << 62)]
Text = Annotated[str, Bound(max_length=_LONGEST_TEXT)]
Number = Annotated[float, Bound(gt=-1e300, lt=1e300)]
Registered = Annotated[str, Bound(pattern=NAME.pattern)]
PlainName = Annotated[str, Bound(_plain_name)]
SideName = Annotated[str, Bound(_side_name)]
PathBelow = Annotated[str, Bound(_path_below)]
