"""Without `dtype`, each weight comes out in the type that mergekit promotes its inputs to.

Every model stores some weights in bfloat16, some in float16 and some in float32, by turns, so that
one merge meets all combinations. mergekit computes here and now.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run
from tests.parity.peer import read_model, run_mergekit
from tests.parity.recipes import BARE, ON_BASE, ONE, PAIR, TRIO, fill
from tests.support.architectures import Tensors, make, write_model

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("mergekit_is_here")]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HALF = "parameters: {density: 0.5}\n"
BODIES = {
    "linear": TRIO,
    "linear-turned": PAIR.replace("$e0", "$e2"),
    "passthrough": "\nmodels: [{model: $e2}]\n",
    "task_arithmetic": TRIO + ON_BASE,
    "ties": TRIO + ON_BASE + HALF,
    "della": TRIO + ON_BASE + HALF,
    "slerp": ONE + "parameters: {t: 0.35}\n",
    "nuslerp": PAIR,
    "multislerp": TRIO + ON_BASE,
    "karcher": BARE,
    "model_stock": BARE + ON_BASE,
    "sce": BARE + ON_BASE,
    "nearswap": ONE + "parameters: {t: 0.002}\n",
    "ram": BARE + ON_BASE,
}
#: Where a float32 result can be compared by value: nothing is drawn, cut or summed up.
PLAIN = {"linear", "linear-turned", "passthrough", "task_arithmetic", "slerp"}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family of llamas whose models store each weight in a type of their own choice."""
    source = make(
        "llama", tmp_path_factory.mktemp("wide"), 3, layers=2, dtype=torch.float32, unchanged=False
    )
    folder = tmp_path_factory.mktemp("mixed")
    turns = list(product(DTYPES, repeat=2))
    for number, model in enumerate(sorted(source.iterdir())):
        values: Tensors = {}
        for i, (name, value) in enumerate(sorted(read_model(model).items())):
            kinds = (*turns[i % 9], turns[i // 9 % 9][0], turns[(i // 3) % 9][1])
            values[name] = value.to(kinds[number])
        write_model(folder / model.name, "llama", values, layers=2)
    return folder


@pytest.mark.parametrize("case", BODIES)
def test_each_weight_is_promoted_as_mergekit_promotes_it(
    home: Warehouse, mixed: Path, case: str
) -> None:
    method = case.partition("-")[0]
    text = fill(f"merge_method: {method}{BODIES[case]}", mixed)
    theirs, ours = run_mergekit(text), read_model(Path(run(home, text).snapshot.path))
    assert {n: v.dtype for n, v in ours.items()} == {n: v.dtype for n, v in theirs.items()}
    assert len({v.dtype for v in ours.values()}) > 1
    for name, value in ours.items():
        if case in PLAIN and value.dtype == torch.float32:
            torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("method", "body"), [("arcee_fusion", ONE), ("ramplus_tl", BARE + ON_BASE)]
)
def test_a_mask_makes_every_weight_float32_in_mergekit_and_none_here(
    home: Warehouse, mixed: Path, method: str, body: str
) -> None:
    text = fill(f"merge_method: {method}{body}", mixed)
    theirs, ours = run_mergekit(text), read_model(Path(run(home, text).snapshot.path))
    assert {v.dtype for v in theirs.values()} == {torch.float32}
    assert len({v.dtype for v in ours.values()}) > 1


@pytest.mark.parametrize("key", ["dtype", "out_dtype"])
def test_a_dtype_that_is_asked_for_is_that_of_every_weight(
    home: Warehouse, mixed: Path, key: str
) -> None:
    text = fill(f"merge_method: linear{TRIO}{key}: float16\n", mixed)
    for made in (run_mergekit(text), read_model(Path(run(home, text).snapshot.path))):
        assert {v.dtype for v in made.values()} == {torch.float16}
