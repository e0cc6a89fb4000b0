"""About what a pack would take and save before it is made: some chunks are encoded to see.

Statistics of deltas do not tell the sizes of exact tiers, which follow from how far apart the
numbers of expert and base lie in places of the last bit. Chunks that are spread evenly do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

import numpy as np

from mergepipe_pipeline.analysis.order import from_top
from mergepipe_pipeline.checkpoints.reader import BlockReader
from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.domain.model import Model, grid_for
from mergepipe_pipeline.domain.pack import CHUNK_ELEMS, TIERS, TIERS_OF, X20_DENSITY, Tier
from mergepipe_pipeline.domain.stats import HIST_SHIFT, TensorStats
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.packs.contents import packed_contents, packed_names
from mergepipe_pipeline.packs.throughput import ENCODE_ELEM_S, READ_BYTES_PER_S
from mergepipe_pipeline.storage.source import open_source
from mergepipe_pipeline.warehouse import Warehouse

#: Chunks of an expert that are encoded: 12 MiB of bfloat16 of it and its base, 0.1 s of a core.
_SAMPLES = 48


@dataclass(frozen=True, slots=True)
class PackEstimate:
    """About what packing an expert would take: bytes per tier, seconds; and what it would save.

    `pays_back_after` exact merges have read as many bytes less as packing takes time; None if
    tiers X20 and X are not smaller than the expert.
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
        return sum(self.tier_nbytes[t] for t in TIERS_OF["X"])


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
    nbytes = sum(v.stored_nbytes for v in views)
    sizes = dict(zip(TIERS, (rates * nbytes).astype(int).tolist(), strict=True))
    n_elems = sum(v.numel for v in views)
    saved_nbytes = nbytes - sizes["X20"] - sizes["X"]
    return PackEstimate(
        expert.name,
        base.name,
        sizes,
        nbytes,
        expert.checkpoint.nbytes,
        _packing_s(warehouse, n_elems, nbytes),
        pays_back_after(warehouse, n_elems, nbytes, saved_nbytes),
    )


def pays_back_after(
    warehouse: Warehouse, n_elems: int, nbytes: int, saved_nbytes: int
) -> int | None:
    """Exact merges that, each reading `saved_nbytes` less, save the seconds that packing takes.

    Packing `n_elems` elements in `nbytes`, by what it usually takes: a first run compiles kernels.
    None if no merge reads less.
    """
    if saved_nbytes <= 0:
        return None
    seconds = _packing_s(warehouse, n_elems, nbytes)
    return max(1, ceil(seconds * READ_BYTES_PER_S / saved_nbytes))


def _packing_s(warehouse: Warehouse, n_elems: int, nbytes: int) -> float:
    read_s = 2 * nbytes / READ_BYTES_PER_S  # the expert and its base
    return max(n_elems * ENCODE_ELEM_S / threads.analysis(), read_s)


def _stats(warehouse: Warehouse, expert: Model, base: Model) -> dict[str, TensorStats]:
    """What the catalog knows of an expert's tensors, by name, without reading any."""
    facts = warehouse.catalog.facts(base.model_id, expert.model_id)
    stats = facts.stats(grid_for(base, None).block_elems, without=("sketch", "sample"))
    return {t.tensor: t for t in stats.tensors if t.tensor == t.base_tensor}


def _has_pack(warehouse: Warehouse, expert: Model, base: Model) -> bool:
    digests = [
        [warehouse.catalog.digests(c.checkpoint_id) or {} for c in model.checkpoints]
        for model in (expert, base)
    ]
    if not all(of for model in digests for of in model):
        return False
    return warehouse.packs.best(packed_contents(expert, base, *digests)) is not None


def _spread(views: Sequence[TensorView], samples: int) -> Iterator[tuple[TensorView, int]]:
    """Chunks as (tensor, number) that are spread evenly over all bytes."""
    ends = np.cumsum([v.stored_nbytes for v in views])
    for at in (np.arange(samples) + 0.5) / samples * int(ends[-1]):
        number = int(np.searchsorted(ends, at, side="right"))
        view = views[number]
        start = int(ends[number]) - view.stored_nbytes
        yield view, int((at - start) // (CHUNK_ELEMS * itemsize(view.dtype)))


def _encoded(
    expert: Model, base: Model, view: TensorView, chunk: int, stats: TensorStats
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
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
    checkpoint = model.checkpoints[part.source]
    with open_source(checkpoint.root, "exact") as source:
        return BlockReader(source, checkpoint, None).read(part.entry, first, stop)
