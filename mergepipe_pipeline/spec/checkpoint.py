"""What a checkpoint is: named tensors at byte ranges of files, known from headers alone.

Nothing here opens a file; `storage` fills these in and `catalog` keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.dtypes import itemsize


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One weight file: path relative to the checkpoint, size in bytes, mtime, header digest."""

    path: str
    nbytes: int
    mtime_ns: int
    header_sha256: str


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
    """

    name: str
    root: str
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...] = field(repr=False)
    config: str | None = None  # text of config.json

    @cached_property
    def checkpoint_id(self) -> str:
        """24 hex characters over every file's path, size, mtime and header digest."""
        return digest_json([[f.path, f.nbytes, f.mtime_ns, f.header_sha256] for f in self.files])[
            :24
        ]

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
