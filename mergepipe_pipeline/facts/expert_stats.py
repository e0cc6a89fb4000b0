"""Statistics of experts against a base: one streaming pass over what the catalog lacks.

The verb `analyze` asks for them, and so does planning, so that a recipe over unknown checkpoints
works in one step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.memory import release_freed
from mergepipe_pipeline.concurrency.workers import TaskQueue, Workers
from mergepipe_pipeline.contents.input_segments import pass_inputs
from mergepipe_pipeline.contents.tensor_digests import Contents, Known, put_taken, verify_place
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.segments import Segments
from mergepipe_pipeline.domain.stats import ExpertStats, TensorStats
from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.facts.reuse import StatsReuse
from mergepipe_pipeline.progress import Progress, Silent
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
        for name, base_view in base.views.items()
        if (view := expert.views.get(name)) is not None
        and view.shape == base_view.shape
        and view.dtype in FLOATING
        and base_view.dtype in FLOATING
    ]


def ensure_stats(
    warehouse: Warehouse,
    experts: Sequence[tuple[Model, Sequence[Pair]]],
    base: Model,
    grid: BlockGrid,
    progress: Progress | None = None,
    *,
    without: Collection[str] = (),
) -> list[ExpertStats]:
    """Statistics of experts' tensors against a base's, from the catalog or by reading them.

    Statistics of equal contents, under whatever name, are copied; the rest is read in one
    pass in which the base is read once for all experts. What a pass has done is remembered as it
    goes, so that a crash costs little. The pass also yields digests. `without`: see
    `Catalog.stats`.
    """
    catalog = warehouse.catalog
    checkpoints = [c for model in (base, *(m for m, _ in experts)) for c in model.checkpoints]
    for checkpoint in checkpoints:
        verify_place(warehouse, checkpoint, progress)
    of_base = partial(catalog.missing_pairs, base.model_id)
    missing = [(m, of_base(m.model_id, grid.block_elems, pairs)) for m, pairs in experts]
    take_over = StatsReuse(warehouse, base, grid, progress)
    missing = [(m, take_over.rest(m, pairs)) for m, pairs in missing if pairs]
    missing = [(m, pairs) for m, pairs in missing if pairs]
    for batch in _batches(missing):
        _analyze(warehouse, batch, base, grid, progress or Silent())
    for checkpoint in checkpoints if missing else ():  # they may have changed while they were read
        verify_place(warehouse, checkpoint, progress)
    for model in (base, *(m for m, _ in experts)):
        _put_known_digests(catalog, model, base, grid)

    def load(model: Model) -> ExpertStats:
        stats = catalog.stats(base.model_id, model.model_id, grid.block_elems, without=without)
        return stats or ExpertStats(base.model_id, model.model_id, grid.block_elems, ())

    with Workers(threads.CATALOG) as workers:
        return list(workers.map(load, (m for m, _ in experts)))


def _batches(
    experts: Sequence[tuple[Model, Sequence[Pair]]],
) -> Iterator[Sequence[tuple[Model, Sequence[Pair]]]]:
    """As many experts at once as fit into the memory of a pass."""
    for start in range(0, len(experts), _EXPERTS_PER_PASS):
        yield experts[start : start + _EXPERTS_PER_PASS]


def _analyze(
    warehouse: Warehouse,
    batch: Sequence[tuple[Model, Sequence[Pair]]],
    base: Model,
    grid: BlockGrid,
    progress: Progress,
) -> None:
    """Read a batch of experts beside their base, and remember what the pass finds as it goes."""
    from mergepipe_pipeline.analysis.statistics import analyze_experts

    nbytes = sum(m.views[tensor].stored_nbytes for m, pairs in batch for tensor, _ in pairs)
    names = ", ".join(m.name for m, _ in batch[:3]) + (", …" if len(batch) > 3 else "")
    models = [model for model, _ in batch]
    inputs = pass_inputs(warehouse, [*models, base], progress)
    with (
        progress.task(f"analyze {names}", nbytes) as advance,
        Workers(threads.CATALOG, finish_all=True) as keepers,
    ):
        findings = _Findings(warehouse, models, base, grid, keepers.queue())
        for done in analyze_experts(batch, base, grid, progress=advance, known=inputs):
            for number, stats in done:
                findings.add(number, stats)
            if findings.unsaved_nbytes >= _SAVE_NBYTES:
                findings.save()
        findings.save()
        findings.wait()


class _Findings:
    """Statistics and digests of a pass over `models` and their base, not yet handed to the disk."""

    def __init__(
        self,
        warehouse: Warehouse,
        models: Sequence[Model],
        base: Model,
        grid: BlockGrid,
        saving: TaskQueue[None],
    ) -> None:
        self._warehouse, self._saving = warehouse, saving
        self._models, self._base, self._grid = models, base, grid
        self._contents = Contents(warehouse)
        self._stats: list[list[TensorStats]] = [[] for _ in models]
        self._digested: dict[str, dict[str, tuple[Segments, ...]]] = {}
        self.unsaved_nbytes = 0

    def add(self, number: int, stats: TensorStats) -> None:
        """Take the statistics of a tensor of a model.

        Raises CorruptionError if the tensor has other content than when it was read before.
        """
        model = self._models[number]
        self._stats[number].append(stats)
        self._add_digests(model, stats.tensor, stats.segments)
        self._add_digests(self._base, stats.base_tensor, stats.base_segments)
        self.unsaved_nbytes += model.views[stats.tensor].stored_nbytes

    def _add_digests(self, model: Model, tensor: str, taken: tuple[Segments, ...]) -> None:
        if not taken:
            return
        part = model.views[tensor].stored[0]
        checkpoint = model.checkpoints[part.source]
        identified = Known(checkpoint.checkpoint_id, checkpoint)
        self._contents.refuse_changed(identified, part.entry.name, taken[0].content)
        self._digested.setdefault(checkpoint.checkpoint_id, {})[part.entry.name] = taken

    def save(self) -> None:
        """Hand them to the disk, after what was saved before is written."""
        self.wait()
        for model, tensors in zip(self._models, self._stats, strict=True):
            if tensors:
                ids = self._base.model_id, model.model_id
                stats = ExpertStats(*ids, self._grid.block_elems, tuple(tensors))
                self._saving.put(partial(self._warehouse.catalog.put_stats, stats))
                tensors.clear()
        for checkpoint_id, taken in self._digested.items():
            self._saving.put(partial(put_taken, self._warehouse, checkpoint_id, taken))
        self._digested = {}
        self.unsaved_nbytes = 0

    def wait(self) -> None:
        """Wait until all is written. Raises what saving raised."""
        for _ in self._saving.rest():
            pass
        release_freed()  # allocators would keep it: 614 MiB at the end of 20 experts, not 489


def _put_known_digests(catalog: Catalog, model: Model, base: Model, grid: BlockGrid) -> None:
    """Remember a model's digests if passes saw every tensor of its one checkpoint."""
    (checkpoint, *more) = model.checkpoints
    if more or catalog.digests(checkpoint.checkpoint_id) is not None:
        return
    digests = catalog.known_digests(base.model_id, model.model_id, grid.block_elems)
    if digests.keys() == checkpoint.by_name.keys():
        catalog.put_digests(checkpoint.checkpoint_id, digests)
