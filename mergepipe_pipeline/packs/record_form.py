"""The form of the record of an expert whose files are away, made here or by anybody."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mergepipe_pipeline.storage.forms import (
    CheckpointId,
    Form,
    PathBelow,
    Registered,
    Sha256,
    Size,
    Text,
    Time,
    read_form,
)


class _FileForm(Form):
    path: PathBelow
    nbytes: Size
    mtime_ns: Time
    sha256: Sha256
    tensors: tuple[tuple[Text, Size, Size], ...]
    rest_sha256: Sha256 | Literal[""] = ""
    mode: int | None = Field(default=None, ge=0, le=0o7777)


class _FolderForm(Form):
    path: PathBelow
    mode: int = Field(ge=0, le=0o7777)


class RecordForm(Form):
    """`Replaced` as JSON, of this machine or of another one."""

    checkpoint_id: CheckpointId
    name: Registered
    root: Text
    cold: Text
    base: Registered
    pack_id: Sha256
    files: tuple[_FileForm, ...]
    folders: tuple[_FolderForm, ...] = ()


def checked_record(data: bytes, where: str) -> dict[str, Any]:
    """The value of the record in a file's bytes. Raises CorruptionError."""
    form, _ = read_form(RecordForm, data, where, "The record of an expert that was moved away", "")
    return form.model_dump()
