"""Reads sealed JSON that somebody else may have written: every leaf has a type and a bound.

A seal shows that a file is whole, not who wrote it. A form is a dataclass, or a model of pydantic,
with the types of `domain.bounds`; what passes is what this release writes, in every leaf.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from mergepipe_pipeline.digest import canonical_json, seal, unseal
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.storage.atomic import write_atomic
from mergepipe_pipeline.storage.json_text import parse_json

_LOG = logging.getLogger("mergepipe")
#: Far above a manifest of a hundred thousand tensors.
MAX_NBYTES = 32 << 20
_SHOWN_CHARS = 80

T = TypeVar("T")


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
        (found,) = _adapter(kind).validate_json(canonical_json([value]), strict=True)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        shown, key = repr(first["input"])[:_SHOWN_CHARS], ".".join(map(str, first["loc"][1:]))
        raise _other(what, where, f"{key}: {first['msg']}, not {shown}", next_step) from invalid
    record: T = found
    return record


def record_of(kind: type[T], value: Any) -> T:
    """The dataclass of which `value` is the `asdict` or the JSON; lists become tuples again.

    Raises ValueError for what is none, also for one with further keys.
    """
    form: Any = kind
    (found,) = _adapter(form).validate_python((value,))
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
def _adapter(form: Any) -> TypeAdapter[Any]:
    # Dataclasses in a container take the container's settings, all the way down.
    return TypeAdapter(tuple[form], config=ConfigDict(extra="forbid"))


def _other(what: str, where: str, found: str, next_step: str) -> CorruptionError:
    return CorruptionError(
        f"{what} has another form than this version writes",
        where=where,
        found=found,
        next_step=next_step,
    )
