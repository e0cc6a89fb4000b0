"""Takes statistics over from equal contents: a new version of an expert, or a copy by another name.

Reading for digests is cheaper than analysing, but dearer than doing both at once; so digests come
first only where there is reason to expect known contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mergepipe_pipeline.catalog.catalog import Catalog, Content, Source
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.pipeline.digests import ensure_digests
from mergepipe_pipeline.pipeline.progress import Progress
from mergepipe_pipeline.spec.blocks import BlockGrid
from mergepipe_pipeline.spec.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.spec.model import Model, view_sha256
from mergepipe_pipeline.spec.stats import ExpertStats, TensorStats
from mergepipe_pipeline.storage.source import CheckpointSource, open_source
from mergepipe_pipeline.warehouse import Warehouse

Pair = tuple[str, str]
#: So many of the largest tensors are compared, by so many bytes of each.
_PROBES, _PROBE_NBYTES = 8, 4096


def take_over(
    home: Warehouse,
    expert: Model,
    base: Model,
    pairs: Sequence[Pair],
    grid: BlockGrid,
    progress: Progress | None = None,
) -> list[Pair]:
    """Those of `pairs` (expert's tensor, base's tensor) that must be read; the others are known.

    Statistics of equal contents are copied under the expert's id.
    """
    catalog = Catalog(home.catalog)
    if len(expert.checkpoints) > 1 or expert.is_partial or not _expects_known(catalog, expert):
        return list(pairs)
    known = catalog.contents(grid.block_elems)
    sources: dict[tuple[str, str], dict[Pair, Source]] = {}
    for pair, content in _contents(home, expert, base, pairs, progress).items():
        if source := known.get(content):
            sources.setdefault((source.base_id, source.checkpoint_id), {})[pair] = source
    taken: list[TensorStats] = []
    for ids, wanted in sources.items():
        found = catalog.stats(*ids, grid.block_elems)
        for pair, source in wanted.items():
            if found and (stats := found.by_pair.get((source.tensor, pair[1]))):
                taken.append(replace(stats, tensor=pair[0]))
    if taken:
        catalog.put_stats(
            ExpertStats(base.model_id, expert.model_id, grid.block_elems, tuple(taken))
        )
    done = {(t.tensor, t.base_tensor) for t in taken}
    return [pair for pair in pairs if pair not in done]


def _contents(
    home: Warehouse,
    expert: Model,
    base: Model,
    pairs: Sequence[Pair],
    progress: Progress | None,
) -> dict[Pair, Content]:
    """What is compared, of the pairs of which both tensors are as stored."""
    mine, theirs = (
        [ensure_digests(home, c, progress) for c in model.checkpoints] for model in (expert, base)
    )
    out = {}
    for pair in pairs:
        a, b = expert.views[pair[0]], base.views[pair[1]]
        if a.whole and b.whole:
            digests = view_sha256(a, mine), view_sha256(b, theirs)
            out[pair] = Content(*digests, a.dtype, b.dtype, b.name)
    return out


def _expects_known(catalog: Catalog, expert: Model) -> bool:
    """An earlier version of the name is known, or a checkpoint that looks the same."""
    own = expert.checkpoint
    if catalog.digests(own.checkpoint_id) is not None:
        return True
    for name in catalog.names():
        for registration in catalog.history(name):
            other = registration.checkpoint
            if other.checkpoint_id == own.checkpoint_id:
                continue
            if catalog.digests(other.checkpoint_id) is None:
                continue
            if name == own.name or _looks_like(own, other):
                return True
    return False


def _looks_like(a: Checkpoint, b: Checkpoint) -> bool:
    """Whether both have the same headers, and some of the largest tensors begin alike."""
    shape = [(f.nbytes, f.header_sha256) for f in a.files]
    if shape != [(f.nbytes, f.header_sha256) for f in b.files]:
        return False
    probes = sorted(a.tensors, key=lambda t: -t.nbytes)[:_PROBES]
    try:
        with open_source(a.root) as one, open_source(b.root) as other:
            return all(
                _probe(one, t) == _probe(other, b.by_name[t.name]) for t in probes if t.nbytes
            )
    except (MergePipeError, OSError):
        return False


def _probe(source: CheckpointSource, t: TensorEntry) -> bytes:
    middle = t.start_byte + t.nbytes // 2
    return source.read_range(t.file, middle, min(_PROBE_NBYTES, t.nbytes - t.nbytes // 2))
