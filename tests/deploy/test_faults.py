"""Whose fault a failure is, by the errors that the real storage, network and parsers give."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from dagster._utils.error import serializable_error_info_from_exc_info

from mergepipe_pipeline.deploy.retry import Fault, fault_of, fault_of_exception
from mergepipe_pipeline.errors import (
    BusyError,
    CheckpointError,
    CorruptionError,
    DamagedLayerError,
    InputChangedError,
    MergePipeError,
    RecipeError,
    RemoteError,
    ResourceError,
    StorageFullError,
)
from mergepipe_pipeline.sensors.ticks import _chain
from mergepipe_pipeline.storage.regular import refusals_named


def of_the_system(number: int) -> OSError:
    return OSError(number, os.strerror(number), "/mnt/experts/a")


def caused(error: MergePipeError, by: BaseException) -> MergePipeError:
    try:
        raise by
    except type(by):
        error.__cause__ = by  # with its traceback, which Dagster looks for
    return error


def too_large() -> MemoryError:
    with pytest.raises(MemoryError) as refused:
        np.empty(1 << 58, np.uint8)
    return refused.value


_NUMBERS = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ENOSPC, errno.EROFS, errno.ENOENT)
SURROUNDINGS: list[BaseException] = [
    *map(of_the_system, (*_NUMBERS, errno.ETIMEDOUT, errno.EHOSTUNREACH)),
    StorageFullError("The disk is full"),
    RemoteError("A server cannot be reached, or fails"),
    ResourceError("No memory"),
    BusyError("Somebody else works on this recipe"),
    InputChangedError("a is gone"),
    MemoryError(),
    too_large(),
    caused(MergePipeError("A file cannot be read"), of_the_system(errno.EIO)),
    caused(CheckpointError("A file cannot be opened"), of_the_system(errno.ESTALE)),
    caused(CorruptionError("A version cannot be read"), of_the_system(errno.EIO)),
]
LASTING: list[BaseException] = [
    RecipeError("No such method"),
    CheckpointError("This is no safetensors file"),
    CorruptionError("A plan was changed"),
    caused(CorruptionError("A snapshot has no manifest"), of_the_system(errno.ENOENT)),
    caused(CorruptionError("A catalog file cannot be read"), OSError("Corrupt snappy data")),
]
UNKNOWN: list[BaseException] = [
    ValueError("a defect"),
    DamagedLayerError("it is made anew"),
    of_the_system(errno.EEXIST),
    of_the_system(errno.ENOTDIR),
    OSError("not a regular file"),
]
ALL = [(e, f) for f, es in zip(Fault, (LASTING, UNKNOWN, SURROUNDINGS), strict=True) for e in es]


@pytest.mark.parametrize(("error", "fault"), ALL, ids=lambda x: repr(x))
def test_an_error_and_what_dagster_keeps_of_it_are_one_fault(
    error: BaseException, fault: Fault
) -> None:
    assert fault_of_exception(error) is fault
    with pytest.raises(type(error)) as raised:
        raise error
    kept = serializable_error_info_from_exc_info((raised.type, raised.value, raised.tb))
    assert fault_of(_chain(kept)) is fault


def test_a_name_that_storage_refuses_is_no_fault_of_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused, refusals_named(tmp_path):
        raise of_the_system(errno.ENOTCONN)
    assert fault_of_exception(refused.value) is Fault.SURROUNDINGS
    with pytest.raises(CheckpointError) as refused, refusals_named(tmp_path):
        raise of_the_system(errno.ELOOP)
    assert fault_of_exception(refused.value) is Fault.LASTING


def test_class_names_alone_say_what_lasts() -> None:
    assert fault_of([("Failure", ""), ("RecipeError", "")]) is Fault.LASTING
    names = ("Failure", "RecipeError", "StorageFullError")
    assert fault_of([(name, "") for name in names]) is not Fault.LASTING
