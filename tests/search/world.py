"""A tiny family to search: two experts hold one number each, and a command measures the merge."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from mergepipe_pipeline.warehouse import Warehouse
from tests.support.family import layout, write_model

_SIZE = {"layers": 3, "hidden": 8, "vocab": 16}
PROGRAM = [sys.executable, "-m", "mergepipe_pipeline.cli.main"]
#: Reads the first number of each tensor: `low` wants the first layers at 0, `high` the last at 1.
EVALUATOR = """
import json, pathlib, struct, sys, time

def numbers(path):
    with path.open("rb") as file:
        (n,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(n))
        for name, entry in header.items():
            if name != "__metadata__":
                file.seek(8 + n + entry["data_offsets"][0])
                yield name, struct.unpack("<f", file.read(4))[0]

here, snapshot = pathlib.Path(__file__), pathlib.Path(sys.argv[-1])
with open(here.with_suffix(".begun"), "a") as log:
    print(snapshot.name, file=log)
if here.with_suffix(".slow").exists():
    time.sleep(float(here.with_suffix(".slow").read_text()))
found = dict(x for path in snapshot.glob("*.safetensors") for x in numbers(path))
first = found["model.layers.0.self_attn.q_proj.weight"]
last = found["model.layers.2.self_attn.q_proj.weight"]
if here.with_suffix(".picky").exists() and first > 0.5:
    sys.exit("this one is too hard")
with open(here.with_suffix(".ended"), "a") as log:
    print(snapshot.name, file=log)
print(json.dumps({"good": (first + last) / 2, "cost": first * first + last, "half": 0.5}))
"""
SEARCH = """
sources: [one, zero]
base_model: base
merge_method: task_arithmetic
objectives:
  good: {direction: max, anchors: [0, 1]}
  cost: {direction: min, anchors: [2, 0]}
evaluate: {command: [python, eval.py], retries: 0, timeout: 60}
"""


class World:
    """A folder with models, an evaluator and search files, beside a warehouse."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = Warehouse.at(folder / "warehouse").ensure()
        (folder / "eval.py").write_text(EVALUATOR)
        for name, value in (("base", 0.0), ("one", 1.0), ("zero", 0.0)):
            self.make(name, value)

    def make(self, name: str, value: float, **layers: float) -> Path:
        """A model of one number, or of others in some layers (`layer_1=2.0`)."""
        tensors = {}
        for tensor, shape in layout(**_SIZE):
            mine = [v for k, v in layers.items() if f"layers.{k.removeprefix('layer_')}." in tensor]
            tensors[tensor] = torch.full(shape, mine[0] if mine else value)
        return write_model(self.folder / name, tensors, **_SIZE)

    def write(
        self, extra: str = "evaluations: 6\ninitial: 6\nseed: 7\n", name: str = "mix"
    ) -> Path:
        """A search file."""
        path = self.folder / f"{name}.yml"
        path.write_text(SEARCH + extra)
        return path

    def flag(self, name: str, text: str = "") -> None:
        """Let the evaluator be `slow` by seconds, or `picky`."""
        (self.folder / f"eval.{name}").write_text(text)

    def log(self, name: str) -> list[str]:
        """The snapshots of which evaluations have `begun` or `ended`."""
        path = self.folder / f"eval.{name}"
        return path.read_text().split() if path.exists() else []

    def start(self, path: Path, *options: str) -> subprocess.Popen[str]:
        """`mergepipe search` in a process group of its own."""
        return subprocess.Popen(
            [*PROGRAM, "--home", str(self.home.root), "search", str(path), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            start_new_session=True,
        )
