"""Checkpoints: named tensors at byte ranges of files, known from headers alone.

Nothing here opens a file; `storage` fills these in and `catalog` keeps them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal

from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.stored_form import StoredForm, stored_form
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.text import listed

#: Begins the root of a checkpoint whose weight files a pack stands for, as they are offline.
PACKED = "pack://"

#: Files that a warning names.
_MOST_NAMED = 3

#: What the tensors are: whole values, the factors of a PEFT adapter, or differences from a base.
CheckpointKind = Literal["full", "adapter", "delta"]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One weight file: path relative to the checkpoint, size in bytes, mtime, header digest.

    `probe_sha256` is over a few bytes from the middle of the tensors: fine-tunes of one base have
    equal headers and sizes, and a copy may give them equal times. Empty where nothing was probed.
    """

    path: str
    nbytes: int
    mtime_ns: int
    header_sha256: str
    probe_sha256: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in a file: `start_byte` is absolute in the file; `dtype` a safetensors code."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start_byte: int

    @property
    def numel(self) -> int:
        """Number of elements (1 for a scalar)."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return self.numel * itemsize(self.dtype)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder (or single file) as its headers describe it.

    `checkpoint_id` changes when any file is replaced or touched; content identity is the tensors'
    digests, which analysis computes. `root` is where it lies and takes no part in the id.
    `tokenizer_files` are those of a checkpoint that is yet to be made; None: they lie at `root`.
    `ignored_files` hold weights, too, and no part of this model; known where its files were looked
    at.
    """

    name: str
    root: str
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...] = field(repr=False)
    config: str | None = None  # text of config.json
    kind: CheckpointKind = "full"
    adapter_config: str | None = None  # text of adapter_config.json; adapters only
    tokenizer_files: Mapping[str, bytes] | None = field(default=None, repr=False, compare=False)
    ignored_files: tuple[str, ...] = field(default=(), repr=False, compare=False)

    @property
    def ignored_warnings(self) -> tuple[str, ...]:
        """A sentence that names the ignored files, if there are any."""
        if not self.ignored_files:
            return ()
        own = listed([f.path for f in self.files], _MOST_NAMED)
        beside = listed(self.ignored_files, _MOST_NAMED)
        return (f"{self.name} is read from {own}, as transformers loads it, not from {beside}",)

    @cached_property
    def checkpoint_id(self) -> str:
        """24 hex characters over the stamp and every file's probe.

        An adapter's config is part of its values (it holds the scale), so its text counts too.
        """
        parts: list[Any] = [[self.stamp, *(f.probe_sha256 for f in self.files)]]
        if self.adapter_config is not None:
            parts.append({"adapter_config": self.adapter_config})
        return digest_json(parts)[:24]

    @cached_property
    def stamp(self) -> str:
        """24 hex characters over every file's path, size, mtime and header digest."""
        stamps = [[f.path, f.nbytes, f.mtime_ns, f.header_sha256] for f in self.files]
        return digest_json(stamps)[:24]

    @cached_property
    def layout_sha256(self) -> str:
        """64 hex over the tensors' names, dtypes and shapes: equal bytes may be other numbers."""
        return digest_json([[t.name, t.dtype, t.shape] for t in self.tensors])

    @cached_property
    def stated(self) -> Mapping[str, Any]:
        """The content of its config.json; {} without one."""
        stated: dict[str, Any] = json.loads(self.config or "{}")
        return stated

    @cached_property
    def adapter_stated(self) -> Mapping[str, Any]:
        """The content of its adapter_config.json; {} without one."""
        stated: dict[str, Any] = json.loads(self.adapter_config or "{}")
        return stated

    @cached_property
    def form(self) -> StoredForm | None:
        """How its weights are stored if not as plain numbers: quantised, or as loose factors."""
        if self.kind != "full":
            return None
        return stored_form({t.name: t.dtype for t in self.tensors}, self.stated)

    @property
    def is_offline(self) -> bool:
        """Whether the weight files were moved away, so that a pack gives their bytes."""
        return self.root.startswith(PACKED)

    @cached_property
    def by_name(self) -> dict[str, TensorEntry]:
        """Tensor name to entry, in file order."""
        return {t.name: t for t in self.tensors}

    @property
    def numel(self) -> int:
        """Elements of all tensors together."""
        return sum(t.numel for t in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(t.nbytes for t in self.tensors)
