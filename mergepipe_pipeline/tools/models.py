"""Checkpoints as the tools read them: found as recipes find theirs, whole tensors at a time.

What is read is compared with what was analysed or digested before, as in a merge.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mergepipe_pipeline.arrays import F32Array
from mergepipe_pipeline.checkpoints.reader import BlockReader
from mergepipe_pipeline.checkpoints.stored import Verifier, as_float32, torch_dtype
from mergepipe_pipeline.digest import sha256_hex
from mergepipe_pipeline.domain.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.domain.model_config import QUANTISATION_KEYS, config_places
from mergepipe_pipeline.domain.plan import Source
from mergepipe_pipeline.domain.snapshot import LineageEntry
from mergepipe_pipeline.domain.view import view_of
from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.facts.contents import content_of
from mergepipe_pipeline.facts.input_segments import Inputs, checkpoint_inputs
from mergepipe_pipeline.facts.side_file_digests import refuse_changed_files
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.resolution.alignment import aliases
from mergepipe_pipeline.resolution.locate import Places
from mergepipe_pipeline.resolution.plain_numbers import coded_error
from mergepipe_pipeline.storage.side_files import side_files
from mergepipe_pipeline.storage.source import CheckpointSource, open_source
from mergepipe_pipeline.tools.result import Draft, Made, Origin, check_place, drafted
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True)
class Input:
    """One checkpoint that a tool reads; a context manager that closes its files."""

    role: str
    checkpoint: Checkpoint
    content: str
    _source: CheckpointSource = field(repr=False)
    _segments: Inputs = field(repr=False)
    _aliases: Mapping[str, str] = field(default_factory=dict, repr=False)

    @cached_property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Its tensors by name, in file order."""
        return {self._aliases.get(n, n): t for n, t in self.checkpoint.by_name.items()}

    def named_as(self, base: Input) -> Input:
        """The same with its tensors under the names that `base` has for them.

        Raises IncompatibleCheckpointsError for names that may mean several tensors.
        """
        return replace(self, _aliases=aliases(self.tensors, base.tensors, self.checkpoint.root))

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json; empty where there is none.

        It says nothing of how weights were quantised where none is.
        """
        config: dict[str, Any] = json.loads(self.checkpoint.config or "{}")
        is_plain = self.checkpoint.form is None
        for place in config_places(config, QUANTISATION_KEYS) if is_plain else ():
            part, _, key = place.rpartition(".")
            (config[part] if part else config).pop(key)
        return config

    @property
    def lineage(self) -> LineageEntry:
        """The entry of it in a manifest."""
        return LineageEntry(self.role, self.checkpoint.name, self.content)

    @property
    def source(self) -> Source:
        """The entry of it in a provenance."""
        c = self.checkpoint
        return Source(c.name, c.root, c.checkpoint_id, c.stamp)

    def raw(self, name: str) -> bytearray:
        """The stored bytes of a tensor. Raises CheckpointChangedError, CorruptionError."""
        entry = self.tensors[name]
        data = BlockReader(self._source, self.checkpoint, None).read(entry, 0, entry.numel)
        view = view_of(entry)
        Verifier(view, self._segments.of_view(view)).check(0, entry.numel, memoryview(data))
        return data

    def floats(self, name: str) -> F32Array:
        """A tensor as float32 in its shape.

        Raises CheckpointChangedError, CorruptionError, IncompatibleCheckpointsError for codes.
        """
        entry, form = self.tensors[name], self.checkpoint.form
        if form is not None and entry.name in form.coded:
            raise coded_error(self.checkpoint, form, name)
        raw = np.frombuffer(self.raw(name), np.uint8)
        values: F32Array = as_float32(raw, entry.dtype).numpy().reshape(entry.shape)
        return values

    def side_files(self) -> dict[str, bytes]:
        """Config, tokenizer and the like, by name. Raises CheckpointError."""
        sizes = side_files(self._source, self.checkpoint.root)
        return {name: self._source.read_range(name, 0, n) for name, n in sizes.items()}

    def verify_unchanged(self) -> None:
        """Raise CheckpointChangedError if a weight file is not the one that was opened."""
        BlockReader(self._source, self.checkpoint, None).verify_unchanged()

    def __enter__(self) -> Input:
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()


def stored(values: F32Array, dtype: str) -> bytes:
    """The little-endian bytes of float32 values in a type, rounded to nearest, ties to even."""
    import torch

    rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch_dtype(dtype))
    data: bytes = rounded.reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


def noise(shape: tuple[int, ...], seed: int, what: object) -> F32Array:
    """Standard normal numbers that follow from seed and name alone."""
    key = int(sha256_hex(f"{seed} {what}".encode())[:32], 16)
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(shape, np.float32)


def open_input(
    warehouse: Warehouse,
    role: str,
    text: str,
    progress: Progress,
    relative_to: Path | None = None,
    *,
    copies: bool = False,
) -> Input:
    """The full checkpoint that a text means, its content known; one pass reads it if it is not.

    Only a tool that `copies` what it has no arithmetic for takes one that is stored as codes.
    Raises CheckpointError for what is not there, an adapter or a delta; CorruptionError for a file
    beside the weights that is not what was registered; IncompatibleCheckpointsError for codes.
    """
    checkpoint = Places(warehouse.ensure(), relative_to).locate(text)
    if checkpoint.kind != "full":
        raise CheckpointError(
            "A full checkpoint is needed here",
            where=checkpoint.root,
            expected="the weights of a whole model",
            found=f"{'an adapter' if checkpoint.kind == 'adapter' else 'a delta'}",
            next_step="merge it into its base first, and give the result",
        )
    if checkpoint.form is not None and not copies:
        raise coded_error(checkpoint, checkpoint.form)
    segments = checkpoint_inputs(warehouse, [checkpoint], progress)
    refuse_changed_files(warehouse, checkpoint)
    content = content_of(warehouse.catalog, checkpoint)
    return Input(role, checkpoint, content, open_source(checkpoint.root), segments)


@dataclass(frozen=True)
class Making:
    """A result under way: it opens the inputs, and gives the result its place when it is whole."""

    warehouse: Warehouse
    verb: str
    place: Path | None
    progress: Progress
    folder: Path | None
    _stack: ExitStack
    _inputs: list[Input] = field(default_factory=list)

    def open(self, role: str, text: str, *, copies: bool = False) -> Input:
        """The checkpoint that a text means, as `open_input` gives it, until the result is made."""
        one = open_input(self.warehouse, role, text, self.progress, self.folder, copies=copies)
        self._inputs.append(self._stack.enter_context(one))
        return one

    def finish(
        self,
        parameters: Mapping[str, Any],
        write: Callable[[Draft, Progress], Mapping[str, Any]],
    ) -> Made:
        """Let `write` fill the result, and publish it with the details that it returns.

        Raises what `Draft.finish` raises, and CheckpointChangedError if an input has changed since.
        """
        with drafted(self.warehouse, self.verb, self.place) as draft:
            details = write(draft, self.progress)
            for one in self._inputs:
                one.verify_unchanged()
            lineage = tuple(i.lineage for i in self._inputs)
            sources = tuple(i.source for i in self._inputs)
            return draft.finish(Origin(self.verb, parameters, lineage, sources), details)


@contextmanager
def making(
    warehouse: Warehouse,
    verb: str,
    out: str | Path | None,
    progress: Progress | None,
    folder: Path | None = None,
) -> Iterator[Making]:
    """A result of a verb for the folder `out`, or for the warehouse; its inputs are closed in the
    end. Relative paths start from `folder`. Raises as `check_place`.
    """
    place = None if out is None else check_place(out, warehouse.root)
    with ExitStack() as stack:
        yield Making(warehouse, verb, place, progress or Silent(), folder, stack)
