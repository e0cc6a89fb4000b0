"""One Dagster instance of two warehouses of ours, a copy of one, and strangers: nobody's is lost.

What all have there is drawn, and which sensor of which warehouse looks next. After each look only
what is that warehouse's may have changed, and all of it that has no living process has ended.
"""

from __future__ import annotations

import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import dagster as dg
from dagster import DagsterRunStatus as Status
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import RemoteInstigatorOrigin
from dagster._core.scheduler.instigation import (
    InstigatorState,
    InstigatorStatus,
    TickData,
    TickStatus,
)
from dagster._core.storage.sql import ScriptDirectory  # type: ignore[attr-defined]

from mergepipe_pipeline.assets.experts import experts_of
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.execution.plan_leases import lease_run
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors.housekeeping import build_orphans_sensor, build_retention_sensor
from mergepipe_pipeline.sensors.inbox import build_inbox_sensor
from mergepipe_pipeline.sensors.ticks import Ours, recipes_under_way
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.guests import MODULE, origins, repository_of
from tests.lab.torture.tally import Outcome, Problem

_SHORT, _LONG = (1, 40), (600, 120)  # tries, steps of each
_BEGUN = (Status.NOT_STARTED, Status.STARTED, Status.CANCELING)
_OVER = (Status.SUCCESS, Status.FAILURE, Status.CANCELED)
_STATUSES = (*_BEGUN, *_OVER, Status.QUEUED, Status.STARTING)
_AGES = (timedelta(seconds=1), timedelta(minutes=10), timedelta(days=40))
_LEASES = ("none", "none", "held", "left")
_NAMES = ("base", "math", "team-run-17")
#: Part of an instance, and a thing there, to how it is.
_State = dict[tuple[str, str], Any]


@dataclass(frozen=True)
class Try:
    """One interleaving, drawn from `seed`."""

    seed: int
    steps: int

    def __str__(self) -> str:
        return f"guests, seed {self.seed}, {self.steps} steps"


@dataclass
class Guest:
    """Who has runs, ticks and partitions on the instance; `home` is there if its sensors look.

    `marks` says whether its runs carry the identity of `like`, always or by chance.
    """

    name: str
    location: str
    module: str = MODULE
    home: Warehouse | None = None
    like: Warehouse | None = None
    marks: tuple[bool, ...] = (True,)
    runs: dict[str, str] = field(default_factory=dict)  # and its lease
    asked: dict[str, str] = field(default_factory=dict)

    @property
    def experts(self) -> dg.DynamicPartitionsDefinition:
        """The set of its partitions."""
        if self.home is None:
            return dg.DynamicPartitionsDefinition(name="experts")
        return experts_of(self.home)


class Guests:
    """The campaign."""

    def __init__(self, world: Path, folder: Path, *, short: bool) -> None:
        self._world, self._size = world, _SHORT if short else _LONG
        # What versions Dagster's tables have had is read for each query: it takes most of the time.
        ScriptDirectory.from_config = cache(ScriptDirectory.from_config)  # type: ignore[method-assign]

    def tries(self, seed: int) -> Iterator[Try]:
        """Interleavings with seeds of their own."""
        draw = Random(seed)
        return (Try(draw.randrange(1 << 40), self._size[1]) for _ in range(self._size[0]))

    def judge(self, one: Try, folder: Path) -> Outcome:
        """Draw steps until one breaks the promise."""
        pools = {"concurrency": {"pools": {"default_limit": 2}}}
        (folder / "dagster").mkdir()
        done = Counter[str]()
        with dg.DagsterInstance.local_temp(str(folder / "dagster"), pools) as instance:
            house = House(self._world, folder, instance, Random(one.seed))
            with house.living:
                for number in range(one.steps):
                    kind, problems = house.step()
                    done[kind] += 1
                    if problems:
                        where = f"{one}, step {number}, {kind}"
                        return Outcome(done, [Problem(c, where, what) for c, what in problems])
        return Outcome(done, [])


class House:
    """The instance and its guests."""

    def __init__(
        self, world: Path, folder: Path, instance: dg.DagsterInstance, draw: Random
    ) -> None:
        self._world, self._instance, self._draw = world, instance, draw
        self.living = ExitStack()
        first, second = (Warehouse.at(folder / name).ensure() for name in ("first", "second"))
        self._ours = [
            # Its location holds what is another's, too, so that only marked runs are its own.
            Guest("the first", "a", "theirs_and_ours", home=first, like=first),
            Guest("the second", "b", home=second, like=second, marks=(True, False)),
        ]
        self._guests = [
            *self._ours,
            Guest("a flatmate", "a", "theirs_and_ours"),
            Guest("a copy", "c", like=second),
            Guest("a team", "team", "own_location"),
            Guest("an older one of ours", "old"),
        ]

    def step(self) -> tuple[str, list[tuple[str, str]]]:
        """Do one thing; its kind, and what it broke, by column."""
        guest = self._draw.choice(self._guests)
        does = self._draw.choice([self._run, self._run, self._tick, self._settle, self._look])
        if does == self._look or (does == self._settle and guest.home):
            guest = self._draw.choice(self._ours)
        return does(guest)

    def _run(self, guest: Guest) -> tuple[str, list[tuple[str, str]]]:
        """A run of a guest in any state and of any age; of ours, with a lease or without."""
        draw, run_id = self._draw, str(uuid.UUID(int=self._draw.getrandbits(128)))
        status, age = draw.choice(_STATUSES), draw.choice(_AGES)
        tags = {"mergepipe/recipe": draw.choice("nop")} if draw.random() < 0.5 else {}
        if guest.like and draw.choice(guest.marks):
            tags |= MergePipe(home=str(guest.like.root)).tags
        made = origins("merge_n", guest.location, guest.module)
        run = dg.DagsterRun("merge_n", run_id, status=status, tags=tags, **made)
        self._instance.run_storage.add_historical_run(run, datetime.now(UTC) - age)
        lease = draw.choice(_LEASES) if guest.home and status in _BEGUN else "none"
        if guest.home and lease == "held":
            self.living.enter_context(lease_run(guest.home, run_id))
        elif guest.home and lease == "left":
            (guest.home.leases_dir / f"run-{run_id}-gone.json").write_text("{}")
        is_dead = lease == "left" or (lease == "none" and age > _AGES[0])
        guest.runs[run_id] = "ends" if is_dead else "lives"
        return f"{'our' if guest.home else 'their'} run", []

    def _tick(self, guest: Guest) -> tuple[str, list[tuple[str, str]]]:
        """An idle tick, old or new, of a sensor that is named as one of ours, or not."""
        theirs = self._draw.choice(["team_sensor", "inbox_sensor"])
        name = "recipe_sensor" if guest.home else theirs
        if guest.location == "a" and not guest.home:
            name = "team_sensor"  # one location has one sensor of a name
        origin = RemoteInstigatorOrigin(repository_of(guest.location, guest.module), name)
        state = InstigatorState(origin, InstigatorType.SENSOR, InstigatorStatus.RUNNING)
        if not self._instance.get_instigator_state(state.instigator_origin_id, state.selector_id):
            self._instance.add_instigator_state(state)
        at = datetime.now(UTC) - self._draw.choice(_AGES)
        ids = state.instigator_origin_id, name, InstigatorType.SENSOR, TickStatus.SKIPPED
        data = TickData(*ids, at.timestamp(), run_ids=[], selector_id=state.selector_id)
        self._instance.create_tick(data)
        return "tick", []

    def _settle(self, guest: Guest) -> tuple[str, list[tuple[str, str]]]:
        """An expert lands at ours, leaves, or is indexed; a stranger has partitions and pools."""
        name = self._draw.choice(_NAMES)
        if guest.home is None:
            self._instance.add_dynamic_partitions(guest.experts.name or "", [name])
            pool = self._draw.choice(["disk_read", "search_mix"])
            limit = self._draw.randint(1, 9)
            self._instance.event_log_storage.set_concurrency_slots(pool, limit)
            return "their partitions and pools", []
        place = guest.home.inbox / name
        if guest.asked and self._draw.random() < 0.7:
            asked, run_id = guest.asked.popitem()
            if (guest.home.inbox / asked).exists():
                index_arrival(guest.home, asked)
            event = dg.DagsterEvent("PIPELINE_SUCCESS", "index_experts")
            self._instance.report_dagster_event(event, run_id)
            return "index", []
        if place.exists():
            shutil.rmtree(place)
            return "leaving", []
        shutil.copytree(self._world / "expert_00", place)
        return "landing", []

    def _look(self, guest: Guest) -> tuple[str, list[tuple[str, str]]]:
        """A sensor of a warehouse of ours looks; what it may not have done, and has not."""
        looks: dict[str, Callable[[Guest], list[str]]] = {
            "orphans": self._orphans,
            "retention": self._retention,
            "inbox": self._inbox,
            "recipes": self._recipes,
        }
        kind = self._draw.choice(list(looks))
        before = self._state()
        missed = looks[kind](guest)
        after = self._state()
        problems = [("wrong", f"{guest.name}: {what}") for what in missed]
        for what in before.keys() | after.keys():
            if before.get(what) == after.get(what) or self._is_of(guest, what, before):
                continue
            column = "lost" if what not in after else "wrong"
            told = f"{guest.name} changed {what}: {before.get(what)} to {after.get(what)}"
            problems.append((column, told))
        return f"look: {kind}", problems

    def _is_of(self, guest: Guest, what: tuple[str, str], before: _State) -> bool:
        """Whether a thing is that guest's to change."""
        part, name = what
        if part == "run":
            return name in guest.runs
        if part == "partitions":
            return name == guest.experts.name
        if part == "pool":
            return what not in before  # Dagster gives it the same limit when it is first used
        label = repository_of(guest.location).get_label()
        return name == f"{label} recipe_sensor"

    def _orphans(self, guest: Guest) -> list[str]:
        before = {r.run_id: r.status for r in self._instance.get_runs()}
        with self._tick_of(guest) as tick:
            build_orphans_sensor()(tick)
        missed = []
        for run_id, told in guest.runs.items():
            if before.get(run_id) not in _BEGUN:
                continue
            run = self._instance.get_run_by_id(run_id)
            if run is None or (run.status in _OVER) != (told == "ends"):
                missed.append(f"a run that {told} is {run and run.status}")
        return missed

    def _retention(self, guest: Guest) -> list[str]:
        with self._tick_of(guest) as tick:
            build_retention_sensor()(tick)
        old = datetime.now().astimezone() - timedelta(days=35)
        left = self._instance.get_runs(dg.RunsFilter(statuses=list(_OVER), created_before=old))
        return [f"an old run is left: {r.status}" for r in left if r.run_id in guest.runs]

    def _inbox(self, guest: Guest) -> list[str]:
        assert guest.home is not None
        try:
            with self._tick_of(guest) as tick:
                found: Any = build_inbox_sensor(guest.experts)(tick)
        except MergePipeError as error:  # what landed has left: a disk that is gone looks the same
            is_empty = not any(guest.home.inbox.iterdir()) and not guest.home.catalog.names()
            return [] if is_empty else [str(error)]
        for request in found.dynamic_partitions_requests or []:
            for key in request.partition_keys:
                if isinstance(request, dg.AddDynamicPartitionsRequest):
                    self._instance.add_dynamic_partitions(request.partitions_def_name, [key])
                else:
                    self._instance.delete_dynamic_partition(request.partitions_def_name, key)
        for request in found.run_requests or []:
            run_id = str(uuid.UUID(int=self._draw.getrandbits(128)))
            tags = {**request.tags, "dagster/partition": request.partition_key}
            made = origins("index_experts", guest.location, guest.module)
            queued = Status.QUEUED
            run = dg.DagsterRun("index_experts", run_id, status=queued, tags=tags, **made)
            self._instance.add_run(run)
            guest.runs[run_id] = "lives"
            guest.asked[request.partition_key] = run_id
        known = set(self._instance.get_dynamic_partitions(guest.experts.name or ""))
        gone = {name for name in known if not (guest.home.inbox / name).exists()}
        return [f"{name} left and is a partition" for name in gone]

    def _recipes(self, guest: Guest) -> list[str]:
        with self._tick_of(guest) as tick:
            found = recipes_under_way(Ours.of(tick, self._resource(guest)))
        runs = self._instance.get_runs(dg.RunsFilter(statuses=[*_BEGUN, Status.QUEUED]))
        starting = self._instance.get_runs(dg.RunsFilter(statuses=[Status.STARTING]))
        mine = [run for run in (*runs, *starting) if run.run_id in guest.runs]
        busy = {run.tags[t] for run in mine for t in run.tags if t == "mergepipe/recipe"}
        return [] if found == busy else [f"recipes under way are {busy}, found {found}"]

    def _resource(self, guest: Guest) -> MergePipe:
        assert guest.home is not None
        return MergePipe(home=str(guest.home.root), inbox_quiet_s=0, inbox_retry_s=0)

    @contextmanager
    def _tick_of(self, guest: Guest) -> Iterator[dg.SensorEvaluationContext]:
        """A tick as the daemon has it evaluated in the guest's location."""
        repository = repository_of(guest.location, guest.module)
        with dg.build_sensor_context(
            self._instance,
            repository_name=repository.repository_name,
            resources={"mergepipe": self._resource(guest)},
        ) as context:
            context._code_location_origin = repository.code_location_origin
            yield context

    def _state(self) -> _State:
        """All that guests may have, as storage tells it."""
        instance, state = self._instance, _State()
        for run in instance.get_runs():
            state["run", run.run_id] = run.status, dict(run.tags)
        for s in instance.all_instigator_state():
            ticks = instance.get_ticks(s.instigator_origin_id, s.selector_id)
            label = s.origin.repository_origin.get_label()
            state["ticks", f"{label} {s.instigator_name}"] = [t.timestamp for t in ticks]
        for name in {guest.experts.name or "" for guest in self._guests}:
            if keys := instance.get_dynamic_partitions(name):
                state["partitions", name] = sorted(keys)
        for pool in instance.event_log_storage.get_pool_limits():
            state["pool", pool.name] = pool.limit
        return state
