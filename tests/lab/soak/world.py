"""What people do to inbox and recipes; the model hears of each act at its last byte."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.warehouse import Warehouse
from tests.lab.soak.model import Model, Recipe
from tests.support.family import layout, write_model

#: Above what checkpoints hold, and below what one that is made worse holds.
LIMIT, WORST = 1 << 20, 1 << 22
#: An evaluator: the number that a merged model's tensors hold.
_EVALUATOR = """
import json, pathlib, struct, sys

path = min(pathlib.Path(sys.argv[-1]).glob("*.safetensors"))
with path.open("rb") as file:
    (n,) = struct.unpack("<Q", file.read(8))
    header = json.loads(file.read(n))
    start = next(v["data_offsets"][0] for k, v in header.items() if k != "__metadata__")
    file.seek(8 + n + start)
    print(json.dumps({"number": struct.unpack("<f", file.read(4))[0]}))
"""
_SIZE = {"layers": 2, "hidden": 16, "vocab": 64}


class World:
    """A warehouse that people copy to. `last_byte` is the time of the last act, in seconds.

    Recipes are the warehouse's own, or `put` writes their text or takes them away; their programs
    lie in the folder `beside`.
    """

    def __init__(
        self,
        home: Warehouse,
        scratch: Path,
        seed: int,
        put: Callable[[str, str | None], None] | None = None,
        beside: Path | None = None,
    ) -> None:
        self.home, self.model, self.random = home, Model(), random.Random(seed)
        self._put, self._beside = put or self._put_into_warehouse, beside or home.recipes
        self._scratch, self._aside = scratch, dict[str, int]()
        self.last_byte = time.time()

    def land(self, name: str, shards: int = 2) -> None:
        """Copy a checkpoint, or its next version, with numbers that no other has."""
        value = self.random.randrange(1 << 18)
        source = self._made(name, value, shards)
        shutil.copytree(source, self.home.inbox / name, dirs_exist_ok=True)
        self._whole(name, value)

    def worsen(self, name: str) -> None:
        """Copy a version with a number that every gate refuses."""
        value = WORST + self.random.randrange(1 << 10)
        source = self._made(name, value, shards=2)
        shutil.copytree(source, self.home.inbox / name, dirs_exist_ok=True)
        self._whole(name, value)

    def crowd(self, count: int) -> None:
        """Land and index checkpoints of one tensor that nobody uses or touches again."""
        one = self._scratch / "one.safetensors"
        self._scratch.mkdir(parents=True, exist_ok=True)
        save_file({"model.norm.weight": torch.ones(8)}, one)
        for i in range(count):
            folder = self.home.inbox / f"crowd-{i:04d}"
            folder.mkdir()
            shutil.copy(one, folder / "model.safetensors")
            index_arrival(self.home, folder.name)

    def land_half(self, name: str) -> None:
        """Copy the first shard of a next version; what else was there stays as it was."""
        value = self.random.randrange(1 << 18)
        source = self._made(name, value, 2)
        self.model.lost(name)
        self._aside[name] = value
        (self.home.inbox / name).mkdir(exist_ok=True)
        for path in sorted(source.glob("*-00001-of-*")):
            shutil.copy(path, self.home.inbox / name)
        self.last_byte = time.time()

    def land_rest(self, name: str) -> None:
        """Copy what `land_half` left."""
        value = self._aside.pop(name)
        shutil.copytree(
            self._scratch / f"{name}-{value}", self.home.inbox / name, dirs_exist_ok=True
        )
        self._whole(name, value)

    def touch(self, name: str) -> None:
        """Give a checkpoint's files a new time."""
        for path in (self.home.inbox / name).iterdir():
            os.utime(path)
        self._whole(name, self.model.inbox[name])

    def delete(self, name: str) -> None:
        """Take a checkpoint away."""
        self._aside[name] = self.model.inbox[name]
        self.model.lost(name)
        (self.home.inbox / name).rename(self._scratch / f"{name}-away")
        self.last_byte = time.time()

    def bring_back(self, name: str) -> None:
        """Put back what `delete` took."""
        away, here = self._scratch / f"{name}-away", self.home.inbox / name
        shutil.copytree(away, here, copy_function=shutil.copy)  # with times of its own
        shutil.rmtree(self._scratch / f"{name}-away")
        self._whole(name, self._aside.pop(name))

    def rename(self, old: str, new: str) -> None:
        """Give a checkpoint another name."""
        value = self.model.inbox[old]
        self.model.lost(old)
        (self.home.inbox / old).rename(self.home.inbox / new)
        self._whole(new, value)

    def write(self, name: str, recipe: Recipe) -> None:
        """Write a recipe."""
        if recipe.limit is not None:
            (self._beside / "eval.py").write_text(_EVALUATOR)
        self._put(name, recipe.text)
        self.model.recipes[name] = recipe
        self.model.note()
        self.last_byte = time.time()

    def drop_recipe(self, name: str) -> None:
        """Take a recipe away."""
        del self.model.recipes[name]
        self._put(name, None)
        self.last_byte = time.time()

    def _put_into_warehouse(self, name: str, text: str | None) -> None:
        put_file(self.home.recipe_path(name), text)

    def _whole(self, name: str, value: int) -> None:
        self.model.wrote(name, value)
        self.last_byte = time.time()

    def _made(self, name: str, value: int, shards: int) -> Path:
        tensors = {n: torch.full(shape, float(value)) for n, shape in layout(**_SIZE)}
        return write_model(self._scratch / f"{name}-{value}", tensors, shards=shards, **_SIZE)


def put_file(path: Path, text: str | None) -> None:
    """Write a file as editors do, aside and then in place, or take it away."""
    if text is None:
        path.unlink()
        return
    aside = path.with_name(f".{path.stem}.swp")
    aside.write_text(text)
    aside.replace(path)
