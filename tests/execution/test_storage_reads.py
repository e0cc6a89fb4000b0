"""What does not fit into the page cache is read from storage once, and the base stays there."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from mergepipe_pipeline.engine import sources
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.storage.uncached import cached_nbytes, read_uncached
from mergepipe_pipeline.warehouse import Warehouse
from tests.storage.files import drop
from tests.support.stored import encode, write

pytestmark = pytest.mark.usefixtures("durable_writes")

_ROWS, _COLS = 2048, 1024
_NBYTES = 2 * _ROWS * _COLS
_NAMES = ("base", "e0", "e1", "e2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and three experts of one tensor of 4 MiB."""
    folder = tmp_path_factory.mktemp("models")
    rng = np.random.default_rng(0)
    base = rng.standard_normal((_ROWS, _COLS), np.float32)
    for name in _NAMES:
        values = base + 0.1 * rng.standard_normal(base.shape, np.float32) * (name != "base")
        write(folder, name, {"lm_head.weight": encode(values, "BF16")})
    return folder


def weights(models: Path, name: str) -> Path:
    return models / f"{name}.safetensors"


def recipe(models: Path, method: str, parameters: str) -> ParsedRecipe:
    experts = "".join(f"  - {{model: {weights(models, name)}}}\n" for name in _NAMES[1:])
    text = f"merge_method: {method}\nbase_model: {weights(models, 'base')}\nmodels:\n{experts}"
    return parse(f"{text}parameters: {parameters}\ndtype: bfloat16\n", name="r", where="r")


def merge_cold(home: Warehouse, models: Path, method: str, parameters: str) -> int:
    """Merge what is known, with no file in the page cache; bytes that storage gave for it."""
    plan = make_plan(home, recipe(models, method, parameters))
    for name in _NAMES:
        drop(weights(models, name))
    before = read_of_storage()
    run_plan(home, plan, options=EngineOptions(memory_bytes=16 << 20))
    return read_of_storage() - before


def read_of_storage() -> int:
    with open("/proc/self/io", encoding="ascii") as file:
        return int(dict(line.split(": ") for line in file)["read_bytes"])


@pytest.fixture(autouse=True)
def page_cache_for_the_experts_alone(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a plan reads and writes does not fit into the page cache; a tensor of it does."""
    drop(weights(models, "e0"))
    handle = os.open(weights(models, "e0"), os.O_RDONLY)
    can = read_uncached(handle, 0, memoryview(bytearray(1 << 20)))
    os.close(handle)
    if not can:
        pytest.skip("this file system reads through the page cache only")
    monkeypatch.setattr(sources, "fits_page_cache", lambda nbytes: nbytes <= 3 * _NBYTES)


def test_a_tensor_that_is_too_long_to_be_held_is_read_from_storage_once_for_norms_and_merge(
    home: Warehouse, models: Path
) -> None:
    found = merge_cold(home, models, "dare_ties", "{density: 0.5, weight: 0.3}")
    assert 4 * _NBYTES <= found < 4.3 * _NBYTES


def _cached_share(path: Path) -> float:
    """The share of a file that is in the page cache."""
    with path.open("rb") as file:
        nbytes = path.stat().st_size
        return (cached_nbytes(file.fileno(), 0, nbytes) or 0) / nbytes


def test_the_base_stays_in_the_page_cache_and_experts_go_past_it(
    home: Warehouse, models: Path
) -> None:
    merge_cold(home, models, "task_arithmetic", "{weight: 0.3}")
    shares = [_cached_share(weights(models, n)) for n in _NAMES]
    assert shares[0] > 0.9
    assert max(shares[1:]) < 0.1


def test_a_base_that_is_in_the_page_cache_already_is_not_read_from_storage(
    home: Warehouse, models: Path
) -> None:
    plan = make_plan(home, recipe(models, "task_arithmetic", "{weight: 0.3}"))
    for name in _NAMES:
        drop(weights(models, name))
    weights(models, "base").read_bytes()
    before = read_of_storage()
    run_plan(home, plan)
    assert read_of_storage() - before < 3.2 * _NBYTES
