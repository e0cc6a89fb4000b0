"""Random operators: not mergekit's bits, but its distribution, and the same bits for any layout.

The experts' deltas are chosen so that a merge shows which elements each of them kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run
from tests.parity.peer import read_model, run_mergekit
from tests.parity.recipes import fill
from tests.support.architectures import Tensors, layout, write_model

METHODS = ["dare_linear", "dare_ties", "della", "della_linear"]
SEEDS = range(4)
DENSITY, EPSILON = 0.4, 0.2
#: Standard deviations that a count may be off; a right one fails once in 300 000.
SIGMAS = 4.5
Merge = Callable[[str, int], Tensors]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of zeros; every row of an expert is 1 + r/64 for the ranks r, in random order."""
    folder = tmp_path_factory.mktemp("ranked")
    names = dict(layout("llama", 1))
    zeros = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in names.items()}
    write_model(folder / "base", "llama", zeros, layers=1)
    for e in range(2):
        generator = np.random.Generator(np.random.Philox(key=e))
        tensors = {}
        for name, shape in names.items():
            ranks = np.broadcast_to(np.arange(shape[-1], dtype=np.float32), shape)
            values = 1 + generator.permuted(ranks.copy(), axis=-1) / 64
            tensors[name] = torch.from_numpy(values).to(torch.bfloat16).contiguous()
        write_model(folder / f"expert_{e:02d}", "llama", tensors, layers=1)
    return folder


def recipe(family: Path, method: str, experts: int = 1) -> str:
    """One expert of weight 1, and a second one of weight 16 to tell their parts in the sum."""
    models = [f"  - {{model: $e{e}, parameters: {{weight: {16**e}}}}}\n" for e in range(experts)]
    epsilon = f", epsilon: {EPSILON}" if "della" in method else ""
    yaml = (
        f"merge_method: {method}\nbase_model: $base\nmodels:\n{''.join(models)}"
        f"parameters: {{density: {DENSITY}, normalize: false{epsilon}}}\n"
        "dtype: float32\nout_dtype: float32\n"
    )
    return fill(yaml, family)


def probabilities(method: str, n: int) -> np.ndarray:
    """Of being kept, for each rank of |δ| in a row of n; float64 [n]."""
    reach = EPSILON if "della" in method else 0.0
    return DENSITY - reach + 2 * reach * np.arange(n) / (n - 1)


@pytest.fixture(scope="module", params=["ours", pytest.param("mergekit", marks=pytest.mark.peer)])
def merge(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Merge:
    """Merges recipe text with a seed: by us, and by mergekit to prove the expectations right."""
    is_peer = request.param == "mergekit"
    if is_peer:
        request.getfixturevalue("mergekit_is_here")
    home = Warehouse.at(tmp_path_factory.mktemp("warehouse")).ensure()

    @cache
    def merged(text: str, seed: int) -> Tensors:
        if is_peer:
            return run_mergekit(text, seed=seed)
        return read_model(Path(run(home, f"{text}seed: {seed}\n").snapshot.path))

    return merged


@pytest.mark.parametrize("method", METHODS)
def test_elements_are_kept_with_the_probability_of_their_rank(
    family: Path, merge: Merge, method: str
) -> None:
    kept: dict[int, list[np.ndarray]] = {}
    expert = read_model(family / "expert_00")
    for seed in SEEDS:
        for name, value in merge(recipe(family, method), seed).items():
            if value.dim() == 2:
                ranks = ((expert[name].double() - 1) * 64).round().long()
                by_rank = torch.zeros_like(value).scatter_(1, ranks, (value != 0).float())
                kept.setdefault(value.shape[1], []).append(by_rank.numpy())
    assert kept.keys() == {32, 64}
    for n, parts in kept.items():
        rows = np.concatenate(parts)
        p = probabilities(method, n)
        deviation = (rows.sum(axis=0) - len(rows) * p) / np.sqrt(len(rows) * p * (1 - p))
        assert np.abs(deviation).max() < SIGMAS
        # The variance of the number kept in a row is that of independent draws.
        ratio = rows.sum(axis=1).var() / (p * (1 - p)).sum()
        assert ratio == pytest.approx(1, abs=SIGMAS * np.sqrt(2 / len(rows)))


@pytest.mark.parametrize("method", METHODS)
def test_what_is_kept_is_scaled_back_to_the_l1_norm(
    family: Path, merge: Merge, method: str
) -> None:
    expert = read_model(family / "expert_00")
    for name, value in merge(recipe(family, method), 0).items():
        delta = expert[name].double()
        assert float(value.double().sum()) == pytest.approx(float(delta.sum()), rel=1e-4)
        scale = (value.double() / delta)[value != 0]
        assert float(scale.max() / scale.min()) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_the_mean_over_seeds_is_the_expected_update(
    family: Path, merge: Merge, method: str
) -> None:
    """The delta times keep probability and scale: for dare the delta itself."""
    name, n_seeds = "model.embed_tokens.weight", 8
    delta = read_model(family / "expert_00")[name].double().numpy()
    ranks = np.rint((delta - 1) * 64).astype(int)
    p = probabilities(method, delta.shape[1])[ranks]
    scale = delta.sum() / (p * delta).sum()
    draws = [merge(recipe(family, method), s)[name].double().numpy() for s in range(n_seeds)]
    assert len({draw.tobytes() for draw in draws}) == n_seeds
    error = (np.mean(draws, axis=0) / delta - p * scale) / (scale * np.sqrt(p * (1 - p) / n_seeds))
    by_rank = np.array([error[ranks == r].mean() for r in range(delta.shape[1])])
    assert np.abs(by_rank).max() < SIGMAS / np.sqrt(delta.shape[0])
    assert error.var() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("method", METHODS)
def test_experts_drop_independently_of_each_other_and_of_neighbours(
    family: Path, merge: Merge, method: str
) -> None:
    """Weights of 1 and 16 for values from 1 to 2: below 8 only the first can have been kept."""
    merged = merge(recipe(family, method, experts=2), 1)["model.embed_tokens.weight"].flatten()
    alone = merge(recipe(family, method), 1)["model.embed_tokens.weight"].flatten()
    second = merged > 8
    first = torch.where(second, torch.zeros_like(merged), merged) > 0
    n = len(merged)
    share = float(first.double().sum() / (~second).double().sum())
    assert share == pytest.approx(DENSITY, abs=SIGMAS * np.sqrt(0.25 / float((~second).sum())))
    for mask in (second, alone != 0):
        pair = torch.stack([mask[:-1], mask[1:]]).double()
        assert abs(float(torch.corrcoef(pair)[0, 1])) < SIGMAS / n**0.5


@pytest.mark.parametrize("method", METHODS)
def test_blocks_threads_and_windows_change_no_bit(
    tmp_path: Path, family: Path, method: str
) -> None:
    layouts = [
        (EngineOptions(), None),
        (EngineOptions(threads=1, window_elems=1000), 4096),
        (EngineOptions(threads=2, window_elems=4097), 65536),
    ]
    ids = set()
    for i, (options, block) in enumerate(layouts):
        home = Warehouse.at(tmp_path / str(i)).ensure()
        text = recipe(family, method, experts=2) + "seed: 5\n"
        ids.add(run(home, text, options=options, block_elems=block).snapshot.snapshot_id)
    assert len(ids) == 1
