"""The verb `analyze`: one streaming pass per expert and base, remembered for later merges.

`ensure_*` do only what the catalog does not know yet; planning calls them, so a recipe over unknown
checkpoints works in one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.pipeline.progress import Progress, Silent
from mergepipe_pipeline.pipeline.register import resolve
from mergepipe_pipeline.spec.blocks import BlockGrid
from mergepipe_pipeline.spec.checkpoint import Checkpoint
from mergepipe_pipeline.spec.stats import ExpertStats
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Analysis:
    """What `analyze` did for one checkpoint; `norm` is ‖δ‖₂ over the whole checkpoint."""

    name: str
    base: str | None
    content_sha256: str
    fresh: bool
    norm: float | None
    zero_blocks: int
    blocks: int


def analyze(
    home: Warehouse,
    names: Sequence[str] = (),
    *,
    base: str | None = None,
    block_elems: int | None = None,
    progress: Progress | None = None,
) -> tuple[Analysis, ...]:
    """Analyse the named checkpoints (default: all that have a base) against their bases.

    Without a base only the tensors' digests are taken. Raises what opening the checkpoints raises.
    """
    catalog = Catalog(home.catalog)
    out = []
    for name in names or catalog.names():
        registration = resolve(home, name)
        base_name = base or registration.base
        if base_name is None:
            fresh = catalog.digests(registration.checkpoint.checkpoint_id) is None
            ensure_digests(home, registration.checkpoint, progress)
            content = catalog.content_sha256(registration.checkpoint.checkpoint_id)
            out.append(Analysis(registration.name, None, content, fresh, None, 0, 0))
            continue
        against = resolve(home, base_name)
        grid = grid_for(against.checkpoint, block_elems)
        fresh = not _is_known(catalog, registration.checkpoint, against.checkpoint, grid)
        stats = ensure_stats(home, registration.checkpoint, against.checkpoint, grid, progress)
        out.append(
            Analysis(
                registration.name,
                against.name,
                catalog.content_sha256(registration.checkpoint.checkpoint_id),
                fresh,
                sum(t.l2sq for t in stats.tensors) ** 0.5,
                sum(int((t.block_nonzero == 0).sum()) for t in stats.tensors),
                sum(len(t.block_nonzero) for t in stats.tensors),
            )
        )
    return tuple(out)


def grid_for(base: Checkpoint, block_elems: int | None) -> BlockGrid:
    """The block grid of a base: as asked for, or from the checkpoint's size."""
    return BlockGrid(block_elems) if block_elems else BlockGrid.for_numel(base.numel)


def ensure_digests(
    home: Warehouse, checkpoint: Checkpoint, progress: Progress | None = None
) -> Mapping[str, str]:
    """SHA-256 of every tensor of a checkpoint, from the catalog or by one pass over it."""
    catalog = Catalog(home.catalog)
    known = catalog.digests(checkpoint.checkpoint_id)
    if known is not None:
        return known
    from mergepipe_pipeline.analysis.digests import digest_checkpoint

    with (progress or Silent()).task(f"digest {checkpoint.name}", checkpoint.nbytes) as advance:
        digests = digest_checkpoint(checkpoint, advance)
    catalog.put_digests(checkpoint.checkpoint_id, digests)
    return digests


def ensure_stats(
    home: Warehouse,
    expert: Checkpoint,
    base: Checkpoint,
    grid: BlockGrid,
    progress: Progress | None = None,
) -> ExpertStats:
    """Statistics of an expert against a base, from the catalog or by one pass over both.

    The pass also yields the digests of both, where it sees every tensor of them.
    """
    catalog = Catalog(home.catalog)
    if _is_known(catalog, expert, base, grid):
        known = catalog.stats(base.checkpoint_id, expert.checkpoint_id, grid.block_elems)
        assert known is not None
        return known
    from mergepipe_pipeline.analysis.statistics import analyze_expert

    with (progress or Silent()).task(f"analyze {expert.name}", expert.nbytes) as advance:
        stats = analyze_expert(expert, base, grid, progress=advance)
    catalog.put_stats(stats)
    if {t.tensor for t in stats.tensors} >= {t.name for t in expert.tensors}:
        catalog.put_digests(expert.checkpoint_id, {t.tensor: t.sha256 for t in stats.tensors})
    if {t.tensor for t in stats.tensors} >= {t.name for t in base.tensors}:
        catalog.put_digests(base.checkpoint_id, {t.tensor: t.base_sha256 for t in stats.tensors})
    ensure_digests(home, expert, progress)
    ensure_digests(home, base, progress)
    return stats


def _is_known(catalog: Catalog, expert: Checkpoint, base: Checkpoint, grid: BlockGrid) -> bool:
    return (
        catalog.has_stats(base.checkpoint_id, expert.checkpoint_id, grid.block_elems)
        and catalog.digests(expert.checkpoint_id) is not None
        and catalog.digests(base.checkpoint_id) is not None
    )
