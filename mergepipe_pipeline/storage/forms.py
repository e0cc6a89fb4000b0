"""The forms of sealed JSON that somebody else may have written: every leaf has a type and a bound.

A seal shows that a file is whole, not who wrote it. A form is a model of pydantic, or a dataclass;
what passes is what this release writes, in every leaf.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from mergepipe_pipeline.digest import canonical_json, seal, unseal
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.storage.atomic import write_atomic
from mergepipe_pipeline.storage.chain import NAME
from mergepipe_pipeline.storage.json_text import parse_json

_LOG = logging.getLogger("mergepipe")
#: Far above a manifest of a hundred thousand tensors.
MAX_NBYTES = 32 << 20
_LONGEST_NAME_NBYTES, _LONGEST_PATH_NBYTES, _LONGEST_TEXT = 255, 4000, 1 << 20
_SHOWN_CHARS = 80

T = TypeVar("T")


class Form(BaseModel):
    """A JSON object with these keys and no others."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


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


Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
SnapshotId = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
CheckpointId = Annotated[str, Field(pattern="^[0-9a-f]{24}$")]
Size = Annotated[int, Field(ge=0, lt=1 << 53)]
Time = Annotated[int, Field(gt=-(1 << 62), lt=1 << 62)]
Text = Annotated[str, Field(max_length=_LONGEST_TEXT)]
Number = Annotated[float, Field(gt=-1e300, lt=1e300)]
Registered = Annotated[str, Field(pattern=NAME.pattern)]
PlainName = Annotated[str, AfterValidator(_plain_name)]
SideName = Annotated[str, AfterValidator(_side_name)]
PathBelow = Annotated[str, AfterValidator(_path_below)]


def read_form(
    form: type[T], data: bytes, where: str, what: str, next_step: str
) -> tuple[T, dict[str, Any]]:
    """The object and the plain value in sealed bytes; `what` leads the error ("A manifest").

    Raises CorruptionError naming the key for what is not of the form.
    """
    if len(data) > MAX_NBYTES:
        raise _other(what, where, f"{len(data)} bytes, more than {MAX_NBYTES}", next_step)
    value = unseal(data, where, parse_json)
    return check_form(form, value, where, what, next_step), value


def check_form(form: type[T], value: Any, where: str, what: str, next_step: str) -> T:
    """The object of a JSON value; raises as `read_form`."""
    kind: Any = form
    try:
        found: T = _adapter(kind).validate_json(canonical_json(value), strict=True)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        shown, key = repr(first["input"])[:_SHOWN_CHARS], ".".join(map(str, first["loc"]))
        raise _other(what, where, f"{key}: {first['msg']}, not {shown}", next_step) from invalid
    return found


def record_of(kind: type[T], value: Any) -> T:
    """The dataclass of which `value` is the `asdict` or the JSON; lists become tuples again.

    Raises ValueError for what is none, also for one with further keys.
    """
    form: Any = kind
    (found,) = _exact(form).validate_python((value,))
    record: T = found
    return record


def keep_record(path: Path, record: Any) -> None:
    """Write a dataclass as a sealed file, in place of an older one. Raises StorageFullError."""
    write_atomic(path, seal(asdict(record)))


def kept_record(path: Path, kind: type[T]) -> T | None:
    """The record in a sealed file; None where there is none, or, with a warning, it is damaged."""
    try:
        return record_of(kind, unseal(path.read_bytes(), str(path)))
    except FileNotFoundError:
        return None
    except (CorruptionError, ValueError) as error:
        _LOG.warning("%s", error)
        return None


@cache
def _exact(form: Any) -> TypeAdapter[Any]:
    # Dataclasses in a container take the container's settings, all the way down.
    return TypeAdapter(tuple[form], config=ConfigDict(extra="forbid"))


@cache
def _adapter(form: Any) -> TypeAdapter[Any]:
    return TypeAdapter(form)


def _other(what: str, where: str, found: str, next_step: str) -> CorruptionError:
    return CorruptionError(
        f"{what} has another form than this version writes",
        where=where,
        found=found,
        next_step=next_step,
    )
