"""Where we differ from mergekit: what it refuses, drops or turns into NaN, and what we do then.

Each case fails when mergekit (or we) change, so that docs/mergekit.md stays true.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.errors import MergePipeError, RecipeError
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run
from tests.parity.conftest import FamilyOf
from tests.parity.peer import read_model, run_mergekit
from tests.parity.recipes import BARE, ON_BASE, SUFFIX, fill
from tests.parity.refusals import NOT_FINITE, REFUSALS, UP_SCALE
from tests.support.architectures import LAYERS, write_model


@pytest.mark.peer
@pytest.mark.usefixtures("mergekit_is_here")
@pytest.mark.parametrize("name", REFUSALS)
def test_mergekit_refuses(family_of: FamilyOf, name: str) -> None:
    case = REFUSALS[name]
    with pytest.raises(Exception, match=case.says):
        run_mergekit(fill(case.yaml, family_of(case.arch)) + SUFFIX)


@pytest.mark.parametrize("name", [n for n, case in REFUSALS.items() if case.ours == "merges"])
def test_we_merge_what_mergekit_refuses(home: Warehouse, family_of: FamilyOf, name: str) -> None:
    case = REFUSALS[name]
    merged = read_model(Path(run(home, fill(case.yaml, family_of(case.arch))).snapshot.path))
    assert all(bool(value.isfinite().all()) for value in merged.values())


@pytest.mark.parametrize("name", [n for n, case in REFUSALS.items() if case.ours == "refuses"])
def test_we_refuse_what_cannot_be_merged(home: Warehouse, family_of: FamilyOf, name: str) -> None:
    case = REFUSALS[name]
    with pytest.raises(MergePipeError, match=r"\S"):
        run(home, fill(case.yaml, family_of(case.arch)))


@pytest.mark.peer
@pytest.mark.usefixtures("mergekit_is_here")
@pytest.mark.parametrize("name", NOT_FINITE)
def test_mergekit_makes_models_that_are_not_finite(family_of: FamilyOf, name: str) -> None:
    merged = run_mergekit(fill(NOT_FINITE[name], family_of("llama")) + SUFFIX)
    assert not all(bool(value.isfinite().all()) for value in merged.values())


@pytest.mark.parametrize("name", NOT_FINITE)
def test_we_make_no_model_that_is_not_finite(
    home: Warehouse, family_of: FamilyOf, name: str
) -> None:
    with pytest.raises(MergePipeError, match=r"\S"):
        run(home, fill(NOT_FINITE[name], family_of("llama")))


@pytest.mark.peer
@pytest.mark.usefixtures("mergekit_is_here")
@pytest.mark.parametrize("name", ["r", "alpha"])
def test_factors_that_shrink_lone_changes_are_refused_here(
    home: Warehouse, family_of: FamilyOf, name: str
) -> None:
    recipe = "merge_method: ramplus_tl" + BARE + ON_BASE + "parameters: {" + name + ": -0.5}\n"
    text = fill(recipe, family_of("llama"))
    assert all(bool(value.isfinite().all()) for value in run_mergekit(text + SUFFIX).values())
    with pytest.raises(RecipeError, match=rf"expected a number from 0 up.*parameters\.{name}"):
        run(home, text)


@pytest.mark.peer
@pytest.mark.usefixtures("mergekit_is_here")
def test_mergekits_ramplus_divides_zero_by_zero_and_ours_keeps_the_base(
    home: Warehouse, family_of: FamilyOf
) -> None:
    family = family_of("llama")
    recipe = "merge_method: ramplus_tl" + BARE + ON_BASE + "parameters: {epsilon: 0}\n"
    text = fill(recipe, family) + SUFFIX
    theirs, ours = run_mergekit(text), read_model(Path(run(home, text).snapshot.path))
    base = read_model(family / "base")
    experts = [read_model(path) for path in family.glob("expert_*")]
    unchanged = [n for n in base if all(torch.equal(e[n], base[n]) for e in experts)]
    assert unchanged
    for name in unchanged:
        assert theirs[name].isnan().any(), name
        assert torch.equal(ours[name], base[name].float()), name


@pytest.mark.peer
@pytest.mark.usefixtures("mergekit_is_here")
def test_mergekit_asks_for_buffers_that_gpt_neox_files_no_longer_have(
    home: Warehouse, family_of: FamilyOf, tmp_path: Path
) -> None:
    for model in family_of("gpt_neox").iterdir():
        buffers = ("attention.bias", "masked_bias", "inv_freq")
        kept = {n: t for n, t in read_model(model).items() if not n.endswith(buffers)}
        write_model(tmp_path / "family" / model.name, "gpt_neox", kept)
    text = fill("merge_method: passthrough\nmodels: [{model: $e0}]\n", tmp_path / "family") + SUFFIX
    with pytest.raises(RuntimeError, match=r"attention\..* required but not present"):
        run_mergekit(text)
    ours = read_model(Path(run(home, text).snapshot.path))
    assert ours.keys() == read_model(tmp_path / "family" / "expert_00").keys()


@pytest.mark.peer
@pytest.mark.usefixtures("mergekit_is_here")
def test_mergekit_leaves_sources_of_the_last_slice_out_of_the_head(
    home: Warehouse, family_of: FamilyOf
) -> None:
    """It counts them by the first slice; we merge the head from all of them."""
    family = family_of("llama")
    text = (
        fill(
            """
merge_method: linear
slices:
  - sources: [{model: $e0, layer_range: [0, 2], parameters: {weight: 1}}]
  - sources:
      - {model: $e0, layer_range: [2, 4], parameters: {weight: 1}}
      - {model: $e1, layer_range: [2, 4], parameters: {weight: 1}}
""",
            family,
        )
        + SUFFIX
    )
    head = "lm_head.weight"
    first, second = (read_model(family / f"expert_0{i}")[head] for i in range(2))
    assert torch.equal(run_mergekit(text)[head], first)
    ours = read_model(Path(run(home, text).snapshot.path))[head]
    assert torch.equal(ours, ((first.float() + second.float()) / 2).to(torch.bfloat16))


@pytest.mark.peer
@pytest.mark.usefixtures("mergekit_is_here")
def test_the_head_of_an_architecture_unknown_to_mergekit_is_the_first_slices_there(
    home: Warehouse, family_of: FamilyOf, tmp_path: Path
) -> None:
    """It takes all that is outside the layers from the first slice; we take the last one's head."""
    family = Path(shutil.copytree(family_of("llama"), tmp_path / "family"))
    for model in family.iterdir():
        config = json.loads((model / "config.json").read_text())
        config["architectures"] = ["OwnLlamaForCausalLM"]
        (model / "config.json").write_text(json.dumps(config))
    yaml = """
merge_method: passthrough
slices:
  - sources: [{model: $e0, layer_range: [0, 2]}]
  - sources: [{model: $e1, layer_range: [2, 4]}]
"""
    text = fill(yaml, family) + SUFFIX
    first, last = (read_model(family / f"expert_0{i}") for i in range(2))
    theirs = run_mergekit(text)
    ours = read_model(Path(run(home, text).snapshot.path))
    norm = "model.norm.weight"
    assert not torch.equal(first[norm], last[norm])
    assert torch.equal(theirs[norm], first[norm])
    assert torch.equal(ours[norm], last[norm])


@pytest.mark.peer
@pytest.mark.usefixtures("mergekit_is_here")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_models_that_are_not_finite_are_not_measured_against_each_other(
    home: Warehouse, family_of: FamilyOf, tmp_path: Path, value: float
) -> None:
    """One such element makes the whole tensor NaN in mergekit."""
    family = Path(shutil.copytree(family_of("llama"), tmp_path / "family"))
    name, file = "model.norm.weight", family / "expert_00" / "model.safetensors"
    tensors = load_file(file)
    tensors[name][3] = value
    save_file(tensors, file, metadata={"format": "pt"})
    text = fill("merge_method: karcher\nmodels: [{model: $e0}, {model: $e1}]\n", family) + SUFFIX
    assert bool(run_mergekit(text)[name].isnan().all())
    with pytest.raises(MergePipeError, match="NaN or infinity"):
        run(home, text)


@pytest.mark.parametrize("arch", ["gemma2", "qwen3"])
def test_kinds_of_layers_are_sliced_like_the_layers(
    home: Warehouse, family_of: FamilyOf, arch: str
) -> None:
    family = family_of(arch)
    outcome = run(home, fill("merge_method: passthrough" + UP_SCALE, family))
    before = json.loads((family / "base" / "config.json").read_text())["layer_types"]
    after = json.loads((Path(outcome.snapshot.path) / "config.json").read_text())
    assert after["layer_types"] == before[0:3] + before[1:4]
    assert after["num_hidden_layers"] == 2 * LAYERS - 2
