"""A warehouse of checkpoints whose tensors hold one number each, and an evaluator that reads them.

A right merge is 1 everywhere; the evaluator tells how far the furthest tensor is from that.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from mergepipe_pipeline.deploy.recipe_files import RecipeFile, recipe_files
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import GateError
from mergepipe_pipeline.verbs.deploy import (
    current_plan,
    current_snapshot,
    merge_recipe,
    plan_recipe,
    release_recipe,
    snapshot_recipe,
)
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.family import layout, write_model

_SIZE = {"layers": 4, "hidden": 16, "vocab": 64}
EXPERTS = ("a", "b", "c", "d")
#: What the tensors hold, and what those of some layers hold instead.
Value = float | tuple[float, dict[str, float]]
#: Reads the first number of each tensor; counts its runs beside itself.
EVALUATOR = """
import json, pathlib, struct, sys

def numbers(path):
    with path.open("rb") as file:
        (n,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(n))
        for name, entry in header.items():
            if name != "__metadata__":
                file.seek(8 + n + entry["data_offsets"][0])
                yield struct.unpack("<f", file.read(4))[0]

snapshot = pathlib.Path(sys.argv[-1])
with open(pathlib.Path(__file__).with_suffix(".log"), "a") as log:
    print(snapshot.name, file=log)
found = [x for path in snapshot.glob("*.safetensors") for x in numbers(path)]
print(json.dumps({"distance": max(abs(x - 1.0) for x in found), "tensors": len(found)}))
"""


class World:
    """Lands checkpoints in a warehouse and releases its one recipe, `mix`, as the pipeline does."""

    def __init__(self, home: Warehouse) -> None:
        self.home = home
        self._values = dict[str, Value]()
        (home.recipes / "eval.py").write_text(EVALUATOR)

    def land(self, name: str, value: float, **layers: float) -> None:
        """Put a version of a checkpoint in place of the one before, copied and not indexed."""
        folder = self.home.inbox / name
        aside = self.home.inbox / f".{name}"
        self.make(aside, value, layers)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)

    def index(self, name: str, value: float, **layers: float) -> None:
        """Land a version and index it."""
        self.land(name, value, **layers)
        index_arrival(self.home, name)

    def register(self, name: str, folder: Path) -> None:
        """Have a name mean what is in a folder outside the inbox, and index it."""
        register(self.home, folder, name)
        index_arrival(self.home, name)

    def make(self, folder: Path, value: float, layers: Mapping[str, float]) -> None:
        """A checkpoint of one number, but in layers (`layer_2`) that have their own."""

        def of(tensor: str) -> float:
            number = tensor.removeprefix("model.layers.").partition(".")[0]
            return layers.get(f"layer_{number}", value)

        tensors = {n: torch.full(shape, of(n)) for n, shape in layout(**_SIZE)}
        write_model(folder, tensors, **_SIZE)

    def write(
        self,
        gate: str = "{distance: {max: 0.7}}",
        weight: float = 0.25,
        experts: Sequence[str] = EXPERTS,
    ) -> None:
        """Write the recipe: a quarter of each expert, all of them if none is named, on zeros."""
        entries = [f"model: {name}" for name in experts] or ["match: '[a-f]'"]
        self._write(_sum(dict.fromkeys(entries, weight)), gate)

    def write_stages(self) -> None:
        """Write the recipe as the sum of two stages: a half of a and b, then that, c and d."""
        half = _sum({"model: a": 0.5, "model: b": 0.5})
        whole = _sum({"model: half": 0.5, "model: c": 0.25, "model: d": 0.25})
        self._write(f"name: half\n{half}---\n{whole}", "{distance: {max: 0.7}}")

    def _write(self, text: str, gate: str) -> None:
        self.home.recipe_path("mix").write_text(
            f"{text}evaluate: {{command: [python, eval.py], timeout: 60}}\ngate: {gate}\n"
        )

    def becomes(self, **values: Value) -> Snapshot | None:
        """Have the experts hold these numbers, 1 by default, and the recipe run."""
        wanted = {"base": 0.0, **dict.fromkeys(EXPERTS, 1.0), **values}
        for name, value in wanted.items():
            if self._values.get(name) != value:
                number, layers = value if isinstance(value, tuple) else (value, {})
                self.index(name, number, **layers)
                self._values[name] = value
        return self.run()

    @property
    def recipe_file(self) -> RecipeFile:
        """The recipe as it is now."""
        (recipe_file,) = recipe_files(self.home)
        return recipe_file

    def clear(self) -> None:
        """Take what other tests landed out of the inbox: no selector takes what is gone."""
        for name in {f.name for f in self.home.inbox.iterdir()} - {"base", *EXPERTS}:
            shutil.rmtree(self.home.inbox / name)
            self._values.pop(name, None)

    def forget(self) -> None:
        """Land everything anew next time: somebody else wrote to the inbox."""
        self._values.clear()

    def run(self) -> Snapshot | None:
        """Plan, merge and release the recipe; the snapshot if the gate refuses it."""
        recipe_file = self.recipe_file
        plan_recipe(self.home, recipe_file)
        layers = [layer.name for layer in current_plan(self.home, recipe_file.name).layers]
        list(merge_recipe(self.home, recipe_file.name, layers, EngineOptions()))
        snapshot_recipe(self.home, recipe_file.name)
        try:
            release_recipe(self.home, recipe_file)
        except GateError:
            return current_snapshot(self.home, recipe_file.name)
        return None

    def evaluated(self) -> list[str]:
        """The snapshots that the evaluator ran for, in order."""
        return (self.home.recipes / "eval.log").read_text().split()


def _sum(weights: Mapping[str, float]) -> str:
    """One stage's text: by entry, how much of it is added to the base."""
    models = "".join(f"  - {{{e}, parameters: {{weight: {w}}}}}\n" for e, w in weights.items())
    return f"merge_method: task_arithmetic\nbase_model: base\nmodels:\n{models}"
