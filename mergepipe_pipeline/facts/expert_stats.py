"""The verb `analyze`: one streaming pass per expert and base, remembered for later merges.

`ensure_*` do only what the catalog does not know yet; planning calls them, so a recipe over unknown
checkpoints works in one step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.workers import TaskQueue, Workers
from mergepipe_pipeline.contents.input_segments import pass_inputs
from mergepipe_pipeline.contents.tensor_digests import Contents, Known, put_taken
from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.facts.reuse import StatsReuse
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.spec.blocks import BlockGrid
from mergepipe_pipeline.spec.model import Model
from mergepipe_pipeline.spec.segments import Segments
from mergepipe_pipeline.spec.stats import ExpertStats, TensorStats
from mergepipe_pipeline.warehouse import Warehouse

#: (expert's tensor, base's tensor).
Pair = tuple[str, str]
#: Each holds a few windows of its own in memory.
_EXPERTS_PER_PASS = 16
#: Expert bytes between two savings of what a pass has done.
_SAVE_NBYTES = 4 << 30


def common_pairs(expert: Model, base: Model) -> list[Pair]:
    """The tensors that both have with equal shape and floating dtypes, in the base's order."""
    return [
        (name, name)
        for name, theirs in base.views.items()
        if (mine := expert.views.get(name)) is not None
        and mine.shape == theirs.shape
        and mine.dtype in FLOATING
        and theirs.dtype in FLOATING
    ]


def ensure_stats(
    warehouse: Warehouse,
    wanted: Sequence[tuple[Model, Sequence[Pair]]],
    base: Model,
    grid: BlockGrid,
    progress: Progress | None = None,
    *,
    without: Collection[str] = (),
) -> list[ExpertStats]:
    """Statistics of experts' tensors against a base's, from the catalog or by reading them.

    What is known of equal contents, under whatever name, is taken over; the rest is read in one
    pass in which the base is read once for all experts. What a pass has done is remembered as it
    goes, so that a crash costs little. The pass also yields digests. `without`: see
    `Catalog.stats`.
    """
    catalog = warehouse.catalog
    of_base = partial(catalog.missing_pairs, base.model_id)
    missing = [(m, of_base(m.model_id, grid.block_elems, pairs)) for m, pairs in wanted]
    take_over = StatsReuse(warehouse, base, grid, progress)
    missing = [(m, take_over.rest(m, pairs)) for m, pairs in missing if pairs]
    for batch in _batches([(m, pairs) for m, pairs in missing if pairs]):
        _analyze(warehouse, batch, base, grid, progress or Silent())
    for model in (base, *(m for m, _ in wanted)):
        _put_known_digests(catalog, model, base, grid)

    def load(model: Model) -> ExpertStats:
        found = catalog.stats(base.model_id, model.model_id, grid.block_elems, without=without)
        return found or ExpertStats(base.model_id, model.model_id, grid.block_elems, ())

    with Workers(threads.CATALOG) as workers:
        return list(workers.map(load, (m for m, _ in wanted)))


def _batches(
    wanted: Sequence[tuple[Model, Sequence[Pair]]],
) -> Iterator[Sequence[tuple[Model, Sequence[Pair]]]]:
    """As many experts at once as fit into the memory of a pass."""
    for start in range(0, len(wanted), _EXPERTS_PER_PASS):
        yield wanted[start : start + _EXPERTS_PER_PASS]


def _analyze(
    warehouse: Warehouse,
    batch: Sequence[tuple[Model, Sequence[Pair]]],
    base: Model,
    grid: BlockGrid,
    progress: Progress,
) -> None:
    from mergepipe_pipeline.analysis.statistics import analyze_experts

    catalog = warehouse.catalog
    found: list[list[TensorStats]] = [[] for _ in batch]
    digested: dict[str, dict[str, tuple[Segments, ...]]] = {}
    unsaved_nbytes = 0

    def save(saving: TaskQueue[None]) -> None:
        for _ in saving.rest():  # what is found waits for the disk once
            pass
        for (model, _), tensors in zip(batch, found, strict=True):
            if tensors:
                stats = ExpertStats(base.model_id, model.model_id, grid.block_elems, tuple(tensors))
                saving.put(partial(catalog.put_stats, stats))
                tensors.clear()
        for checkpoint_id, taken in digested.items():
            saving.put(partial(put_taken, warehouse, checkpoint_id, taken))
        digested.clear()

    nbytes = sum(m.views[mine].stored_nbytes for m, pairs in batch for mine, _ in pairs)
    names = ", ".join(m.name for m, _ in batch[:3]) + (", …" if len(batch) > 3 else "")
    contents = Contents(warehouse)
    inputs = pass_inputs(warehouse, [*(model for model, _ in batch), base], progress)
    with (
        progress.task(f"analyze {names}", nbytes) as advance,
        Workers(threads.CATALOG, finish_all=True) as keepers,
    ):
        saving: TaskQueue[None] = keepers.queue()
        for done in analyze_experts(batch, base, grid, progress=advance, known=inputs):
            for number, stats in done:
                found[number].append(stats)
                model = batch[number][0]
                for of, name, taken in (
                    (model, stats.tensor, stats.segments),
                    (base, stats.base_tensor, stats.base_segments),
                ):
                    if taken:
                        part = of.views[name].stored[0]
                        whose = of.checkpoints[part.source]
                        known = Known(whose.checkpoint_id, whose)
                        contents.refuse_changed(known, part.entry.name, taken[0].content)
                        digested.setdefault(whose.checkpoint_id, {})[part.entry.name] = taken
                unsaved_nbytes += batch[number][0].views[stats.tensor].stored_nbytes
            if unsaved_nbytes >= _SAVE_NBYTES:
                save(saving)
                unsaved_nbytes = 0
        save(saving)
        for _ in saving.rest():
            pass


def _put_known_digests(catalog: Catalog, model: Model, base: Model, grid: BlockGrid) -> None:
    """Remember a model's digests if passes saw every tensor of its one checkpoint."""
    (checkpoint, *others) = model.checkpoints
    if others or catalog.digests(checkpoint.checkpoint_id) is not None:
        return
    known = catalog.known_digests(base.model_id, model.model_id, grid.block_elems)
    if known.keys() == checkpoint.by_name.keys():
        catalog.put_digests(checkpoint.checkpoint_id, known)
