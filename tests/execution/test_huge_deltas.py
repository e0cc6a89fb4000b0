"""One weight that is NaN, infinite or huge ends no plan, and no figure of it is made up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mergepipe_pipeline.execution.lookup import load_plan
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.stored import encode, write

_SHAPE = (300, 500)


@pytest.fixture
def odd(tmp_path: Path, value: float) -> Warehouse:
    """A base, a plain expert, and one that has `value` once."""
    warehouse, rng = Warehouse.at(tmp_path / "home").ensure(), np.random.default_rng(0)
    base = {f"model.layers.{n}.a.weight": 0.02 * rng.standard_normal(_SHAPE) for n in range(3)}
    for name in ("base", "plain", "odd"):
        tensors = {
            k: v + (name != "base") * 0.002 * rng.standard_normal(_SHAPE) for k, v in base.items()
        }
        if name == "odd":
            tensors["model.layers.1.a.weight"][0, 77] = value
        (tmp_path / name).mkdir()
        write(tmp_path / name, name, {k: encode(v, "BF16") for k, v in tensors.items()})
        register(warehouse, tmp_path / name, name, None if name == "base" else "base")
    return warehouse


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e25, 3e38])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("method", ["dare_ties", "linear", "task_arithmetic"])
def test_one_odd_weight_ends_no_merge_and_no_error_is_said_to_be_zero(
    odd: Warehouse, method: str, packed: bool
) -> None:
    if packed:
        pack(odd)
    for budget in ("", "budget: 12.5%\n"):
        density = ", density: 0.5" if method == "dare_ties" else ""
        text = (
            f"merge_method: {method}\nbase_model: base\nparameters: {{weight: 0.5{density}}}\n"
            f"models: [{{model: plain}}, {{model: odd}}]\n{budget}"
        )
        outcome = merge(odd, parse(text, name="r", where="r.yml")).outcome
        assert load_plan(odd, outcome.plan.plan_id).plan_id == outcome.plan.plan_id
        if budget:
            assert outcome.plan.estimates.predicted_error != 0
