"""A base and experts with packs, and plans that read of these what they are told to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from mergepipe_pipeline.digest import segment_digests
from mergepipe_pipeline.domain.blocks import Range, coalesce
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.pack import (
    CHUNK_ELEMS,
    TIERS,
    TIERS_OF,
    Level,
    PackedInput,
    PackedRange,
    PackedTensor,
    PackSource,
)
from mergepipe_pipeline.domain.plan import BaseInput, ExpertInput, MergePlan, TensorTask
from mergepipe_pipeline.domain.recipe import Params
from mergepipe_pipeline.domain.segments import Segments
from mergepipe_pipeline.domain.view import Part, TensorView, view_of
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.packs.checksums import checksum
from mergepipe_pipeline.packs.codec import BITS_OF, encode_chunk, unit_of
from mergepipe_pipeline.packs.elements import ReadBase
from mergepipe_pipeline.packs.frames import as_array
from mergepipe_pipeline.packs.index import NO_TAILS, frames_path, pack_id_of, write_index
from tests.engine.plans import SEED, plan_of
from tests.support.stored import Floats, Stored, content_of, decode, write

#: Three chunks, the last of them short.
SHAPE = (1403, 100)
NUMEL = prod(SHAPE)
#: The whole tensor at one level.
Levels = Sequence[tuple[int, int, Level]]


def all_at(level: Level) -> Levels:
    return [(0, NUMEL, level)]


@dataclass(frozen=True)
class PackedFamily:
    """Checkpoints of one tensor `w`, the base first; of each expert its values, pack and index."""

    checkpoints: tuple[Checkpoint, ...]
    base: Floats
    experts: tuple[Floats, ...]
    stored: tuple[Stored, ...]
    packs: tuple[PackSource, ...]
    tensors: tuple[PackedTensor, ...]

    def __repr__(self) -> str:
        return "family"

    def of_view(self, view: TensorView) -> Segments:
        """As `KnownSegments`: what the bytes that are read are compared with."""
        (part,) = view.stored
        data = memoryview(self.stored[part.source][2])
        size = itemsize(view.dtype)
        return Segments(CHUNK_ELEMS, segment_digests(data, CHUNK_ELEMS * size), "family")

    def of_part(self, part: Part) -> Segments:
        """As `of_view`."""
        return self.of_view(view_of(part.entry, part.source))


def make_family(
    folder: Path, dtype: str = "BF16", n_experts: int = 3, *, patterns: bool = False
) -> PackedFamily:
    """Experts near a base; some elements are equal, and the second expert's first chunk is.

    With `patterns` experts have every pattern of bits of two bytes.
    """
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(5)
    base = rng.standard_normal(NUMEL).astype(np.float32) * np.float32(0.02)
    experts = []
    for _ in range(n_experts):
        delta = rng.standard_normal(NUMEL).astype(np.float32) * np.float32(1e-3)
        experts.append(base + np.where(rng.random(NUMEL) < 0.1, 0, delta))
    if n_experts > 1:
        experts[1][:CHUNK_ELEMS] = base[:CHUNK_ELEMS]
    stored = [_encoded(values, dtype) for values in (base, *experts)]
    if patterns:
        every = np.resize(np.arange(1 << 16, dtype="<u2"), NUMEL).tobytes()
        stored[1:] = [(dtype, SHAPE, every)] * n_experts
    names = ["base", *(f"expert_{i}" for i in range(n_experts))]
    checkpoints = [write(folder, n, {"w": s}) for n, s in zip(names, stored, strict=True)]
    packs = [write_pack(folder / "packs", stored[0], s) for s in stored[1:]]
    return PackedFamily(
        tuple(checkpoints),
        decode(stored[0]),
        tuple(decode(s) for s in stored[1:]),
        tuple(stored),
        tuple(source for source, _ in packs),
        tuple(tensor for _, tensor in packs),
    )


def _encoded(values: Floats, dtype: str) -> Stored:
    if dtype == "BF16":
        return dtype, SHAPE, (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    return dtype, SHAPE, values.astype({"F16": "<f2", "F32": "<f4"}[dtype]).tobytes()


def write_pack(
    folder: Path, base: Stored, expert: Stored, digest: str | None = None
) -> tuple[PackSource, PackedTensor]:
    """Write a pack of one tensor `w` into a folder of packs; `digest` says what it claims to be."""
    dtype = expert[0]
    mine, below = (np.frombuffer(s[2], BITS_OF[dtype]) for s in (expert, base))
    with np.errstate(invalid="ignore", over="ignore"):
        delta = np.nan_to_num(decode(expert) - decode(base))
    unit = unit_of(float(np.square(delta, dtype=np.float64).sum()), int(np.count_nonzero(delta)))
    threshold_bits = int(np.quantile(np.abs(delta), 0.8).astype(np.float32).view(np.uint32))
    starts = range(0, len(mine), CHUNK_ELEMS)
    chunks = [
        encode_chunk(mine[a:b], below[a:b], dtype, unit, threshold_bits)
        for a, b in ((a, a + CHUNK_ELEMS) for a in starts)
    ]
    frames = [[c.frames[tier] for c in chunks] for tier in TIERS]
    tensor = PackedTensor(
        "w",
        "w",
        dtype,
        SHAPE,
        digest or content_of(expert),
        content_of(base),
        unit,
        "",
        threshold_bits,
        np.array([[len(f) for f in row] for row in frames], np.uint32),
        np.array([[checksum(as_array(f)) if f else 0 for f in row] for row in frames], np.uint64),
        np.stack([c.residual_sq for c in chunks], axis=1),
        np.zeros(len(TIERS), np.int64),
        NO_TAILS,
    )
    pack_id = pack_id_of([tensor.content])
    root = folder / pack_id
    root.mkdir(parents=True)
    for tier, row in zip(TIERS, frames, strict=True):
        frames_path(root, tier).write_bytes(b"".join(row))
    write_index(root, root, [tensor])
    return PackSource(pack_id, str(root)), tensor


def plan_from(
    family: PackedFamily,
    operator: str,
    params: Params = (),
    model_params: Sequence[Params] | None = None,
    levels: Sequence[Levels] = (),
    *,
    out_dtype: str = "BF16",
    n_experts: int | None = None,
) -> MergePlan:
    """A plan that merges `w`: of expert i `levels[i]` from its pack, the rest as it is stored."""
    views = [view_of(c.by_name["w"], i) for i, c in enumerate(family.checkpoints)]
    inputs = []
    for i, view in enumerate(views[1:][:n_experts]):
        packed = levels[i] if i < len(levels) else ()
        own = model_params[i] if model_params else (("weight", 1.0),)
        inputs.append(
            ExpertInput(
                i,
                view,
                content_of(family.stored[1 + i]),
                own,
                ((0, NUMEL),),
                _rest([(a, b) for a, b, _ in packed]),
                packed=_packed(i, family.tensors[i], packed) if packed else None,
            )
        )
    base = BaseInput(views[0], content_of(family.stored[0]))
    task = TensorTask("w", SHAPE, out_dtype, operator, params, SEED, base, tuple(inputs))
    return replace(plan_of(family.checkpoints, [task]), packs=family.packs)


def _packed(number: int, tensor: PackedTensor, levels: Levels) -> PackedInput:
    ranges = []
    for start, stop, level in levels:
        assert start % CHUNK_ELEMS == 0
        chunks = slice(start // CHUNK_ELEMS, -(-stop // CHUNK_ELEMS))
        rows = [TIERS.index(tier) for tier in TIERS_OF[level]]
        nbytes = int(tensor.nbytes[rows, chunks].sum())
        ranges.append(PackedRange(start, stop, level, nbytes, level == "X"))
    return PackedInput(number, "w", tensor.unit, tensor.factors, 0, tuple(ranges))


def _rest(taken: Sequence[Range]) -> tuple[Range, ...]:
    edges = [0, *(e for r in coalesce(taken) for e in r), NUMEL]
    return coalesce(zip(edges[::2], edges[1::2], strict=True))


def reader_of_base(family: PackedFamily) -> ReadBase:
    """Reads stored elements of the family's base."""

    def read(start_elem: int, stop_elem: int, out: memoryview) -> None:
        out[:] = family.stored[0][2][2 * start_elem : 2 * stop_elem]

    return read
