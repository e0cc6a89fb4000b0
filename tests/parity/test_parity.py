"""Our result is mergekit's, for every deterministic operator on several architectures.

mergekit computes here and now. Both sides compute in float32 and round to bfloat16 once, so that
results agree to one last place, and to the bit but for rare roundings. Documented exceptions are
in `recipes` (`Doubt`, `reference`) and in `refusals`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run
from tests.parity.compare import assert_same, doubtful_elements
from tests.parity.conftest import FamilyOf
from tests.parity.peer import plan_of_mergekit, read_family, read_model, run_mergekit
from tests.parity.recipes import RECIPES
from tests.support.architectures import ARCHITECTURES, fused

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("mergekit_is_here")]

#: What mergekit leaves out of a BertForMaskedLM without a word; we keep it.
LEFT_OUT = {"bert": "cls.predictions.transform."}
#: Where tensors are merged one expert at a time by us and all in one by mergekit, only methods
#: that look at single elements can agree.
ELEMENTWISE = {"linear", "passthrough", "task_arithmetic", "nearswap", "ram"}

CASES = [(name, arch) for name, recipe in RECIPES.items() for arch in recipe.archs]


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_the_result_is_that_of_mergekit(
    home: Warehouse, family_of: FamilyOf, name: str, arch: str
) -> None:
    recipe = RECIPES[name]
    family = family_of(arch, recipe.stored, recipe.unchanged)
    text = recipe.text(family)
    theirs = run_mergekit(text.replace("\ndtype: float32", f"\ndtype: {recipe.reference}"))
    plan = plan_of_mergekit(text) if recipe.doubt != "none" else {}
    doubtful = doubtful_elements(recipe.doubt, plan, read_family(family) if plan else {})
    ours = fused(arch, read_model(Path(run(home, text).snapshot.path)))
    left_out = {n for n in ours if n.startswith(LEFT_OUT.get(arch, "\0"))}
    assert theirs.keys().isdisjoint(left_out)
    assert_same({n: t for n, t in ours.items() if n not in left_out}, theirs, doubtful)


def test_every_architecture_is_compared() -> None:
    assert {arch for _, arch in CASES} == ARCHITECTURES.keys() - {"bert_model", "qwen2"}


def test_a_mixture_is_compared_for_elementwise_methods_only() -> None:
    methods = {RECIPES[n].yaml.split(maxsplit=2)[1] for n, arch in CASES if arch == "mixtral"}
    assert methods <= ELEMENTWISE


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("linear", "weight: 0.731", "weight: 0.74"),
        ("ties", "density: 0.3", "density: 0.31"),
        ("breadcrumbs", "gamma: 0.05", "gamma: 0.06"),
        ("slerp", "t: 0.35", "t: 0.355"),
        ("sce-topk", "select_topk: 0.4", "select_topk: 0.41"),
        ("karcher-once", "max_iter: 1", "max_iter: 0"),
    ],
)
def test_a_slightly_different_recipe_is_told_apart(
    family_of: FamilyOf, name: str, before: str, after: str
) -> None:
    """What the comparison forgives is less than any change of a parameter makes."""
    recipe = RECIPES[name]
    family = family_of(recipe.archs[-1], recipe.stored, recipe.unchanged)
    text = recipe.text(family)
    assert before in text
    plan = plan_of_mergekit(text)
    doubtful = doubtful_elements(recipe.doubt, plan, read_family(family))
    with pytest.raises(AssertionError, match=r"differ|bit-equal"):
        assert_same(run_mergekit(text.replace(before, after)), run_mergekit(text), doubtful)
