"""Rows of δ and δ̂ for the compiled merge, a chunk after the other, so that they stay in the cache.

Of each expert a window holds what was read: stored bfloat16 where it has them, frames elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mergepipe_pipeline.operators.kernels.bits import Bits, Floats, subtract
from mergepipe_pipeline.packs.elements import ChunkPart
from mergepipe_pipeline.spec.blocks import Range, clip
from mergepipe_pipeline.spec.pack import CHUNK_ELEMS


@dataclass(frozen=True, slots=True)
class ReadExpert:
    """Expert `number` in a window from element `start_elem` on.

    `bits` [n] are there in the element ranges `stored`; `near` are ascending parts beside these.
    """

    number: int
    start_elem: int
    bits: Bits
    stored: Sequence[Range]
    near: Sequence[ChunkPart]

    def delta(self, first_elem: int, base: Bits, out: Floats) -> bool:
        """Fill `out` [m] with δ or δ̂ of the elements from `first_elem` on, the base's are `base`.

        False, with `out` as it was, if nothing of the expert was read there. Raises
        CorruptionError.
        """
        stop_elem = first_elem + len(out)
        near = [p for p in self.near if first_elem <= p.start_elem < stop_elem]
        stored = list(clip(self.stored, first_elem, stop_elem))
        n_read = sum(b - a for a, b in (*stored, *((p.start_elem, p.stop_elem) for p in near)))
        if n_read < len(out):
            out[:] = 0
        for a, b in stored:
            inside = slice(a - first_elem, b - first_elem)
            bits = self.bits[a - self.start_elem : b - self.start_elem]
            subtract(bits, base[inside], out[inside])
        for part in near:
            part.delta(out[part.start_elem - first_elem : part.stop_elem - first_elem])
        return n_read > 0


def chunks_within(start_elem: int, stop_elem: int) -> Iterator[Range]:
    """[start, stop) cut where chunks end."""
    first = start_elem
    while first < stop_elem:
        stop = min(stop_elem, (first // CHUNK_ELEMS + 1) * CHUNK_ELEMS)
        yield first, stop
        first = stop
