"""Trims keep of approximated deltas about as many elements as of the deltas themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.lab.bench.bench_budget import tensors
from tests.packs.test_offline import merged
from tests.support.stored import encode, write

NAMES = tuple(f"model.layers.{n}.a.weight" for n in range(3))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Warehouse:
    """A base and an expert whose deltas have ever fewer directions beside their noise."""
    folder, rng = tmp_path_factory.mktemp("family"), np.random.default_rng(0)
    base = {name: 0.02 * rng.standard_normal((512, 768)) for name in NAMES}
    expert = {}
    for name, rank in zip(NAMES, (64, 16, 4), strict=True):
        product = rng.standard_normal((512, rank)) @ rng.standard_normal((rank, 768))
        noise = 0.5 * rng.standard_normal(product.shape)
        expert[name] = base[name] + 0.002 * (product / rank**0.5 + noise)
    warehouse = Warehouse.at(folder / "home").ensure()
    for name, values in (("base", base), ("e0", expert)):
        (folder / name).mkdir()
        write(folder / name, name, {n: encode(v, "BF16") for n, v in values.items()})
        (folder / name / "config.json").write_text('{"architectures": ["Toy"]}')
        register(warehouse, folder / name, name, None if name == "base" else "base")
    pack(warehouse, ["e0"])
    return warehouse


def _changed(home: Warehouse, density: float, budget: str | None) -> torch.Tensor:
    """The share of each tensor's elements that a merge changes: [tensors]."""
    own = f"parameters: {{weight: 1, density: {density}}}"
    recipe = f"merge_method: ties\nbase_model: base\ndtype: float32\nmodels: [{{model: e0, {own}}}]"
    done = merged(home, recipe, budget=budget)
    before, after = (
        dict(tensors(f)) for f in (home.root.parent / "base", Path(done.snapshot.path))
    )
    return torch.stack([(after[name] != before[name]).float().mean() for name in NAMES])


@pytest.mark.parametrize("density", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("budget", ["0.5%", "2%"])
def test_of_an_approximated_delta_about_as_many_elements_are_kept(
    home: Warehouse, density: float, budget: str
) -> None:
    full, near = _changed(home, density, None), _changed(home, density, budget)
    assert torch.allclose(full, torch.tensor(density), atol=0.01)
    assert torch.allclose(near, full, atol=0.1 * density + 0.02)
