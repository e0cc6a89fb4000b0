"""What the deployment did, read from Dagster's own storage and from what was published."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
from dagster._core.definitions.freshness import FreshnessState
from dagster._core.events import StepMaterializationData
from dagster._core.instance.utils import RUNLESS_JOB_NAME, RUNLESS_RUN_ID
from dagster._core.scheduler.instigation import InstigatorState
from safetensors.torch import load_file

from mergepipe_pipeline.assets.experts import experts_of
from mergepipe_pipeline.deploy.instance import identity_of
from mergepipe_pipeline.facts.quarantine import is_quarantined
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.daemon import most_at_once

_OVER = {dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED}


@dataclass(frozen=True)
class Run:
    """One run: `recipe` is None for an index run; times in seconds, `started` None if not yet."""

    run_id: str
    recipe: str | None
    experts: tuple[str, ...]
    status: str
    created: float
    started: float | None
    over: bool


@dataclass(frozen=True)
class Seat:
    """Where a warehouse's definitions stand on an instance that others use, too.

    `keys` and `names` are what asset keys, and names of jobs and sensors, begin with.
    """

    location: str
    names: str
    keys: tuple[str, ...] = ()

    def has(self, run: dg.DagsterRun) -> bool:
        """Whether a run is of a job that stands there."""
        made = run.remote_job_origin
        return (
            made is not None
            and made.location_name == self.location
            and run.job_name.startswith(self.names)
        )


class Watch:
    """Reads; changes nothing but what `cancel` and `release_long_ago` are told to.

    Without a `seat`, all that the instance has is of the warehouse.
    """

    def __init__(self, home: Warehouse, dagster_home: Path, seat: Seat | None = None) -> None:
        self._home, self._seat = home, seat
        self.instance = dg.DagsterInstance.from_config(str(dagster_home))
        self._values = dict[str, tuple[float, ...]]()

    def runs(self, since: float = 0.0) -> list[Run]:
        """Runs created after a time, oldest first."""
        records = self.instance.get_run_records(limit=2000)
        mine = [r for r in records if self._seat is None or self._seat.has(r.dagster_run)]
        found = [_run(r) for r in reversed(mine)]
        return [r for r in found if r.created >= since]

    def mixed(self) -> list[str]:
        """Runs by another's job on this warehouse, or the reverse, and experts of another's set."""
        if self._seat is None:
            return []
        identity = identity_of(self._home)
        found = [
            f"run {r.run_id[:8]} of {r.job_name} has the tags {dict(r.tags)}"
            for r in self.instance.get_runs(limit=2000)
            if self._seat.has(r) != (r.tags.get("mergepipe/warehouse") == identity)
        ]
        known = self.instance.get_dynamic_partitions(experts_of(self._home).name or "")
        here = {path.name for path in self._home.inbox.iterdir()}
        return [*found, *(f"{name} is a partition" for name in sorted({*known} - here))]

    def indexed(self, since: float) -> Counter[str]:
        """Expert to how often it was indexed after a time."""
        key = self._key("expert_index")
        wanted = dg.AssetRecordsFilter(asset_key=key, after_timestamp=since)
        found = self.instance.fetch_materializations(wanted, limit=5000).records
        return Counter(str(r.partition_key) for r in found)

    def released(self, recipe: str) -> list[tuple[float, tuple[float, ...]]]:
        """Each version of a recipe's ref: when, in seconds, and the numbers its tensors hold."""
        refs = self._home.refs
        if recipe not in refs.names():
            return []
        files = sorted((self._home.refs_dir / recipe).glob("[0-9]*"))
        times = [f.stat().st_mtime for f in files]
        history = refs.history(recipe)
        return [
            (t, self._value(r.snapshot_id))
            for t, r in zip(times[-len(history) :], history, strict=True)
        ]

    def is_kept_out(self, expert: str) -> bool:
        """Whether an expert is in quarantine, as it lies there."""
        return is_quarantined(self._home, expert)

    def ticks(self, since: float = 0.0) -> list[tuple[str, float, float]]:
        """Sensor, start and end of each tick that is over, in seconds."""
        return [
            (state.instigator_name, tick.timestamp, tick.end_timestamp)
            for state in self._states()
            for tick in self.instance.get_ticks(
                state.instigator_origin_id, state.selector_id, after=since or None
            )
            if tick.end_timestamp
        ]

    def has_told(self, sensor: str, words: str) -> bool:
        """Whether a tick of a sensor gave these words as its reason to ask for nothing."""
        return any(
            words in (tick.skip_reason or "")
            for state in self._states()
            if sensor in state.instigator_name
            for tick in self.instance.get_ticks(state.instigator_origin_id, state.selector_id)
        )

    def overdue(self) -> set[str]:
        """The recipes whose release the freshness daemon calls overdue."""
        keys = self.instance.all_asset_keys()
        scheduled = [key for key in keys if key == self._key(*key.path[-2:-1], "on_schedule")]
        found = self.instance.get_freshness_state_records(scheduled)
        return {
            key.path[-2]
            for key, record in found.items()
            if record.freshness_state is FreshnessState.FAIL
        }

    def crowded_pools(self, since: float) -> dict[str, int]:
        """Pool to how many of its runs were under way at once, where these are too many."""
        most = self.instance.global_op_concurrency_default_limit
        if most is None:
            return {}
        return {p: n for p, n in most_at_once(self.instance, since).items() if n > most}

    def release_long_ago(self, recipe: str, hours: float) -> None:
        """Have Dagster know a release of a recipe that is as old as this."""
        event = dg.DagsterEvent(
            dg.DagsterEventType.ASSET_MATERIALIZATION.value,
            RUNLESS_JOB_NAME,
            event_specific_data=StepMaterializationData(
                dg.AssetMaterialization(self._key(recipe, "on_schedule"))
            ),
        )
        when = time.time() - 3600 * hours
        self.instance.report_dagster_event(event, RUNLESS_RUN_ID, timestamp=when)

    def pid(self, run_id: str) -> int | None:
        """The process that executes a run."""
        for record in self.instance.all_logs(run_id):
            message = record.message or record.user_message
            if "process for run (pid: " in message:
                return int(message.split("(pid: ")[1].split(")")[0])
        return None

    def is_at(self, run_id: str, step: str) -> bool:
        """Whether a run has begun the step whose name ends so."""
        begun = self.instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_START)
        return any((record.step_key or "").endswith(step) for record in begun)

    def cancel(self, run_id: str) -> None:
        """As a person does in the UI."""
        self.instance.run_coordinator.cancel_run(run_id)

    def _key(self, *parts: str) -> dg.AssetKey:
        return dg.AssetKey([*(self._seat.keys if self._seat else ()), *parts])

    def _states(self) -> list[InstigatorState]:
        seat, states = self._seat, self.instance.all_instigator_state()
        return [
            s
            for s in states
            if seat is None
            or (
                s.instigator_name.startswith(seat.names)
                and s.origin.repository_origin.get_label().endswith(f"@{seat.location}")
            )
        ]

    def _value(self, snapshot_id: str) -> tuple[float, ...]:
        if snapshot_id not in self._values:
            values = set[float]()
            for path in (self._home.snapshots / snapshot_id).glob("*.safetensors"):
                for tensor in load_file(path).values():
                    values |= set(tensor.double().unique().tolist())
            self._values[snapshot_id] = tuple(sorted(values))
        return self._values[snapshot_id]


def _run(record: dg.RunRecord) -> Run:
    run = record.dagster_run
    tags = run.tags
    named = tags.get("dagster/partition") or tags.get("mergepipe/experts", "")
    return Run(
        run.run_id,
        tags.get("mergepipe/recipe"),
        tuple(named.replace(",", " ").split()),
        run.status.value,
        record.create_timestamp.timestamp(),
        record.start_time,
        run.status in _OVER,
    )
