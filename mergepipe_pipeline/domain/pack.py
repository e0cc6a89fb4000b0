"""A pack: one expert's deltas to its base, encoded in tiers from coarse to exact.

Tiers R0 to R2 have the leading directions of δ as a matrix, L0 to L3 approximate what these leave
by sums of a few steps; X20 holds the largest fifth of δ exactly, X all of the expert, by how far it
is from what the directions make of the base. A budget buys one level per block: what is read of the
tiers together. An exact level gives the expert's own bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from mergepipe_pipeline.domain.bounds import Bound, Sha256, Size, Text
from mergepipe_pipeline.domain.segments import COARSE_ELEMS

if TYPE_CHECKING:  # commands that read plans start without NumPy
    import numpy as np
    import numpy.typing as npt

    from mergepipe_pipeline.arrays import F32Array, I64Array, U32Array

#: Part of every pack's id: raised when an encoder or a decoder changes its bits.
CODEC_VERSION = "7"
#: Raised when the files beside frames change, which no id tells.
PACK_FORMAT = "5"
#: Elements that are encoded, compressed, verified and decoded together; a part of a tensor.
CHUNK_ELEMS = COARSE_ELEMS

Tier = Literal["R0", "R1", "R2", "L0", "L1", "L2", "L3", "X20", "X"]
#: A level is named after the last of its tiers.
Level = Tier
TIERS: tuple[Tier, ...] = ("R0", "R1", "R2", "L0", "L1", "L2", "L3", "X20", "X")
#: Tiers that are of a tensor as a whole: their frames stand with its first chunk.
FACTORED: tuple[Tier, ...] = ("R0", "R1", "R2")
#: Tiers of steps, each a third of the one before.
STEPPED: tuple[Tier, ...] = ("L0", "L1", "L2", "L3")
#: As the number of a tier: none is read.
NOT_READ = -1
#: The tiers that are read for a level.
TIERS_OF: Mapping[Level, tuple[Tier, ...]] = {
    **{tier: TIERS[: number + 1] for number, tier in enumerate((*FACTORED, *STEPPED))},
    "X20": ("X20",),
    "X": (*FACTORED, "X"),
}
#: The levels that give elements as they are stored, if not all the expert's; others give deltas.
EXACT: tuple[Level, ...] = ("X20", "X")
#: The dtypes of tensors that have levels; all others are read from the expert.
PACKED_DTYPES = ("BF16", "F16", "F32")
#: Numbers of a tail: the root mean square of δ̂ at a level, and magnitudes above which equal parts
#: of ‖δ̂‖² lie, from none to all.
TAIL_LENGTH = 34
#: Share of a tensor's elements that X20 holds at least: those of the largest |δ|.
X20_DENSITY = 0.2


class TensorContent(NamedTuple):
    """A tensor and the base's tensor that it is packed against; digests are of their contents.

    Those of all tensors of a pack determine the pack's id.
    """

    name: Text
    base_name: Text
    dtype: Annotated[str, Bound(pattern="^(BF16|F16|F32)$")]
    shape: Annotated[tuple[Size, ...], Bound(max_length=16)]
    digest: Sha256
    base_digest: Sha256


@dataclass(frozen=True)
class PackedTensor:
    """One tensor in a pack; `digest` and `base_digest` are of its and the base's contents.

    `unit` is the step of tier L0 as float32, `factors` the checksum of the frames of R0 to R2 (""
    for none), `threshold_bits` the float32 pattern of the least |δ| in X20. Per chunk: `nbytes`
    uint32 [tiers, chunks] in the order of TIERS, 0 for a chunk that has nothing in a tier;
    `checksums` uint64 [tiers, chunks] of what is stored; `residual_sq` float32
    [levels, chunks], ‖δ − δ̂‖² rounded up, infinite where a level cannot be used.
    `start_byte` int64 [tiers]: where the tensor's first chunk lies in each tier's file. `tails`
    float32 [levels that approximate, TAIL_LENGTH]; none without factors.
    """

    name: str
    base_name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    base_digest: str
    unit: float
    factors: str
    threshold_bits: int
    nbytes: U32Array
    checksums: npt.NDArray[np.uint64]
    residual_sq: F32Array
    start_byte: I64Array
    tails: F32Array

    @cached_property
    def frame_starts(self) -> I64Array:
        """Int64 [tiers, chunks + 1]: where frames lie in each tier's file, and where they end."""
        import numpy as np

        starts = np.zeros((len(TIERS), self.nbytes.shape[1] + 1), np.int64)
        np.cumsum(self.nbytes, axis=1, out=starts[:, 1:])
        return starts + self.start_byte[:, None]

    @property
    def content(self) -> TensorContent:
        """The contents that the tensor is made from."""
        return TensorContent(
            self.name, self.base_name, self.dtype, self.shape, self.digest, self.base_digest
        )


@dataclass(frozen=True, slots=True)
class PackSource:
    """A pack that the engine reads: a folder with one file per tier."""

    pack_id: str
    root: str


@dataclass(frozen=True, slots=True)
class PackedRange:
    """Elements [start, stop) at one level, whole chunks, for `nbytes` bytes of the pack's files.

    `is_exact`: the operator makes the same of it as of the expert's own elements. An approximate
    δ̂ is read `length` times as long.
    """

    start_elem: int
    stop_elem: int
    level: Level
    nbytes: int
    is_exact: bool
    length: Annotated[float, Bound(ge=0.25, le=4)] = 1.0

    @property
    def gives_bits(self) -> bool:
        """Whether it gives elements as they are stored, if not all the expert's; else deltas."""
        return self.level in EXACT


@dataclass(frozen=True, slots=True)
class PackedInput:
    """The part of a pack that is read in place of an expert's stored elements.

    `pack` indexes `MergePlan.packs`; `tensor`, `unit` and `factors` are those of the
    `PackedTensor`. All approximate ranges are read with the same factors, those that any of them
    needs, and exact ones with all, for `factor_nbytes`.
    """

    pack: int
    tensor: str
    unit: float
    factors: str
    factor_nbytes: int
    ranges: tuple[PackedRange, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the pack's files that are read."""
        return self.factor_nbytes + sum(r.nbytes for r in self.ranges)

    @property
    def factor_tiers(self) -> tuple[Tier, ...]:
        """The tiers of factors that the ranges need, if the tensor has any."""
        return _factored(self.ranges)

    @property
    def near_tiers(self) -> tuple[Tier, ...]:
        """The tiers of factors that approximate ranges are read with, if the tensor has any."""
        return _factored([r for r in self.ranges if not r.gives_bits])

    @property
    def approximate(self) -> tuple[PackedRange, ...]:
        """The ranges that give other results than the expert itself."""
        return tuple(r for r in self.ranges if not r.is_exact)


def _factored(ranges: Sequence[PackedRange]) -> tuple[Tier, ...]:
    needed = {tier for r in ranges for tier in TIERS_OF[r.level]}
    return tuple(tier for tier in FACTORED if tier in needed)
