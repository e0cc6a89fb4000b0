"""Where checkpoint bytes come from: a small protocol, and local folders as its one implementation.

Ranged reads only: nothing above this can ask for a whole file by accident.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, Self

from mergepipe_pipeline.errors import CheckpointChangedError, CheckpointError, MergePipeError
from mergepipe_pipeline.storage.regular import (
    open_regular,
    places_of,
    refusals_named,
    stat_regular,
    text_of,
)
from mergepipe_pipeline.storage.roots import UNMOUNTED, refuse_unmounted
from mergepipe_pipeline.storage.uncached import (
    cached_nbytes,
    is_cold,
    is_long,
    open_direct,
    read_uncached,
)

if TYPE_CHECKING:
    from mergepipe_pipeline.storage.read_batch import ReadBatch

#: What storage may do beside what is asked for: fetch on; nothing; nor keep it in the page cache.
Reading = Literal["ahead", "exact", "once"]
#: Windows that a disk hears of before they are read; a merge of 10 % took 2.67 s so, not 2.94.
ANNOUNCED = 8


#: Gets bytes that stay as they are until it returns.
Use = Callable[[memoryview], None]


class FileRange(NamedTuple):
    """Bytes [start, stop) of a file of a checkpoint."""

    path: str
    start_byte: int
    stop_byte: int


class RangedFiles(Protocol):
    """Files of one checkpoint by relative path, as its readers need them.

    Far ones are fetched, and told apart by their server's tags: no probe reads their bytes.
    """

    is_far: bool = False

    def size(self, path: str) -> int:
        """Size in bytes. Raises CheckpointError if the file is not there."""
        ...

    def mtime_ns(self, path: str) -> int:
        """Time of last change in nanoseconds. Raises CheckpointError if the file is not there."""
        ...

    def read_into(self, path: str, start_byte: int, buffer: memoryview) -> None:
        """Fill `buffer` from `start_byte`. Raises CheckpointChangedError past the end."""
        ...

    def will_need(self, path: str, start_byte: int, nbytes: int) -> None:
        """Say that these bytes will be read soon; a hint without effect on results."""
        ...

    def expect(self, ranges: Iterable[FileRange]) -> None:
        """Say what will be read, in about this order, which far files fetch before it is."""
        return

    def put(self, batch: ReadBatch, path: str, start_byte: int, buffer: memoryview) -> None:
        """Do as `read_into` when the batch runs, if not now; the buffer must stay until then.

        Raises CheckpointError if the file is not there.
        """
        began = time.perf_counter()
        self.read_into(path, start_byte, buffer)
        batch.read_s += time.perf_counter() - began

    def lend(self, batch: ReadBatch, path: str, start_byte: int, nbytes: int, use: Use) -> bool:
        """Let `use` have bytes when the batch has run; False, and nothing, where none are held."""
        return False


class CheckpointSource(RangedFiles, Protocol):
    """The files, and what there are of them; a context manager that closes what it opened."""

    def list(self, folder: str = "") -> list[str]:
        """Names of what there is at the top, or in a folder there, of whatever kind, sorted."""
        ...

    def read_range(self, path: str, start_byte: int, nbytes: int) -> bytes:
        """Exactly `nbytes` bytes from `start_byte`.

        Raises CheckpointChangedError if there are fewer.
        """
        buffer = bytearray(nbytes)
        self.read_into(path, start_byte, memoryview(buffer))
        return bytes(buffer)

    def close(self) -> None:
        """Close all files."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalSource(CheckpointSource):
    """A folder, or a single weight file, on a mounted file system. Safe for several threads.

    Every file is opened as `regular` says: a regular one, in the folder or the hub cache's blobs.
    """

    def __init__(self, root: str | Path, reading: Reading = "ahead") -> None:
        path = Path(root)
        self._reading = reading
        self._only = path.name if os.path.isfile(path) else None
        self._folder = path.parent if self._only else path
        self._places = places_of(path)
        #: By file, whether it is read past the page cache.
        self._cold: dict[str, bool] = {}
        #: Owns the descriptors that do so.
        self._direct = object()

    def list(self, folder: str = "") -> list[str]:
        """Names of what there is at the top, or in a folder there, of whatever kind, sorted.

        Raises CheckpointError for what is no folder or cannot be read; a `folder` that is none has
        nothing in it.
        """
        if self._only:
            return [self._only]
        path = self._resolve(folder) if folder else self._folder
        try:
            with refusals_named(path):
                return sorted(os.listdir(path))
        except FileNotFoundError as error:
            if folder:
                return []
            raise CheckpointError(
                "A checkpoint is neither a folder nor a file",
                where=text_of(self._folder),
                expected="a folder with safetensors files, or one such file",
                found="something else, or nothing",
                next_step="give the folder that holds the model's weight files",
            ) from error

    def size(self, path: str) -> int:
        """Size in bytes. Raises CheckpointError if the file is not there."""
        return self._stat(path).st_size

    def mtime_ns(self, path: str) -> int:
        """Time of last change in nanoseconds. Raises CheckpointError if the file is not there."""
        return self._stat(path).st_mtime_ns

    def read_into(self, path: str, start_byte: int, buffer: memoryview) -> None:
        """Fill `buffer` from `start_byte`. Raises CheckpointChangedError past the end."""
        file, done = self._take(path), 0
        try:
            if self._reading == "once":
                done = read_uncached(file.descriptor, start_byte, buffer)
            self._read_rest(file, path, start_byte, buffer, done)
        finally:
            HANDLES.give_back(file)

    def put(
        self,
        batch: ReadBatch,
        path: str,
        start_byte: int,
        buffer: memoryview,
        *,
        has_room: bool = False,
    ) -> None:
        """Do as `read_into` when the batch runs; `has_room` as `ReadBatch.read` has it."""
        if not len(buffer):
            return
        alone = partial(self.read_into, path, start_byte, buffer)
        direct = self._direct_in(batch, path) if is_long(len(buffer)) else None
        if direct is not None and is_cold(direct, start_byte, len(buffer)):
            batch.read(direct, start_byte, buffer, alone, past_cache=True, has_room=has_room)
            return
        file = batch.file(self, path, partial(self._take, path))
        batch.read(file, start_byte, buffer, alone, past_cache=False, has_room=False)

    @contextmanager
    def lent(self, path: str) -> Iterator[tuple[int, bool]]:
        """A descriptor to read from, and whether it reads whole pages, past the page cache.

        Raises CheckpointError if the file is not there.
        """
        direct = self._take_direct(path) if self._is_cold(path) else None
        file = direct or self._take(path)
        try:
            yield file.descriptor, direct is not None
        finally:
            HANDLES.give_back(file)

    def _direct_in(self, batch: ReadBatch, path: str) -> int | None:
        """A descriptor that reads past the page cache; None for a file that is read through it."""
        if self._reading != "once" or self._cold.get(path) is False:
            return None
        try:
            take = partial(HANDLES.take, self._direct, path, self._open_direct)
            return batch.file(self._direct, path, take)
        except OSError:
            self.read_through_cache(path)
            return None

    def _is_cold(self, path: str) -> bool:
        """Whether a file is read past the page cache; decided once, at the first such read."""
        if self._reading != "once":
            return False
        if path not in self._cold:
            file = self._take(path)
            try:
                nbytes = os.fstat(file.descriptor).st_size
                self._cold[path] = is_cold(file.descriptor, 0, nbytes)
            finally:
                HANDLES.give_back(file)
        return self._cold[path]

    def read_through_cache(self, path: str) -> None:
        """Read a file through the page cache from now on: direct reads of it fail."""
        self._cold[path] = False

    def _take_direct(self, path: str) -> OpenFile | None:
        """None where the file system cannot read past the page cache."""
        with suppress(OSError):
            return HANDLES.take(self._direct, path, self._open_direct)
        return None

    def _open_direct(self, path: str) -> int:
        descriptor = self._open(path)
        try:
            return open_direct(descriptor)
        finally:
            os.close(descriptor)

    def will_need(self, path: str, start_byte: int, nbytes: int) -> None:
        """Say that these bytes will be read soon; a hint without effect on results."""
        if self._reading == "once":
            return
        file = self._take(path)
        try:
            os.posix_fadvise(file.descriptor, start_byte, nbytes, os.POSIX_FADV_WILLNEED)
        finally:
            HANDLES.give_back(file)

    def has(self, path: str, start_byte: int, nbytes: int) -> bool:
        """Whether most of these bytes are in the page cache; False where nobody can tell."""
        file = self._take(path)
        try:
            cached = cached_nbytes(file.descriptor, start_byte, nbytes)
            return cached is not None and 2 * cached > nbytes
        finally:
            HANDLES.give_back(file)

    def close(self) -> None:
        """Close all files."""
        HANDLES.close(self)
        HANDLES.close(self._direct)

    def _read_rest(
        self, file: OpenFile, path: str, start_byte: int, buffer: memoryview, done: int
    ) -> None:
        """Fill `buffer`, of which `done` bytes are there, through the page cache."""
        while done < len(buffer):
            try:
                n = os.preadv(file.descriptor, [buffer[done:]], start_byte + done)
            except OSError as error:
                stop_byte = start_byte + len(buffer)
                raise MergePipeError(
                    "A file cannot be read",
                    where=f"{self._resolve(path)}, bytes {start_byte} to {stop_byte}",
                    found=os.strerror(error.errno or 0),
                    next_step="look at the disk (`dmesg`) or the network; run again when it is "
                    "well, or get the file again",
                ) from error
            if n == 0:
                raise CheckpointChangedError(
                    "A file ended while it was read",
                    where=str(self._resolve(path)),
                    expected=f"{len(buffer)} bytes from byte {start_byte}",
                    found=f"{done} bytes",
                    next_step="let the copy finish, then run again",
                )
            done += n

    def _resolve(self, path: str) -> Path:
        """The file's place; a name that leaves the folder (an index may be hostile) is refused."""
        relative = Path(path)
        if relative.is_absolute() or ".." in relative.parts or "\0" in path:
            raise CheckpointError(
                "A file name leaves its checkpoint",
                where=text_of(self._folder),
                expected="a file inside the folder",
                found=repr(path),
                next_step="do not use this checkpoint before you know who made it",
            )
        return self._folder / relative

    def _stat(self, path: str) -> os.stat_result:
        try:
            return stat_regular(self._resolve(path), self._places)
        except FileNotFoundError:
            raise self._absent(path) from None

    def _take(self, path: str) -> OpenFile:
        try:
            return HANDLES.take(self, path, self._open)
        except FileNotFoundError:
            raise self._absent(path) from None

    def _open(self, path: str) -> int:
        descriptor = open_regular(self._resolve(path), self._places)
        if self._reading != "ahead":
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return descriptor

    def _absent(self, path: str) -> CheckpointError:
        return CheckpointError(
            "A file of a checkpoint is not there",
            where=text_of(self._resolve(path)),
            found="no such file",
            next_step="check the path, or copy the checkpoint again",
        )


def open_source(uri: str, reading: Reading = "ahead") -> CheckpointSource:
    """The source for a path or URI. Raises CheckpointError for an unknown scheme."""
    files = open_folder(uri, reading)
    for name, read_as in FORMS.items():
        if "://" not in uri:
            is_there = os.path.exists(os.path.join(uri, name))
        else:
            is_there = files.is_far and name in files.list()
        if is_there:
            return read_as(files, uri)
    return files


def open_folder(uri: str, reading: Reading) -> CheckpointSource:
    """The files at a path or URI, whatever form they have; raises as `open_source`."""
    scheme, separator, _ = uri.partition("://")
    if not separator:
        return LocalSource(uri, reading)
    if scheme == UNMOUNTED:
        refuse_unmounted(uri)
    if scheme not in SCHEMES:
        raise CheckpointError(
            "No source for this kind of address",
            where=uri,
            expected="a local path or one of " + ", ".join(SCHEMES),
            found=f"{scheme}://",
            next_step="download the checkpoint and give its folder",
        )
    return SCHEMES[scheme](uri.removeprefix(f"{scheme}://"), reading)


#: What opens the rest of an address; `contents` adds that of checkpoints that are away.
SCHEMES: dict[str, Callable[[str, Reading], CheckpointSource]] = {"file": LocalSource}
#: What reads a folder that holds a file of this name, from the folder's files and its path or URI.
FORMS: dict[str, Callable[[CheckpointSource, str], CheckpointSource]] = {}


#: Threads that may hold files at the same time, for none of which another one is closed.
_THREADS = 16


@dataclass(slots=True, eq=False)
class OpenFile:
    """A descriptor, how many read from it now, and whether its owner still wants it."""

    descriptor: int
    users: int = 0
    wanted: bool = True


class Handles:
    """Open files by owner and name, of which at most `most` are kept while nobody reads them.

    None takes half of what the process may open. Safe for several threads.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        # By owner, too: a file replaced meanwhile is not read through what another has open. The
        # longest unused first.
        self._files: dict[tuple[object, str], OpenFile] = {}
        self._lock = threading.Lock()

    def take(self, owner: object, name: str, opened: Callable[[str], int]) -> OpenFile:
        """The file whose descriptor `opened(name)` is, open until it is given back.

        Raises what `opened` does.
        """
        with self._lock:
            file = self._used(owner, name)
        if file is not None:
            return file
        descriptor = opened(name)  # which takes long on a network, and others need not wait
        with self._lock:
            file = self._used(owner, name)
            if file is not None:  # another thread was faster
                os.close(descriptor)
                return file
            self._close_idle(self._limit() - 1)
            file = self._files[owner, name] = OpenFile(descriptor, users=1)
            return file

    def give_back(self, file: OpenFile) -> None:
        """Say that one reader of what `take` gave is done."""
        with self._lock:
            file.users -= 1
            if not file.users and not file.wanted:
                os.close(file.descriptor)

    def close(self, owner: object) -> None:
        """Close all files of `owner`; those that are being read close when that ends."""
        with self._lock:
            for key in [key for key in self._files if key[0] is owner]:
                file = self._files.pop(key)
                file.wanted = False
                if not file.users:
                    os.close(file.descriptor)

    @property
    def share(self) -> int:
        """The number of files that one of several threads may take before it gives any back."""
        return max(1, self._limit() // _THREADS)

    def _used(self, owner: object, name: str) -> OpenFile | None:
        """An open file with one more user, now the one that was used last."""
        file = self._files.pop((owner, name), None)
        if file is not None:
            file.users += 1
            self._files[owner, name] = file
        return file

    def _limit(self) -> int:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return self._most or (soft // 2 if soft > 0 else len(self._files) + 1)

    def _close_idle(self, most: int) -> None:
        """Close the longest unused files until `most` are left, or those that are being read."""
        idle = [key for key, file in self._files.items() if not file.users]
        for key in idle[: max(0, len(self._files) - most)]:
            os.close(self._files.pop(key).descriptor)


#: Of the whole process, as the limit is.
HANDLES = Handles()
