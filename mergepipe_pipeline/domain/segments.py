"""Segments: a segment is a fixed run of a stored tensor's elements whose digest is remembered.

A merge that reads a part of a tensor can so compare that part. Segments are cut by element, as
blocks are, and every block is whole segments: of COARSE_ELEMS, or of FINE_ELEMS where the grid is
finer than that. The tensor's own digest is over those of its coarse segments, whatever the grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mergepipe_pipeline.digest import SEGMENT_DIGEST_NBYTES, checksums_of, content_digest
from mergepipe_pipeline.domain.blocks import MIN_BLOCK_ELEMS
from mergepipe_pipeline.domain.view import Part, TensorView

#: 128 KiB of bfloat16: hashes are at full speed there, and digests are 1/5461 of a checkpoint.
COARSE_ELEMS = 1 << 16
FINE_ELEMS = MIN_BLOCK_ELEMS


def segment_elems_for(block_elems: int) -> int:
    """The longest segments that every block of a grid consists of."""
    return COARSE_ELEMS if block_elems >= COARSE_ELEMS else FINE_ELEMS


def levels_for(block_elems: int) -> tuple[int, ...]:
    """The lengths of segments to remember for a grid; the first gives the tensor's digest."""
    return tuple(dict.fromkeys((COARSE_ELEMS, segment_elems_for(block_elems))))


@dataclass(frozen=True, slots=True)
class Segments:
    """The digests of a run of elements cut every `segment_elems` (`digest.segment_digests`).

    `where` says in errors whose elements they are.
    """

    segment_elems: int
    digests: bytes
    where: str = ""

    @property
    def content(self) -> str:
        """The digest of all of it (64 hex). Raises ValueError for other than coarse segments."""
        if self.segment_elems != COARSE_ELEMS:
            raise ValueError(f"segments of {self.segment_elems} elements")
        return content_digest(self.digests)

    def of(self, first: int, stop: int) -> bytes:
        """The digests of segments [first, stop)."""
        return self.digests[first * SEGMENT_DIGEST_NBYTES : stop * SEGMENT_DIGEST_NBYTES]

    def checksums(self, first: int, stop: int) -> bytes:
        """The XXH3 of segments [first, stop) (`digest.segment_checksums`)."""
        return checksums_of(self.of(first, stop))


class KnownSegments(Protocol):
    """Segments as they were analysed; source numbers are those of a plan, or of a pass."""

    def of_view(self, view: TensorView) -> Segments:
        """Of the view's stored elements, in the view's order. Raises CorruptionError."""
        ...

    def of_part(self, part: Part) -> Segments:
        """Of one whole stored tensor. Raises CorruptionError."""
        ...
