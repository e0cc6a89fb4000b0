"""Where our numbers differ from mergekit's: each test has mergekit compute here and now, too.

What decides between the two is a formula in float64, or the indices of what was kept.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.operators.steps.sparsify import drop_by_rank_
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run
from tests.operators.cases import make_job, merge
from tests.parity.conftest import FamilyOf
from tests.parity.peer import read_model, run_mergekit
from tests.parity.recipes import fill
from tests.support.architectures import Tensors, layout, write_model
from tests.support.oracles import ORACLES, Case
from tests.support.oracles_spherical import ORACLES_SPHERICAL

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("mergekit_is_here")]

SUM = """
merge_method: task_arithmetic
base_model: $base
models:
  - {model: $e0, parameters: {weight: 0.7}}
  - {model: $e1, parameters: {weight: 0.4}}
"""
#: A random number of one half for every element, as the integers that masks are drawn from.
HALF = 2**31


def merged(home: Warehouse, text: str) -> Tensors:
    """All tensors of our merge of recipe text."""
    return read_model(Path(run(home, text).snapshot.path))


def apart(values: Tensors, expected: Tensors) -> int:
    """Number of elements that differ."""
    return sum(int((values[n] != expected[n]).sum()) for n in expected)


@pytest.mark.parametrize(
    ("stored", "dtype", "share"),
    [("bfloat16", "", 0.04), ("float32", "dtype: bfloat16\n", 0.15)],
)
def test_arithmetic_is_in_float32_where_mergekit_rounds_inputs_and_steps_to_dtype(
    home: Warehouse, family_of: FamilyOf, stored: str, dtype: str, share: float
) -> None:
    """`share` of mergekit's elements at least are not the exact sum rounded once."""
    family = family_of("llama", stored)
    text = fill(SUM, family) + dtype
    base, first, second = (read_model(family / m) for m in ("base", "expert_00", "expert_01"))
    rounded = {}
    for n, below in base.items():
        exact = 0.7 * first[n].double() + 0.4 * second[n].double() - 0.1 * below.double()
        rounded[n] = exact.to(torch.bfloat16)
    total = sum(v.numel() for v in rounded.values())
    assert apart(run_mergekit(text), rounded) > share * total
    assert apart(merged(home, text), rounded) < 0.001 * total


def constant(folder: Path, model: str, value: Callable[[str], float]) -> None:
    """A one-layer float32 llama whose tensors have one value each."""
    tensors = {n: torch.full(shape, value(n)) for n, shape in layout("llama", 1)}
    write_model(folder / model, "llama", tensors, layers=1)


def test_of_equal_magnitudes_we_keep_the_lowest_indices_and_mergekit_others(
    home: Warehouse, tmp_path: Path
) -> None:
    constant(tmp_path / "flat", "base", lambda _: 0.0)
    constant(tmp_path / "flat", "expert_00", lambda _: 1.0)
    text = fill(
        "merge_method: ties\nbase_model: $base\nmodels: [{model: $e0}]\n"
        "parameters: {weight: 1, density: 0.5}\ndtype: float32\n",
        tmp_path / "flat",
    )
    theirs, ours = run_mergekit(text), merged(home, text)
    for name, value in ours.items():
        kept = value.flatten().nonzero().flatten()
        assert torch.equal(kept, torch.arange(value.numel() // 2)), name
        assert int((theirs[name] != 0).sum()) == len(kept), name
    assert any(not torch.equal(theirs[n], ours[n]) for n in ours)


@pytest.mark.parametrize("method", ["dare_linear", "della_linear"])
def test_masks_of_a_tensor_depend_on_others_in_mergekit_and_not_here(
    home: Warehouse, family_of: FamilyOf, method: str
) -> None:
    """The last norm is drawn behind the layers: more of them, another mask."""
    text = """
merge_method: {}
base_model: $base
slices:
  - sources:
      - {{model: $base, layer_range: [0, {}]}}
      - {{model: $e0, layer_range: [0, {}], parameters: {{weight: 1}}}}
parameters: {{density: 0.5}}
dtype: float32
"""
    one, two = (fill(text.format(method, n, n), family_of("llama")) for n in (1, 2))
    norm = "model.norm.weight"
    assert not torch.equal(run_mergekit(one, seed=1)[norm], run_mergekit(two, seed=1)[norm])
    here = [merged(home, text + "seed: 1\n") for text in (one, two)]
    assert all(torch.equal(value, here[1][name]) for name, value in here[0].items())


def test_della_on_rows_of_one_element_fails_in_mergekit_and_keeps_at_density_here() -> None:
    from mergekit.sparsify import della_magprune

    column = torch.ones(1000, 1)
    with pytest.raises(RuntimeError, match="Expected p_in >= 0"):
        della_magprune(column, density=0.6, epsilon=0.2)
    for number, kept in ((0.59, 1000), (0.61, 0)):
        rows = column.clone()
        numbers = np.full(1000, int(number * 2**32), dtype=np.uint32)
        drop_by_rank_(rows, numbers, density=0.6, epsilon=0.2)
        assert int(rows.sum()) == kept


def test_della_ranks_along_the_last_dimension_where_mergekit_ranks_along_the_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one number for every element the larger half of each row is kept."""
    from mergekit.sparsify import della_magprune

    delta = torch.from_numpy(np.random.default_rng(3).permutation(2 * 8 * 6) + 1.0).float()
    delta = delta.reshape(2, 8, 6)
    monkeypatch.setattr(torch, "bernoulli", lambda p: (p > 0.5).to(p.dtype))
    theirs = della_magprune(delta, density=0.5, epsilon=0.2) != 0
    assert torch.equal(theirs.sum(dim=1), torch.full((2, 6), 4))
    case = Case(
        np.zeros(delta.numel()),
        delta.double().flatten().numpy()[None],
        {"rescale": False, "normalize": False},
        [{"weight": 1.0, "density": 0.5, "epsilon": 0.2}],
        shape=tuple(delta.shape),
    )
    monkeypatch.setattr(
        "mergepipe_pipeline.operators.steps.sparsify.uniforms",
        lambda *a: np.full(a[-1], HALF, dtype=np.uint32),
    )
    op = OPERATORS["della_linear"]
    ours = merge(op, make_job(op, case)).reshape(delta.shape) != 0
    assert torch.equal(ours.sum(dim=2), torch.full((2, 8), 3))
    assert not torch.equal(ours, theirs)


def test_nuslerp_takes_columns_over_all_rows_where_mergekit_takes_them_along_dimension_0() -> None:
    """So that a stack of matrices, as fused experts, has the columns of a matrix."""
    from mergekit.merge_methods.nuslerp import nuslerp

    shape, op = (2, 3, 4), OPERATORS["nuslerp"]
    first, second = torch.randn((2, *shape), generator=torch.Generator().manual_seed(4))
    params = {"nuslerp_flatten": False, "nuslerp_row_wise": True}
    rows = torch.stack([first, second]).view(2, -1).double().numpy()
    case = Case(None, rows, params, [{"weight": 1.0}] * 2, shape=shape)
    ours = merge(op, make_job(op, case)).reshape(shape)
    along_0 = nuslerp(0.5, first, second, dim=0)
    over_rows = nuslerp(0.5, *(v.reshape(-1, shape[-1]) for v in (first, second)), dim=0)
    torch.testing.assert_close(ours, over_rows.reshape(shape))
    assert not torch.allclose(ours, along_0, atol=0.01)


def fusion(shape: tuple[int, int], delta: float) -> Case:
    """A base of normal numbers and an expert `delta` away from it, both float32."""
    numbers = np.random.default_rng(5)
    base = (0.05 * numbers.standard_normal(shape)).astype(np.float32)
    expert = (base + delta * numbers.standard_normal(shape)).astype(np.float32)
    flat = expert.astype(np.float64).reshape(1, -1)
    return Case(base.astype(np.float64).flatten(), flat, {}, [{}], shape=shape)


def fused_by_mergekit(case: Case, dtype: torch.dtype, seed: int) -> torch.Tensor:
    from mergekit.merge_methods import registry
    from mergekit.merge_methods.base import TensorGroup

    assert case.base is not None
    rows = [torch.from_numpy(r).to(dtype).reshape(case.shape) for r in (case.base, *case.experts)]
    torch.manual_seed(seed)
    group = TensorGroup.from_tensors(rows, base_index=0)
    (out,) = registry.get("arcee_fusion")([group], parameters={})
    flat: torch.Tensor = out.flatten().double()
    return flat


def not_exact(values: torch.Tensor, case: Case) -> int:
    """Number of elements where another one is taken, of base and expert, than in the oracle."""
    expected = torch.from_numpy(ORACLES["arcee_fusion"](case))
    return int((~torch.isclose(values.double(), expected, rtol=1e-6, atol=1e-7)).sum())


def test_arcee_fusion_takes_exact_quantiles_where_mergekit_samples_a_million() -> None:
    case, op = fusion((1100, 1000), 0.05), OPERATORS["arcee_fusion"]
    theirs = [fused_by_mergekit(case, torch.float64, seed) for seed in (0, 1)]
    assert not torch.equal(theirs[0], theirs[1])
    assert min(not_exact(t, case) for t in theirs) > 20
    assert not_exact(merge(op, make_job(op, case)), case) == 0


def test_arcee_fusion_divides_in_float64_where_float32_is_mostly_rounding() -> None:
    case, op = fusion((64, 1000), 0.0005), OPERATORS["arcee_fusion"]
    assert not_exact(fused_by_mergekit(case, torch.float32, 0), case) > 640
    assert not_exact(merge(op, make_job(op, case)), case) == 0


@pytest.mark.parametrize("method", ["nuslerp", "multislerp"])
def test_angles_come_from_float64_sums_where_mergekit_sums_in_float32(method: str) -> None:
    """Two deltas 1e-3 apart: 1 − cos is 5e-7, of which float32 has few digits left."""
    from mergekit.merge_methods import registry
    from mergekit.merge_methods.base import TensorGroup

    numbers = np.random.default_rng(8)
    first = numbers.standard_normal(200_000).astype(np.float32)
    second = (first + 1e-3 * numbers.standard_normal(first.size)).astype(np.float32)
    rows, weights = np.stack([first, second]), (1.0, 1.0)
    case = Case(None, rows.astype(np.float64), {}, [{"weight": w} for w in weights])
    exact, op = ORACLES_SPHERICAL[method](case), OPERATORS[method]
    group = TensorGroup.from_tensors([torch.from_numpy(r.copy()) for r in rows])
    ids = [entry.id for entry in group.non_base]
    parameters = {"weight": dict(zip(ids, weights, strict=True))}
    (theirs,) = registry.get(method)([group], parameters=parameters)
    ours = merge(op, make_job(op, case))
    error = [np.linalg.norm(v.double().numpy() - exact) for v in (ours, theirs)]
    assert error[0] < error[1] / 3
