"""The verb `run_plan`: run what the action cache does not know, then commit a snapshot.

A layer whose key is known is not read, not computed, not written; one that another warehouse has
merged is taken from the bucket. A crash loses at most the layers that were running; everything
before is found again by key.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergepipe_pipeline.concurrency.threads import release_freed
from mergepipe_pipeline.concurrency.workers import TaskQueue, Workers
from mergepipe_pipeline.domain.outcome import (
    LayerOutcome,
    Realised,
    RunStart,
    StoredObject,
    Times,
    rounding_error,
)
from mergepipe_pipeline.domain.plan import LayerTask, MergePlan
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import (
    CheckpointError,
    CorruptionError,
    DamagedLayerError,
    DamagedPackError,
    RemoteError,
)
from mergepipe_pipeline.execution.assemble import commit
from mergepipe_pipeline.execution.egress import downloads_shown
from mergepipe_pipeline.execution.plan_leases import lease, refuse_full_disk
from mergepipe_pipeline.execution.plan_leases import staging as staging_of
from mergepipe_pipeline.execution.sums import Sliding, sliding
from mergepipe_pipeline.execution.sums import keep as keep_sums
from mergepipe_pipeline.facts.damaged_packs import experts_of, set_aside
from mergepipe_pipeline.facts.input_segments import plan_inputs
from mergepipe_pipeline.progress import Advance, Progress, Silent
from mergepipe_pipeline.remote.fetch import METER
from mergepipe_pipeline.snapshots.commit import Checked
from mergepipe_pipeline.storage.sums import SumsLostError, sums_beside
from mergepipe_pipeline.warehouse import Warehouse

if TYPE_CHECKING:
    from mergepipe_pipeline.engine.execute import LayerRunner
    from mergepipe_pipeline.snapshots.mirror import Mirror


_LOG = logging.getLogger("mergepipe")


def fetch_layers(
    warehouse: Warehouse, layers: Sequence[LayerTask], progress: Progress
) -> dict[str, StoredObject]:
    """Put those layers that the bucket has into the object store; what they are, by name.

    Nothing without a bucket. Every byte is compared with its digest; a layer that is damaged there,
    or cannot be fetched, is logged, left out and merged here.
    """
    mirror = warehouse.mirror
    if mirror is None or not layers:
        return {}
    fetched: dict[str, StoredObject] = {}
    try:
        looked_up = list(zip(layers, mirror.lookup([w.action_key for w in layers]), strict=True))
        total = sum(stored.nbytes for _, stored in looked_up if stored)
        with (
            staging_of(warehouse, "fetch") as staging,
            progress.task(f"fetch from {mirror.bucket.address.text}", total) as advance,
        ):
            for layer, stored in looked_up:
                if stored and _fetched(warehouse, mirror, layer, stored, staging, advance):
                    fetched[layer.name] = stored
    except RemoteError as error:
        _LOG.warning("Layers are merged here that a bucket may have. %s", error)
    return fetched


def _fetched(
    warehouse: Warehouse,
    mirror: Mirror,
    layer: LayerTask,
    stored: StoredObject,
    staging: Path,
    advance: Advance,
) -> bool:
    path = staging / stored.sha256
    try:
        if not mirror.fetch(stored, path, advance):
            return False
    except CorruptionError as error:
        _LOG.warning("A layer is merged here. %s", error)
        return False
    warehouse.objects.adopt(path, stored)
    warehouse.objects.record(layer.action_key, stored)
    return True


#: Finished layers that may wait for the disk.
_WAITING = 2


@dataclass(frozen=True, slots=True)
class MergeOutcome:
    """A finished merge: the snapshot, its plan, what it cost, and the time it took.

    `wall_s` is that of merging and commit; `non_finite` counts NaN
    and infinite elements by tensor, with those that F8_E4M3 cut off at its end. `rounding_error` is
    the L2 norm of what fp8 with scales changed; None of a result without. `checked` is what the
    commit has read of the snapshot.
    """

    snapshot: Snapshot
    plan: MergePlan
    realised: Realised
    wall_s: float
    times: Times
    non_finite: dict[str, int]
    rounding_error: float | None
    checked: Checked

    def summary(self) -> dict[str, Any]:
        """The figures of `merge --json`; bytes are bytes, `error_bound` an L2 norm."""
        e = self.plan.estimates
        return {
            "snapshot_id": self.snapshot.snapshot_id,
            "plan_id": self.plan.plan_id,
            "path": self.snapshot.path,
            "budget_bytes": e.budget_bytes,
            "strategy": e.strategy,
            "expert_bytes_total": e.expert_bytes_total,
            "expert_bytes_planned": e.expert_bytes_planned,
            "expert_bytes_packed": e.expert_bytes_packed,
            "reads": e.reads,
            **asdict(self.realised),
            "predicted_error": e.predicted_error,
            "predicted_margin": e.predicted_margin,
            "error_bound": e.error_bound,
            "error_bound_note": e.bound_note,
            **({} if self.rounding_error is None else {"rounding_error": self.rounding_error}),
            "update_norm_estimate": e.update_norm,
            "wall_s": round(self.wall_s, 3),
            "time": self.times.to_json(),
            **({"downloads": downloads} if (downloads := self.times.downloaded()) else {}),
            "warnings": list(self.plan.warnings),
        }


def run_plan(
    warehouse: Warehouse,
    plan: MergePlan,
    *,
    options: EngineOptions | None = None,
    progress: Progress | None = None,
    start: RunStart | None = None,
    is_stage: bool = False,
    fresh: bool = False,
) -> MergeOutcome:
    """Execute a plan and commit its snapshot; publishes nothing. `start`: when the verb began.

    `is_stage`: only a later stage needs the result, so that `gc` may remove it. `fresh`: run all
    layers, those that the action cache knows, too. A stored layer or a snapshot that turns out to
    be damaged is set aside and made again.

    Raises CheckpointChangedError when an input is not the planned one any more, StorageFullError on
    a full disk; staging is removed, finished layers stay for the next try.
    """
    started = time.monotonic()
    start = start or RunStart(started, downloaded=partial(METER.since, METER.total))

    def run(*, fresh: bool) -> MergeOutcome:
        outcomes = list(
            run_layers(warehouse, plan, options=options, progress=progress, fresh=fresh)
        )
        realised, merging_s = Realised.total(x.cost for x in outcomes), time.monotonic() - started
        times = Times(started - start.at_s, merging_s, start.downloaded)
        made = {layer.name for layer in outcomes if not layer.reused}
        done = commit(warehouse, plan, realised, times, is_stage=is_stage, made=made)
        downloads = start.downloaded()  # what this process fetches later is not of this merge
        times = replace(times, downloaded=lambda: downloads)
        counts = dict(count for layer in outcomes for count in layer.stored.non_finite)
        rounded = rounding_error(x.stored for x in outcomes) if plan.is_coded else None
        wall_s = time.monotonic() - started
        return MergeOutcome(done[0], plan, realised, wall_s, times, counts, rounded, done[1])

    with lease(warehouse, plan):
        try:
            return run(fresh=fresh)
        except DamagedLayerError as error:
            _LOG.warning("%s", made_anew(error))
            return run(fresh=False)


def made_anew(error: DamagedLayerError) -> str:
    """Say that stored layers were damaged and are merged again now."""
    return f"{error.what} ({error.where}): {error.found}. It is merged again"


def run_layers(
    warehouse: Warehouse,
    plan: MergePlan,
    names: Sequence[str] | None = None,
    *,
    options: EngineOptions | None = None,
    progress: Progress | None = None,
    fresh: bool = False,
) -> Iterator[LayerOutcome]:
    """Run or reuse the named layers (default: all) in plan order, yielding each as it is done.

    `fresh` ones are all run, from all their inputs. Raises DamagedPackError for a pack that is set
    aside by then.
    """
    progress = progress or Silent()
    chosen = [layer for layer in plan.layers if names is None or layer.name in names]
    store = warehouse.objects
    reusable = {w.name: None if fresh else store.lookup(w.action_key) for w in chosen}
    if not fresh:
        unknown = [layer for layer in chosen if reusable[layer.name] is None]
        reusable |= fetch_layers(warehouse, unknown, progress)
    unknown = [layer for layer in chosen if reusable[layer.name] is None]
    total = sum(task.out_nbytes for layer in unknown for task in layer.tasks)
    refuse_full_disk(warehouse.root, total)
    with (
        downloads_shown(progress, plan, unknown),
        progress.task(f"merge {plan.recipe_name}", total) as advance,
    ):
        try:
            options = options or EngineOptions()
            layers = [(layer, reusable[layer.name]) for layer in chosen]
            try:
                for outcome in _merged(warehouse, plan, layers, options, advance, anew=fresh):
                    layers = layers[1:]
                    yield outcome
            except (SumsLostError, CheckpointError, CorruptionError) as error:
                if fresh or plan.method != "mean":
                    raise
                # It may be of a model that has left the window: the merge of all reads none.
                _LOG.warning("All models of a window are read. %s", error)
                yield from _merged(warehouse, plan, layers, options, advance, anew=True)
        except DamagedPackError as error:
            set_aside(warehouse, experts_of(plan, error.pack_id), error)
            raise


def _merged(
    warehouse: Warehouse,
    plan: MergePlan,
    layers: Sequence[tuple[LayerTask, StoredObject | None]],
    options: EngineOptions,
    advance: Advance,
    *,
    anew: bool = False,
) -> Iterator[LayerOutcome]:
    """Layers in order, from their objects or by the engine, each when it is durable.

    Windows slide by the sums that are kept, unless `anew`. If one fails, those before it are given
    first. Making a layer durable waits for the disk, so that happens in a thread beside the next
    one's arithmetic.
    """
    missing = tuple(layer for layer, stored in layers if stored is None)
    slid = sliding(warehouse, plan, missing, anew=anew)

    def keep(layer: LayerTask, path: Path, outcome: LayerOutcome) -> LayerOutcome:
        warehouse.objects.adopt(path, outcome.stored)
        warehouse.objects.record(layer.action_key, outcome.stored)
        keep_sums(warehouse, plan, layer.name, sums_beside(path))
        return replace(outcome, layer_key=layer.layer_key)

    def made() -> Generator[Callable[[], LayerOutcome]]:
        runner, staging = _engine(warehouse, slid, options, stack)
        work = [(layer, staging / f"{layer.name}.safetensors") for layer in slid.layers]
        with closing(runner.run_all(work, advance)) as results:
            for layer, (_, path), outcome in zip(missing, work, results, strict=True):
                yield partial(keep, layer, path, outcome)

    # The keeper ends before staging goes: what the engine has finished is kept.
    with ExitStack() as stack, Workers(1, finish_all=True) as keeper, closing(made()) as executed:
        outcomes: TaskQueue[LayerOutcome] = keeper.queue()
        try:
            for layer, stored in layers:
                if stored is None:
                    outcomes.put(next(executed))
                else:
                    nothing = Realised(0, 0, 0, layers_executed=0, layers_reused=1, layers_s=0.0)
                    reused = LayerOutcome(layer.name, layer.layer_key, stored, nothing)
                    outcomes.put_result(reused)
                yield from outcomes.ready(_WAITING)
        except Exception:
            yield from outcomes.rest()
            raise
        yield from outcomes.rest()


def _engine(
    warehouse: Warehouse,
    slid: Sliding,
    options: EngineOptions,
    stack: ExitStack,
) -> tuple[LayerRunner, Path]:
    """The engine and a folder in staging for what it writes, until the stack ends."""
    from mergepipe_pipeline.engine.execute import LayerRunner

    release_freed()
    staging = stack.enter_context(staging_of(warehouse, "merge"))
    known = plan_inputs(warehouse, slid.plan, slid.layers)
    runner = LayerRunner(slid.plan, options, known, slid.sums)
    return stack.enter_context(runner), staging
