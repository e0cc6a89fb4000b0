"""A checkpoint of a training run as one file of whole tensors, read by ranges where they lie.

In a folder that `torch.distributed.checkpoint` wrote, each process has saved its part of every
tensor. Here `.metadata` seems to go on behind its end with the model's tensors, one after the
other: who reads there gets the bytes from the `.distcp` files. So tensors are whole to everything
above, as in the safetensors file that the run could export, and ids are the same.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from mergepipe_pipeline.checkpoints.dcp import (
    METADATA,
    SUFFIX,
    ChunkedTensor,
    data_start,
    read_metadata,
)
from mergepipe_pipeline.checkpoints.header import tensor_order
from mergepipe_pipeline.digest import digest_json, sha256_hex
from mergepipe_pipeline.domain.checkpoint import FileEntry, TensorEntry
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.errors import CheckpointError, IncompleteCheckpointError
from mergepipe_pipeline.storage.regular import text_of, too_large
from mergepipe_pipeline.storage.source import (
    CheckpointSource,
    FileRange,
    Reading,
    open_folder,
)

if TYPE_CHECKING:
    from mergepipe_pipeline.storage.read_batch import ReadBatch

SCHEME = "dcp"
_MOST_NBYTES = 64 << 20
#: Keys under which trainers save what is not the model.
_BESIDE = frozenset(
    {
        *("optim", "optimizer", "optimizers", "param_groups", "state"),
        *("lr_scheduler", "lr_schedulers", "scheduler", "schedulers"),
        *("dataloader", "rng_state", "train_state"),
    }
)
#: Layouts of folders that were opened last: a merge opens each several times.
_LAYOUTS: dict[tuple[object, ...], Layout] = {}
_MOST_LAYOUTS = 32
_NAMED = 6


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of a model behind the end of `.metadata`, and the pieces that their bytes are.

    Piece i begins at `starts[i]` there, and is at a place (file, byte) in the folder. `files` are
    all that hold a part; `digest` is over the tables and the places.
    """

    tensors: tuple[TensorEntry, ...]
    starts: Sequence[int]
    places: Sequence[tuple[str, int]]
    stop_byte: int
    files: tuple[str, ...]
    digest: str


class TrainingRun(CheckpointSource):
    """The folder of one step of a training run. Safe for several threads.

    `prefix` begins the names of the model's tensors among all that were saved; None: what the
    folder says itself, if it leaves no choice.
    """

    def __init__(self, files: CheckpointSource, uri: str, prefix: str | None = None) -> None:
        self._files, self._uri, self._prefix = files, uri, prefix
        self.is_far = files.is_far

    def list(self, folder: str = "") -> list[str]:
        """Names of what there is, as the folder has it."""
        return self._files.list(folder)

    def size(self, path: str) -> int:
        """Size in bytes, of `.metadata` without the tensors behind its end."""
        return self._files.size(path)

    def mtime_ns(self, path: str) -> int:
        """Time of last change in nanoseconds."""
        return self._files.mtime_ns(path)

    def read_into(self, path: str, start_byte: int, buffer: memoryview) -> None:
        """Fill `buffer` from `start_byte`, from wherever the bytes lie."""
        for (file, start, stop), at in self._pieces(path, start_byte, len(buffer)):
            self._files.read_into(file, start, buffer[at : at + stop - start])

    def will_need(self, path: str, start_byte: int, nbytes: int) -> None:
        """Say that these bytes will be read soon."""
        for (file, start, stop), _ in self._pieces(path, start_byte, nbytes):
            self._files.will_need(file, start, stop - start)

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def put(self, batch: ReadBatch, path: str, start_byte: int, buffer: memoryview) -> None:
        """Do as `read_into`, as the files do it."""
        for (file, start, stop), at in self._pieces(path, start_byte, len(buffer)):
            self._files.put(batch, file, start, buffer[at : at + stop - start])

    def expect(self, ranges: Iterable[FileRange]) -> None:
        """Say what will be read, in about this order."""
        pieces = (self._pieces(path, start, stop - start) for path, start, stop in ranges)
        self._files.expect(piece for found in pieces for piece, _ in found)

    def _pieces(self, path: str, start: int, nbytes: int) -> Iterator[tuple[FileRange, int]]:
        """Where bytes lie in the folder, and where each piece of them goes in a buffer."""
        if path != METADATA or start + nbytes <= self._end:
            yield FileRange(path, start, start + nbytes), 0
            return
        layout, stop = self.layout, start + nbytes
        number, at = bisect_right(layout.starts, start) - 1, start
        while at < stop:
            file, place = layout.places[number]
            first, number = layout.starts[number], number + 1
            end = layout.starts[number] if number < len(layout.starts) else layout.stop_byte
            piece = FileRange(file, place + at - first, place + min(stop, end) - first)
            yield piece, at - start
            at = min(stop, end)

    @cached_property
    def _end(self) -> int:
        return self._files.size(METADATA)

    @cached_property
    def layout(self) -> Layout:
        """The model's tensors and where they lie. Raises CheckpointError as `dcp`."""
        where = f"{self._uri}, {METADATA}"
        if self._end > _MOST_NBYTES:
            raise too_large(where, _MOST_NBYTES, self._end)
        raw = self._files.read_range(METADATA, 0, self._end)
        stamps = [
            (name, self._files.size(name), self._files.mtime_ns(name))
            for name in self.list()
            if name.endswith(SUFFIX)
        ]
        key = (self._uri, self._prefix, sha256_hex(raw), *stamps)
        if key not in _LAYOUTS:
            while len(_LAYOUTS) >= _MOST_LAYOUTS:
                _LAYOUTS.pop(next(iter(_LAYOUTS), key), None)
            _LAYOUTS[key] = self._laid_out(raw, where)
        return _LAYOUTS[key]

    def _laid_out(self, raw: bytes, where: str) -> Layout:
        named = _model_tensors(read_metadata(raw, where), self._prefix, where)
        missing = {c.file for t in named.values() for c in t.chunks}.difference(self.list())
        if missing:
            raise IncompleteCheckpointError(
                "A file of a training run's checkpoint is not there yet",
                where=self._uri,
                expected=f"all files that {METADATA} names",
                found=f"{len(missing)} missing; the first is {min(missing)[:80]!r}",
                next_step="let the copy finish, or copy the missing files",
            )
        tensors, starts, places, at = [], [], [], self._end
        for name, dtype, shape in tensor_order([(n, t.dtype, t.shape) for n, t in named.items()]):
            tensors.append(TensorEntry(name, dtype, shape, METADATA, at))
            chunks, size = named[name].chunks, itemsize(dtype)
            data = [data_start(self._files, c, dtype, f"{self._uri}, {c.file}") for c in chunks]
            for _, n, number, first in named[name].runs(where):
                starts.append(at)
                places.append((chunks[number].file, data[number] + first * size))
                at += n * size
        files = tuple(sorted({file for file, _ in places}))
        digest = digest_json([sha256_hex(raw), [t.name for t in tensors], starts, places])
        return Layout(tuple(tensors), starts, places, at, files, digest)

    def entry(self, path: str, probe: str = "") -> FileEntry:
        """A file as a checkpoint lists it; `probe` is over some bytes of the tensors."""
        digest = self.layout.digest if path == METADATA else ""
        return FileEntry(path, self.size(path), self.mtime_ns(path), digest, probe)


def is_run(text: str) -> bool:
    """Whether a text is the address of a step of a training run."""
    return text.startswith(f"{SCHEME}://")


def parse_run(text: str) -> tuple[str, str]:
    """The path of `dcp://PATH?QUERY`, and the query; another text as it is, and ""."""
    if not is_run(text):
        return text, ""
    path, _, query = text.removeprefix(f"{SCHEME}://").partition("?")
    return path, query


def run_root(path: Path, query: str) -> str:
    """The address of a folder with a query."""
    return f"{SCHEME}://{path}?{query}"


def run_folder(rest: str, reading: Reading) -> CheckpointSource:
    """The source of `dcp://PATH?prefix=PREFIX`, without the scheme. Raises CheckpointError."""
    path, query = parse_run(f"{SCHEME}://{rest}")
    stated = parse_qs(query, keep_blank_values=True)
    if query and (stated.keys() != {"prefix"} or len(stated["prefix"]) > 1):
        raise CheckpointError(
            "The address of a training run's checkpoint cannot be read",
            where=f"{SCHEME}://{path}",
            expected=f"{SCHEME}://PATH, or {SCHEME}://PATH?prefix=PREFIX",
            found=f"the keys {', '.join(stated) or 'none'}",
            next_step="correct it",
        )
    files = open_folder(path, reading)
    return TrainingRun(files, path, stated["prefix"][0] if query else None)


def as_run(files: CheckpointSource, uri: str) -> CheckpointSource:
    """A folder with `.metadata` as a training run; as it is if it holds safetensors."""
    is_model = any(name.endswith(".safetensors") for name in files.list())
    return files if is_model else TrainingRun(files, uri)


def _model_tensors(
    tensors: Sequence[ChunkedTensor], prefix: str | None, where: str
) -> dict[str, ChunkedTensor]:
    """The model's tensors under their own names: those of one prefix, which must be clear."""
    groups: dict[str, dict[str, ChunkedTensor]] = {}
    for t in tensors:
        own = t.path[-1] if t.path and t.name == ".".join(t.path) else t.name
        before = t.name[: len(t.name) - len(own)]
        if not _BESIDE.intersection((*before.split("."), own.partition(".")[0])):
            groups.setdefault(before, {})[own] = t
    if prefix is not None:
        found = {t.name[len(prefix) :]: t for t in tensors if t.name.startswith(prefix)}
        if found and "" not in found:
            return found
    # A count of steps beside the model is no second model.
    clear = [p for p, group in groups.items() if any(t.shape for t in group.values())]
    if prefix is None and len(clear) == 1:
        return groups[clear[0]]
    said = ", ".join(repr(p)[:80] for p in clear[:_NAMED])
    raise CheckpointError(
        "It is not clear which tensors of a training run are the model's"
        if prefix is None
        else "No tensor of a training run has a name that begins so",
        where=where,
        expected="tensors of one model" if prefix is None else f"names that begin with {prefix!r}",
        found=f"tensors below {said}" if clear else f"{len(tensors)} tensors, of no model",
        next_step=f"say what their names begin with: {SCHEME}://PATH?prefix=PREFIX",
    )


#: Files and folders of other savers by a part of their names, what wrote them, and what converts.
_OTHERS = (
    (
        re.compile(r".*_optim_states\.pt|mp_rank_\d+_model_states\.pt"),
        "DeepSpeed, in parts of its own",
        "run `python zero_to_fp32.py . OUT --safe_serialization` in the folder above, where "
        "DeepSpeed has put it, and give OUT",
    ),
    (
        re.compile(r"mp_rank_\d+(_\d+)*|model_optim_rng\.pt|model_rng\.pt"),
        "Megatron, in its legacy format",
        "write it for Hugging Face with Megatron's `tools/checkpoint/convert.py` or Megatron "
        "Bridge's `export_ckpt`, and give that folder",
    ),
)


def refuse_run(present: Sequence[str], uri: str) -> None:
    """Raise for what a training run left that is not whole, or that its own tools must convert."""
    parts = [f for f in present if f.endswith(SUFFIX)]
    if parts:
        raise IncompleteCheckpointError(
            "A training run has not finished to save this step",
            where=uri,
            expected=f"{METADATA}, which torch writes last",
            found=f"{len(parts)} of its files, and no {METADATA}",
            next_step="let the save or the copy finish; one that was interrupted cannot be read: "
            "take the step before it",
        )
    for pattern, saver, step in _OTHERS:
        if found := [f for f in present if pattern.fullmatch(f)]:
            raise CheckpointError(
                f"A training run was saved by {saver}, which is not read",
                where=f"{uri}, {text_of(found[0])}",
                expected=f"*.safetensors, or {METADATA} with *{SUFFIX}",
                found=text_of(", ".join(found[:3])),
                next_step=step,
            )
