"""kill -9 of a process that runs a verb, at any moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.lab.torture import child, judge
from tests.lab.torture.scenes import Scene, scenes_of
from tests.lab.torture.tally import Outcome
from tests.lab.torture.world import copy_place

_SHORT, _LONG = 6, 400


@dataclass(frozen=True)
class Try:
    """One kill, when `share` of the `seconds` that the verb takes has passed."""

    scene: Scene
    seconds: float
    share: float

    def __str__(self) -> str:
        return f"{self.scene.verb.name}: killed after {self.share:.3f} of its time"


class Kills:
    """The campaign over one world; merges work in small windows, so that they last longer."""

    def __init__(self, world: Path, folder: Path, *, short: bool) -> None:
        self._world, self._count = world, _SHORT if short else _LONG
        self._scenes = scenes_of(world, world.parent / "scenes", short=short)
        self._seconds = [
            self._run(scene, folder / f"timed-{n}", None).seconds
            for n, scene in enumerate(self._scenes)
        ]

    def tries(self, seed: int) -> Iterator[Try]:
        """Moments all over verbs, each as often as it lasts long."""
        draw = Random(seed)
        timed = list(zip(self._scenes, self._seconds, strict=True))
        for _ in range(self._count):
            ((scene, seconds),) = draw.choices(timed, self._seconds)
            yield Try(scene, seconds, draw.random())

    def judge(self, one: Try, folder: Path) -> Outcome:
        """Run the verb, kill it, look at what is left, run it again."""
        scene, place = one.scene, folder / "place"
        done = self._run(scene, folder, one.share * one.seconds)
        args = scene.verb.at(self._world, place)
        kind = "killed" if done.code < 0 else "ended before"
        return Outcome.of(kind, judge.verdict(scene, args, place, folder / "logs", done, str(one)))

    def _run(self, scene: Scene, folder: Path, kill_after_s: float | None) -> child.Done:
        place = folder / "place"
        place.parent.mkdir(parents=True, exist_ok=True)
        copy_place(scene.place, place)
        args = scene.verb.at(self._world, place)
        more = ["--window-size", "64"] if args[0] == "merge" else []
        return child.run([*args, *more], folder / "logs", kill_after_s=kill_after_s)
