"""What an expert's pack is made from, and about what it would take and save before it is made.

The sizes of exact tiers do not follow from statistics of deltas, but from how far apart the numbers
of expert and base lie in places of the last bit: some chunks, spread evenly, are encoded to see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

import numpy as np

from mergepipe_pipeline.analysis.order import from_top
from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.checkpoints.reader import open_reader
from mergepipe_pipeline.checkpoints.stored import read_stored
from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.domain.model import Model, grid_for
from mergepipe_pipeline.domain.pack import (
    CHUNK_ELEMS,
    FACTORED,
    TIERS,
    X20_DENSITY,
    TensorContent,
    Tier,
)
from mergepipe_pipeline.domain.stats import HIST_SHIFT, TensorStats
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.execution.packs import known_digests
from mergepipe_pipeline.facts.contents import Contents
from mergepipe_pipeline.packs.contents import packed_contents, packed_names
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.warehouse import Warehouse

#: How fast any disk is taken to be.
_READ_BYTES_PER_S = 1e9
#: Seconds of one core to pack an element: both models read and compared, all tiers encoded, the
#: exact ones decoded again, hashed and written.
_ENCODE_ELEM_S = 90e-9
#: Chunks of an expert that are encoded: 12 MiB of bfloat16 of it and its base, 0.1 s of a core.
_SAMPLES = 48


def contents_of(
    warehouse: Warehouse, expert: Model, base: Model, progress: Progress | None = None
) -> tuple[TensorContent, ...]:
    """Return what a pack of an expert against a base is made from; computes missing digests."""
    digests, base_digests = (
        [Contents(warehouse, c, progress).learn() for c in model.checkpoints]
        for model in (expert, base)
    )
    return packed_contents(expert, base, digests, base_digests)


@dataclass(frozen=True, slots=True)
class PackEstimate:
    """About what packing an expert would take: bytes per tier, seconds; and what it would save.

    Tier X is as long as without directions, which are not looked for. `pays_back_after` exact
    merges have read as many bytes less as packing takes time; None if they read no less.
    """

    name: str
    base: str
    tier_nbytes: Mapping[Tier, int]
    packed_nbytes: int
    expert_nbytes: int
    seconds: float
    pays_back_after: int | None

    @property
    def exact_nbytes(self) -> int:
        """Bytes that an exact merge reads of the pack in place of the tensors in it."""
        return self.tier_nbytes["X"]


def estimate_pack(
    warehouse: Warehouse, expert: Model, base: Model, samples: int = _SAMPLES
) -> PackEstimate | None:
    """The estimated size of an expert's pack; None if it has one, or is not analysed.

    Reads some chunks, and writes nothing. Raises what reading the checkpoints raises.
    """
    names = packed_names(expert, base)
    stats = _stats(warehouse, expert, base)
    if not names or not stats.keys() >= set(names) or _has_pack(warehouse, expert, base):
        return None
    views = [expert.views[name] for name in names]
    rates = np.zeros(len(TIERS))
    for view, chunk in _spread(views, samples):
        rates += _encoded(expert, base, view, chunk, stats[view.name]) / samples
    nbytes = sum(v.numel * itemsize(v.dtype) for v in views)
    sizes = dict(zip(TIERS, (rates * nbytes).astype(int).tolist(), strict=True))
    sizes |= _factors_nbytes(views)
    n_elems = sum(v.numel for v in views)
    return PackEstimate(
        expert.name,
        base.name,
        sizes,
        nbytes,
        expert.checkpoint.nbytes,
        _packing_s(n_elems, nbytes),
        pays_back_after(n_elems, nbytes, sizes["X"]),
    )


def pays_back_after(n_elems: int, nbytes: int, exact_nbytes: int) -> int | None:
    """Exact merges that, reading less, save the seconds that packing takes; None if never.

    Packing `n_elems` elements in `nbytes`, by what it usually takes: a first run compiles kernels.
    """
    saved_nbytes = nbytes - exact_nbytes
    if saved_nbytes <= 0:
        return None
    return max(1, ceil(_packing_s(n_elems, nbytes) * _READ_BYTES_PER_S / saved_nbytes))


def _packing_s(n_elems: int, nbytes: int) -> float:
    read_s = 2 * nbytes / _READ_BYTES_PER_S  # the expert and its base
    return max(n_elems * _ENCODE_ELEM_S / threads.analysis(), read_s)


def _stats(warehouse: Warehouse, expert: Model, base: Model) -> dict[str, TensorStats]:
    """Return the statistics of an expert's tensors that are known, by name."""
    facts = warehouse.catalog.facts(base.model_id, expert.model_id)
    stats = facts.stats(grid_for(base, None).block_elems, without=("sample",))
    return {t.tensor: t for t in stats.tensors if t.tensor == t.base_tensor}


def _has_pack(warehouse: Warehouse, expert: Model, base: Model) -> bool:
    digests, base_digests = (known_digests(warehouse.catalog.digests, m) for m in (expert, base))
    if digests is None or base_digests is None:
        return False
    return warehouse.packs.of(packed_contents(expert, base, digests, base_digests)) is not None


def _spread(views: Sequence[TensorView], samples: int) -> Iterator[tuple[TensorView, int]]:
    """Chunks as (tensor, number) that are spread evenly over all bytes."""
    ends = np.cumsum([v.numel * itemsize(v.dtype) for v in views])
    for at in (np.arange(samples) + 0.5) / samples * int(ends[-1]):
        number = int(np.searchsorted(ends, at, side="right"))
        view = views[number]
        start = int(ends[number]) - view.numel * itemsize(view.dtype)
        yield view, int((at - start) // (CHUNK_ELEMS * itemsize(view.dtype)))


def _factors_nbytes(views: Sequence[TensorView]) -> dict[Tier, int]:
    """Bytes of each rung's frames, if all tensors have factors."""
    from mergepipe_pipeline.packs.product import rung_nbytes

    each = np.array([rung_nbytes(view.shape) for view in views])  # [views, rungs]
    return dict(zip(FACTORED, each.sum(axis=0).tolist(), strict=True))


def _encoded(
    expert: Model, base: Model, view: TensorView, chunk: int, stats: TensorStats
) -> F64Array:
    """float64 [tiers]: bytes of a chunk's frames, per byte of the expert."""
    # Imported here: it loads Numba, a quarter of a second that is lost if nothing is estimated.
    from mergepipe_pipeline.packs.codec import BITS_OF, encode_chunk, unit_of

    first, stop = chunk * CHUNK_ELEMS, min(view.numel, (chunk + 1) * CHUNK_ELEMS)
    expert_bits, base_bits = (
        np.frombuffer(_read(model, model.views[view.name], first, stop), BITS_OF[view.dtype])
        for model in (expert, base)
    )
    unit, threshold = unit_of(stats.l2sq, stats.nonzero), _threshold(stats, prod(view.shape))
    frames = encode_chunk(expert_bits, base_bits, view.dtype, unit, threshold).frames
    return np.array([len(frames[t]) for t in TIERS]) / expert_bits.nbytes


def _threshold(stats: TensorStats, numel: int) -> int:
    """About the least |δ| in X20, as float32 pattern: the bin of the histogram that it lies in."""
    keep = max(1, int(X20_DENSITY * numel))
    if keep >= stats.nonzero:
        return 0
    bin_, _ = from_top(stats.hist_bins.astype(np.int64), stats.hist_counts, keep)
    return bin_ << HIST_SHIFT


def _read(model: Model, view: TensorView, first: int, stop: int) -> bytearray:
    """Stored elements [first, stop) of a whole tensor."""
    (part,) = view.stored
    raw = bytearray((stop - first) * itemsize(view.dtype))
    with open_reader(model.checkpoints[part.source], "exact") as reader:
        read_stored(lambda _: reader, view, first, stop, memoryview(raw))
    return raw
