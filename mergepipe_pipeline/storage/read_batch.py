"""Reads that are asked for one by one and done together; see `compiled_reads`."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from mergepipe_pipeline.storage.compiled_reads import (
    CACHED,
    COPY,
    DIRECT,
    IN_PLACE,
    REQUEST_FIELDS,
    run_all,
)
from mergepipe_pipeline.storage.source import HANDLES, OpenFile
from mergepipe_pipeline.storage.uncached import (
    PAGE_NBYTES,
    copy_bytes,
    pages_nbytes,
    scratch_pages,
)

#: Longer reads go through the scratch of their thread in pieces.
_SCRATCH_NBYTES = 4 << 20


@dataclass(slots=True)
class _Request:
    """A request as `run_all` takes it, and the call that does it where that fails."""

    fields: tuple[int, int, int, int, int]
    alone: Callable[[], None]


class ReadBatch:
    """The reads of one window; a context manager. For one thread.

    Leaving it does them, and then the work that follows, in the order in which it was asked for. If
    they are of more files than a thread may hold open, some are done before.
    """

    def __init__(self) -> None:
        self._requests: list[_Request] = []
        self._files: dict[tuple[object, str], OpenFile] = {}
        self._following: list[Callable[[], None]] = []
        self._failing: list[Callable[[], None]] = []
        #: Seconds that reading took, when it is done.
        self.read_s = 0.0

    def __enter__(self) -> ReadBatch:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        failing = self._failing
        try:
            if kind is None:
                self._read()
                for work in self._following:
                    work()
                failing = []
        finally:
            self._give_back()
            for work in failing:
                work()

    def file(self, owner: object, path: str, take: Callable[[], OpenFile]) -> int:
        """The descriptor of a file, which `take` opens the first time; open until it was read."""
        if (owner, path) not in self._files:
            if len(self._files) >= HANDLES.share:
                self._read()
                self._give_back()
            self._files[owner, path] = take()
        return self._files[owner, path].descriptor

    def read(
        self,
        file: int,
        start_byte: int,
        buffer: memoryview,
        alone: Callable[[], None],
        *,
        past_cache: bool,
        has_room: bool,
    ) -> None:
        """Read into `buffer`.

        Args:
            file: the descriptor.
            start_byte: where in the file.
            buffer: filled when the batch has run.
            alone: reads it otherwise, where this fails.
            past_cache: the descriptor reads whole pages.
            has_room: `buffer` lies in its pages as the bytes do in theirs, and all of these pages
                may be written.
        """
        kind = CACHED if not past_cache else IN_PLACE if has_room else DIRECT
        self._put(kind, file, start_byte, buffer, alone)

    def copy(self, source: memoryview, out: memoryview) -> None:
        """Copy what the requests before have read."""
        self._put(COPY, -1, address_of(source), out, partial(copy_bytes, source, out))

    def then(self, work: Callable[[], None]) -> None:
        """Do this when all is read."""
        self._following.append(work)

    def if_it_fails(self, work: Callable[[], None]) -> None:
        """Do this when not all was read, or what follows has raised."""
        self._failing.append(work)

    def _put(
        self, kind: int, file: int, start: int, buffer: memoryview, alone: Callable[[], None]
    ) -> None:
        fields = kind, file, start, len(buffer), address_of(buffer)
        self._requests.append(_Request(fields, alone))

    def _read(self) -> None:
        """Do what was asked for so far."""
        began = time.perf_counter()
        if self._requests:
            table = np.array([r.fields for r in self._requests], np.int64)
            longest = int((table[:, 3] * (table[:, 0] == DIRECT)).max())
            scratch = scratch_pages(min(_SCRATCH_NBYTES, pages_nbytes(PAGE_NBYTES - 1, longest)))
            done = run_all(table.reshape(-1, REQUEST_FIELDS), np.frombuffer(scratch, np.uint8))
            for request in self._requests[done:]:
                request.alone()
            self._requests = []
        self.read_s += time.perf_counter() - began

    def _give_back(self) -> None:
        for file in self._files.values():
            HANDLES.give_back(file)
        self._files.clear()


def address_of(memory: memoryview) -> int:
    """Where a buffer, which can be written and is not empty, lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
