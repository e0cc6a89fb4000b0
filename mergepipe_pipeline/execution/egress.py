"""What a recipe or a plan fetches from addresses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.plan import LayerTask, MergePlan
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.remote.address import is_address
from mergepipe_pipeline.remote.fetch import METER
from mergepipe_pipeline.resolution.resolve import ResolvedRecipe
from mergepipe_pipeline.storage.source import FileRange
from mergepipe_pipeline.warehouse import Warehouse

if TYPE_CHECKING:
    from mergepipe_pipeline.remote.egress import Egress


def egress_of_recipe(warehouse: Warehouse, resolved: ResolvedRecipe) -> tuple[Egress, ...]:
    """Return what planning and merging a recipe fetch, per address; of an expert at most.

    A checkpoint that nobody has read is read whole, to learn what it holds.
    """
    base = set(resolved.base.checkpoints) if resolved.base else set()
    all_of_them = {c: None for m in resolved.models for c in m.checkpoints if is_address(c.root)}
    egresses = (_of_checkpoint(warehouse, resolved, c, c in base) for c in all_of_them)
    return tuple(egresses)


def _of_checkpoint(
    warehouse: Warehouse, resolved: ResolvedRecipe, checkpoint: Checkpoint, is_base: bool
) -> Egress:
    from mergepipe_pipeline.remote.egress import egress_of  # imported late: few merges need it

    is_read = warehouse.catalog.digests(checkpoint.checkpoint_id) is not None
    # Statistics may be missing of what was read before, against another base.
    is_known = is_read and resolved.cost.analysis_bytes == 0
    why = "merged on" if is_base else "merged" if is_known else "read whole to learn what it holds"
    ranges = (FileRange(t.file, t.start_byte, t.start_byte + t.nbytes) for t in checkpoint.tensors)
    egress = egress_of(checkpoint.root, ranges, why)
    budget = resolved.cost.budget_bytes
    if is_read and not is_known and not is_base:
        return replace(egress, at_most=True)
    if is_base or not is_known or budget is None or budget >= egress.nbytes:
        return egress
    share = budget / max(1, egress.nbytes)
    return replace(
        egress,
        requests=round(egress.requests * share),
        nbytes=budget,
        at_most=True,
    )


def egress_of_plan(
    plan: MergePlan, layers: Sequence[LayerTask] | None = None
) -> tuple[Egress, ...]:
    """Return what merging a plan's layers (default: all) fetches, per address."""
    egresses: list[Egress] = []
    for number, source in enumerate(plan.sources):
        if is_address(source.root):
            from mergepipe_pipeline.engine.sources import file_ranges
            from mergepipe_pipeline.remote.egress import egress_of

            chosen = plan.layers if layers is None else layers
            read = [r for g in (False, True) for r in file_ranges(chosen, number, gated=g)]
            egresses.append(egress_of(source.root, read, "merged"))
    return tuple(egresses)


@contextmanager
def downloads_shown(
    progress: Progress, plan: MergePlan, layers: Sequence[LayerTask]
) -> Iterator[None]:
    """Draw what merging layers fetches, while the context lasts."""
    total = sum(e.nbytes for e in egress_of_plan(plan, layers))
    if not total:
        yield
        return
    with progress.task(f"download {plan.recipe_name}", total) as advance, METER.told(advance):
        yield
