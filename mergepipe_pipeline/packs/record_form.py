"""The form of the record of an expert whose files are away, made here or by anybody."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mergepipe_pipeline.packs.replaced import MovedFile, MovedFolder, Replaced
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

    @property
    def record(self) -> Replaced:
        """The record, as the rest of the code has it."""
        value = self.model_dump()
        files = tuple(MovedFile(**file) for file in value.pop("files"))
        folders = tuple(MovedFolder(**folder) for folder in value.pop("folders"))
        return Replaced(**value, files=files, folders=folders)


def record_in(data: bytes, where: str) -> Replaced:
    """The record in a file's bytes. Raises CorruptionError."""
    form, _ = read_form(RecordForm, data, where, "The record of an expert that was moved away", "")
    return form.record
