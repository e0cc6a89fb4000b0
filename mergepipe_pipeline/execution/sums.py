"""Windows that slide: the sums that a recipe's last merge kept, and the models that changed since.

A `mean` over a training run keeps each tensor's exact sum beside the merged layer, one file for
each layer of a ref, which the next merge replaces. That one reads the sum, the models that left the
window and those that came; since sums are exact, it gives the bits of the merge of all. Where a
sum cannot be had, or what left is not there any more, all models are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.domain.plan import ExpertInput, LayerTask, MergePlan, Source, TensorTask
from mergepipe_pipeline.domain.view import moved, sources_of
from mergepipe_pipeline.engine.sums import TensorSums
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.execution.lookup import load_plan
from mergepipe_pipeline.storage.atomic import adopt_file
from mergepipe_pipeline.storage.sums import SumsReader
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Sliding:
    """Layers and their plan as the engine runs them: with what changed of a window alone.

    `sums` say by tensor how its sums come about.
    """

    plan: MergePlan
    layers: tuple[LayerTask, ...]
    sums: dict[str, TensorSums]


def sliding(
    warehouse: Warehouse, plan: MergePlan, layers: Sequence[LayerTask], *, anew: bool = False
) -> Sliding:
    """The plan of `layers` as it is to be run: from the sums that are kept, unless `anew`."""
    if plan.method != "mean" or not any(s.selector.run for s in plan.request.selected):
        return Sliding(plan, tuple(layers), {})
    past = _Past(warehouse, plan)
    sums: dict[str, TensorSums] = {}
    slid = []
    for layer in layers:
        reader = None if anew else past.reader(layer.name)
        tasks = []
        for task in layer.tasks:
            changed = past.changed(task, reader) if reader else None
            if changed:
                task, sums[task.name] = changed
            elif _is_plain(task):
                sums[task.name] = TensorSums(plan.plan_id, len(task.experts))
            tasks.append(task)
        slid.append(replace(layer, tasks=tuple(tasks)))
    roles = (*plan.roles, *("expert" for _ in past.sources[len(plan.sources) :]))
    now = replace(plan, sources=tuple(past.sources), roles=roles, layers=tuple(slid))
    return Sliding(now, now.layers, sums)


def slid_nbytes(warehouse: Warehouse, plan: MergePlan) -> int | None:
    """The bytes of experts that a merge reads beside kept sums; None where none help."""
    slid = sliding(warehouse, plan, plan.layers)
    nbytes = sum(layer.expert_bytes_planned for layer in slid.layers)
    return nbytes if any(sums.kept for sums in slid.sums.values()) else None


def keep(warehouse: Warehouse, plan: MergePlan, layer: str, path: Path) -> None:
    """Let the sums of a layer at `path`, if there are any, replace those of the merge before."""
    if path.exists():
        adopt_file(path, warehouse.sums_path(plan.ref, layer))


@dataclass(frozen=True, slots=True)
class _Before:
    """A plan whose sums are kept: its tasks by name, and the first number of its sources now."""

    tasks: dict[str, TensorTask]
    offset: int
    lost: frozenset[int]


class _Past:
    """The plans whose sums are kept for a ref; `sources` are the plan's and then theirs."""

    def __init__(self, warehouse: Warehouse, plan: MergePlan) -> None:
        self._warehouse, self._plan = warehouse, plan
        self._plans: dict[str, _Before] = {}
        self.sources = list(plan.sources)

    def reader(self, layer: str) -> SumsReader | None:
        """The sums of a layer; None where there are none, or nobody knows of which models."""
        with suppress(MergePipeError, OSError):
            reader = SumsReader(self._warehouse.sums_path(self._plan.ref, layer))
            plan_id = reader.table.plan_id
            if plan_id not in self._plans:
                self._plans[plan_id] = self._load(plan_id)
            return reader
        return None

    def _load(self, plan_id: str) -> _Before:
        plan = load_plan(self._warehouse, plan_id)
        offset, known = len(self.sources), {source.stamp for source in self._plan.sources}
        lost = (i for i, s in enumerate(plan.sources) if s.stamp not in known and _is_lost(s))
        tasks = {task.name: task for layer in plan.layers for task in layer.tasks}
        before = _Before(tasks, offset, frozenset(offset + i for i in lost))
        self.sources += plan.sources
        return before

    def changed(self, task: TensorTask, reader: SumsReader) -> tuple[TensorTask, TensorSums] | None:
        """The task with what left and what came alone; None where that is no less to read."""
        past = self._plans[reader.table.plan_id]
        before = past.tasks.get(task.name)
        if before is None or before.shape != task.shape:
            return None
        if not (task.name in reader.table.tensors and _is_plain(task) and _is_plain(before)):
            return None
        gone = _without(before.experts, task.experts)
        left = [replace(e, view=moved(e.view, past.offset)) for e in gone]
        came = _without(task.experts, before.experts)
        is_lost = any(past.lost.intersection(sources_of(e.view)) for e in left)
        if is_lost or len(left) + len(came) >= len(task.experts):
            return None
        signs = (*(-1 for _ in left), *(1 for _ in came))
        sums = TensorSums(self._plan.plan_id, len(task.experts), signs, reader)
        return replace(task, experts=(*left, *came)), sums


def _is_lost(source: Source) -> bool:
    """Whether a checkpoint is not there as it was."""
    with suppress(MergePipeError):
        return open_checkpoint(source.root, source.name, probes=False).stamp != source.stamp
    return True


def _is_plain(task: TensorTask) -> bool:
    """Whether a task is the mean of whole stored tensors."""
    return task.operator == "mean" and all(
        e.view.stands_alone
        and e.view.low_rank is None
        and e.packed is None
        and e.read == ((0, prod(task.shape)),)
        for e in task.experts
    )


def _without(some: Sequence[ExpertInput], others: Sequence[ExpertInput]) -> list[ExpertInput]:
    """Those of `some` whose content is not among `others`, each as often as it is there more."""
    known = Counter((e.digest, e.view.dtype) for e in others)
    rest = []
    for e in some:
        known[e.digest, e.view.dtype] -= 1
        if known[e.digest, e.view.dtype] < 0:
            rest.append(e)
    return rest
