"""What happens to a pipeline in a month, in parts that each end with a wait for quiet.

An event is a generator: it acts, then yields what it did; the soak waits for quiet and judges.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from mergepipe_pipeline.verbs.index import index_arrival
from tests.lab.soak.deployment import Deployment
from tests.lab.soak.model import BASE, Recipe
from tests.lab.soak.watch import Run, Watch
from tests.lab.soak.world import LIMIT, World

_BURST = 20
_SELECTED = 30
_START_S = 150.0
#: Seconds in which a new version is seen, indexed and merged, a start included.
_KILL_WITHIN_S = 45.0
_KILLS = 3


@dataclass
class Scene:
    """A warehouse where events happen, and those `beside` it on its instance.

    `ended` are the runs that an event itself ended, by force or request.
    """

    world: World
    deployment: Deployment
    watch: Watch
    ended: set[str] = field(default_factory=set)
    beside: list[Scene] = field(default_factory=list)

    def merging(self) -> Run | None:
        """The first merge of this event once it plans (layers take 0.2 s), None if none comes."""
        return self.running(lambda r: bool(r.recipe) and self.watch.is_at(r.run_id, "__plan"))

    def running(self, is_it: Callable[[Run], bool], status: str = "STARTED") -> Run | None:
        """The first run of this event that is asked for and under way, None if none comes."""
        began, end = self.world.last_byte, time.monotonic() + _START_S
        while time.monotonic() < end:
            for run in self.watch.runs(began):
                if run.status == status and is_it(run):
                    return run
            time.sleep(0.05)
        return None

    def wait_until_told(self, sensor: str, words: str) -> None:
        """Wait for a tick of a sensor that asks for nothing and says this."""
        end = time.monotonic() + _START_S
        while not self.watch.has_told(sensor, words):
            assert time.monotonic() < end, f"no tick of {sensor} says: {words}"
            time.sleep(0.1)

    def kill_worker(self, run: Run | None) -> None:
        """`kill -9` of the process that executes a run."""
        if run is not None:
            self.ended.add(run.run_id)
            self.deployment.kill_process(lambda: self.watch.pid(run.run_id))

    def end_all(self) -> None:
        """Note that every run under way, of whatever warehouse, ends by what comes next."""
        for scene in (self, *self.beside):
            scene.ended |= {r.run_id for r in scene.watch.runs() if not r.over}


Event = Callable[[Scene], Iterator[str]]


def first_experts(s: Scene) -> Iterator[str]:
    for world in (s.world, *(scene.world for scene in s.beside)):
        for name in (BASE, "a", "b", "c"):
            world.land(name)
        world.write("r1", Recipe(("a", "b")))
        world.write("r2", Recipe(("b", "c")))
    s.deployment.start()
    yield "first start: base, 3 experts, 2 recipes"


def killed_start(s: Scene) -> Iterator[str]:
    for name in (BASE, "a"):
        s.world.land(name)
        index_arrival(s.world.home, name)
    s.world.model.mark()
    s.world.land_half("a")
    s.world.write("r1", Recipe(("a",)))
    for scene in (s, *s.beside):
        _release_is_overdue(scene, "r2")
    s.deployment.start()
    s.wait_until_told("inbox_sensor", "a: 1 of 2 shards are new")
    s.world.land_rest("a")
    s.kill_worker(s.merging())
    _edit(s, "r1", comment="somebody's note")
    yield "first start, half of a new version, the rest, kill -9 amid its merge, a comment edited"


def new_version(s: Scene) -> Iterator[str]:
    s.world.land("a")
    yield "new version of an expert of one recipe"


def shared_version(s: Scene) -> Iterator[str]:
    s.world.land("b")
    yield "new version of an expert of two recipes"


def unused(s: Scene) -> Iterator[str]:
    s.world.land(f"unused-{s.world.random.randrange(1 << 30):x}")
    yield "arrival of an expert that nobody uses"


def awaited(s: Scene) -> Iterator[str]:
    s.world.write("r3", Recipe(("a", "late")))
    yield "recipe added whose expert has not landed"
    s.world.land("late")
    yield "arrival of the expert it waits for"
    s.world.drop_recipe("r3")
    s.world.delete("late")
    yield "recipe and its expert deleted"


def burst(s: Scene) -> Iterator[str]:
    for i in range(_BURST):
        s.world.land(f"burst-{i:02d}")
    s.world.land("c")
    yield f"burst: {_BURST} experts, and a new version of one in use"


def five_versions(s: Scene) -> Iterator[str]:
    for _ in range(5):
        s.world.land("a")
        time.sleep(1.0)
    yield "five versions within seconds"


def half_copy(s: Scene) -> Iterator[str]:
    s.world.land_half("b")
    yield "half of a new version copied over the old one"
    s.world.land_rest("b")
    yield "the other half"


def half_expert(s: Scene) -> Iterator[str]:
    s.world.land_half("half")
    yield "half of a new expert, without index"
    s.world.land_rest("half")
    yield "its other half"


def same_bytes(s: Scene) -> Iterator[str]:
    s.world.touch("c")
    yield "files touched, same bytes"


def deleted(s: Scene) -> Iterator[str]:
    s.world.delete("c")
    yield "expert of a recipe deleted"
    s.world.bring_back("c")
    yield "deleted expert lands again, same bytes"


def renamed(s: Scene) -> Iterator[str]:
    s.world.land("old-name")
    yield "arrival before a rename"
    s.world.rename("old-name", f"name-{s.world.random.randrange(1 << 30):x}")
    yield "expert renamed"


def edited(s: Scene) -> Iterator[str]:
    _edit(s, "r1", scale=s.world.random.choice([0.5, 2.0, 4.0, 8.0, 0.25]))
    yield "recipe edited"


def commented(s: Scene) -> Iterator[str]:
    _edit(s, "r2", comment=f"note {s.world.random.randrange(1 << 30)}")
    yield "comment in a recipe edited"


def broken(s: Scene) -> Iterator[str]:
    _edit(s, "r2", broken=True)
    yield "recipe broken"
    _edit(s, "r2", broken=False)
    yield "recipe mended as it was"


def mended_otherwise(s: Scene) -> Iterator[str]:
    _edit(s, "r1", broken=True)
    yield "other recipe broken"
    _edit(s, "r1", broken=False, scale=s.world.random.choice([3.0, 5.0, 7.0]))
    yield "recipe mended with another meaning"


def added(s: Scene) -> Iterator[str]:
    name = f"new{s.world.random.randrange(1 << 30):x}"
    s.world.write(name, Recipe(("a", "c"), s.world.random.choice([1.0, 2.0])))
    yield "recipe added"
    s.world.drop_recipe(name)
    yield "recipe deleted"


def selected(s: Scene) -> Iterator[str]:
    prefix = f"sel-{s.world.random.randrange(1 << 30):x}-"
    first, *others = (f"{prefix}{i:02d}" for i in range(_SELECTED + 3))
    for name in (first, *others[:-3]):
        s.world.land(name, shards=1)
    s.world.write("selecting", Recipe((), prefix=prefix))
    yield f"recipe added with a selector, and {_SELECTED} experts for it"
    for name in others[-4:]:
        s.world.land(name, shards=1)
    s.world.delete(first)
    yield "of a selector's experts three join, one leaves, one changes"
    s.world.land(f"no-{prefix}", shards=1)
    yield "arrival of an expert that no selector takes"
    s.world.drop_recipe("selecting")
    for name in others:
        s.world.delete(name)
    yield "recipe with a selector and its experts deleted"


def guarded(s: Scene) -> Iterator[str]:
    name = f"guarded{s.world.random.randrange(1 << 30):x}"
    s.world.land("suspect")
    s.world.write(name, Recipe(("a", "suspect"), limit=LIMIT))
    yield "recipe with a gate added, and its expert"
    s.world.worsen("suspect")
    s.world.land("a")
    yield "a version made worse, and a good one of another expert: refused, traced, kept out"
    s.world.land("suspect")
    yield "the mended version"
    s.world.drop_recipe(name)
    s.world.delete("suspect")
    yield "the recipe and its expert deleted"


def kill_merge(s: Scene) -> Iterator[str]:
    s.world.land("a")
    s.kill_worker(s.merging())
    yield "kill -9 of a worker amid its merge"


def kill_index(s: Scene) -> Iterator[str]:
    s.world.land("a")
    s.kill_worker(s.running(lambda r: r.recipe is None))
    yield "kill -9 of an index run's worker"


def kill_daemon(s: Scene) -> Iterator[str]:
    s.world.land("c")
    s.running(lambda r: r.recipe is None)
    s.end_all()  # `dagster dev` ends with its daemon, and its runs may with it
    s.deployment.kill("daemon")
    time.sleep(2.0)
    s.deployment.stop()
    s.deployment.start()
    yield "kill -9 of the daemon while it indexes, restart"


def kill_everything(s: Scene) -> Iterator[str]:
    s.world.land("b")
    s.running(lambda r: r.recipe is not None)
    s.end_all()
    s.deployment.kill()
    time.sleep(2.0)
    s.deployment.start()
    yield "kill -9 of everything while it merges, restart"


def kill_at_any_time(s: Scene) -> Iterator[str]:
    scenes, random = (s, *s.beside), s.world.random
    for _ in range(_KILLS):
        for scene in scenes:
            scene.world.land(random.choice("abc"))
        time.sleep(random.uniform(0.0, _KILL_WITHIN_S))
        s.deployment.kill()
        s.end_all()
        s.deployment.start()
    yield f"{_KILLS} versions of each warehouse, kill -9 of everything after each, restart"


def cancel_merge(s: Scene) -> Iterator[str]:
    s.world.land("a")
    run = s.running(lambda r: r.recipe is not None)
    if run is not None:
        s.ended.add(run.run_id)
        s.watch.cancel(run.run_id)
    yield "a merge cancelled in the UI"


def cancel_queue(s: Scene) -> Iterator[str]:
    for i in range(_BURST // 2):
        s.world.land(f"queue-{i:02d}")
    s.world.land("b")
    if s.running(lambda r: r.recipe is None):
        s.ended |= {r.run_id for r in s.watch.runs() if not r.over}
        for run_id in s.ended:
            s.watch.cancel(run_id)
    yield "the whole queue cancelled"


FIRST: Event = first_experts
#: What happens at once, and is waited for once: nothing of a round needs what another of it holds.
ROUNDS: tuple[tuple[Event, ...], ...] = (
    (new_version, commented, unused),
    (shared_version, renamed),
    (burst, half_copy),
    (deleted, half_expert, edited),
    (broken, mended_otherwise, same_bytes),
    (awaited, added, five_versions),
    (selected,),
    (guarded,),
    (kill_merge,),
    (kill_index,),
    (kill_daemon,),
    (kill_everything,),
    (kill_at_any_time,),
    (cancel_merge,),
    (cancel_queue,),
)
SHORT: Event = killed_start


def _release_is_overdue(s: Scene, name: str) -> None:
    """A recipe whose release missed its last time; its next is half a day away."""
    hour = (datetime.now(UTC).hour + 12) % 24
    s.world.write(name, Recipe(("a",), nightly=f"0 {hour} * * *"))
    s.watch.release_long_ago(name, hours=40)
    s.world.model.overdue.add(name)


def _edit(s: Scene, name: str, **changes: object) -> None:
    s.world.write(name, replace(s.world.model.recipes[name], **changes))  # type: ignore[arg-type]
