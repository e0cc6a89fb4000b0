"""Models of one architecture that name or lay out their tensors in two ways, beside mergekit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mergepipe_pipeline.errors import IncompatibleCheckpointsError
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import resolve
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run
from tests.parity.conftest import FamilyOf
from tests.parity.peer import read_model, run_mergekit
from tests.support.architectures import Tensors, fused

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("mergekit_is_here")]

BASE, E0, E1 = "base", "expert_00", "expert_01"
TIES = (
    "merge_method: ties\nbase_model: {base}\nmodels:\n"
    "- {{model: {a}, parameters: {{weight: 0.6, density: 0.5}}}}\n"
    "- {{model: {b}, parameters: {{weight: 0.3}}}}\ndtype: float32\n"
)
LINEAR = (
    "merge_method: linear\nmodels:\n"
    "- {{model: {base}, parameters: {{weight: 0.2}}}}\n"
    "- {{model: {a}, parameters: {{weight: 0.6}}}}\n"
    "- {{model: {b}, parameters: {{weight: 0.3}}}}\ndtype: float32\n"
)


def rewritten(model: Path, target: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """A copy of a model with other tensors, in one file."""
    shutil.copytree(model, target)
    values = {n: t.contiguous() for n, t in change(read_model(model)).items()}
    for file in target.glob("*.safetensors*"):
        file.unlink()
    save_file(values, target / "model.safetensors", metadata={"format": "pt"})
    return target


def qwen_names(tensors: Tensors) -> Tensors:
    """A mixtral's tensors by the names that Qwen's mixtures have."""
    words = {"block_sparse_moe": "mlp", ".w1.": ".gate_proj.", ".w3.": ".up_proj."}
    words[".w2."] = ".down_proj."
    out = {}
    for name, value in tensors.items():
        for old, new in words.items():
            name = name.replace(old, new)
        out[name] = value
    return out


def hub_gpt2(tensors: Tensors) -> Tensors:
    """As the hub has it: without the prefix, and with the mask that nobody reads."""
    mask = {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril() for i in range(4)}
    return {n.removeprefix("transformer."): t for n, t in tensors.items()} | mask


def old_bert(tensors: Tensors) -> Tensors:
    words = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    out = {}
    for name, value in tensors.items():
        for new, old in words.items():
            name = name.replace(new, old) if name.startswith("bert.") else name
        out[name] = value
    return out


#: A family, and how its second expert is written.
OTHER_NAMES = {"gpt2": hub_gpt2, "bert": old_bert}


@pytest.mark.parametrize("arch", OTHER_NAMES)
@pytest.mark.parametrize("text", [TIES, LINEAR], ids=["ties", "linear"])
@pytest.mark.parametrize("which", ["base", "a", "b"])
def test_a_model_with_other_names_merges_as_in_mergekit(
    home: Warehouse, family_of: FamilyOf, tmp_path: Path, arch: str, text: str, which: str
) -> None:
    family = family_of(arch, "float32")
    models = {"base": family / BASE, "a": family / E0, "b": family / E1}
    models[which] = rewritten(models[which], tmp_path / "other", OTHER_NAMES[arch])
    theirs = run_mergekit(text.format(**models))
    ours = read_model(Path(run(home, text.format(**models)).snapshot.path))
    lead = read_model(models["base"])
    assert ours.keys() - lead.keys() <= {"lm_head.weight"}
    assert len(theirs.keys()) > 20
    for name, value in theirs.items():
        own = next(n for n in (name, *_other_words(name)) if n in ours)
        torch.testing.assert_close(ours[own], value, rtol=1e-5, atol=1e-6, msg=name)


def _other_words(name: str) -> list[str]:
    old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
    return [name.removeprefix("transformer."), old.replace("LayerNorm.bias", "LayerNorm.beta")]


@pytest.mark.parametrize("names", ["mixtral", "qwen"])
@pytest.mark.parametrize("text", [TIES, LINEAR], ids=["ties", "linear"])
def test_experts_apart_and_fused_merge_as_the_base_has_them(
    home: Warehouse, family_of: FamilyOf, tmp_path: Path, names: str, text: str
) -> None:
    """mergekit fuses all; with the base fused, so do we, and results are the same."""
    family = family_of("mixtral", "float32")
    change = qwen_names if names == "qwen" else dict
    apart = {n: rewritten(family / n, tmp_path / n, change) for n in (BASE, E0, E1)}
    together = {
        n: rewritten(family / n, tmp_path / f"{n}-fused", lambda t: fused("mixtral", t))
        for n in (BASE, E0, E1)
    }
    found = {}
    for base, a, b in ((together, apart, together), (apart, together, apart)):
        models = {"base": base[BASE], "a": a[E0], "b": b[E1]}
        outcome = run(home, text.format(**models))
        ours = read_model(Path(outcome.snapshot.path))
        assert ours.keys() == read_model(base[BASE]).keys()
        found[base is together] = ours
    same = {"base": together[BASE], "a": together[E0], "b": together[E1]}
    whole = read_model(Path(run(home, text.format(**same)).snapshot.path))
    assert all(torch.equal(whole[n], t) for n, t in found[True].items())
    if names == "mixtral":
        mixed = {"base": family / BASE, "a": together[E0], "b": apart[E1]}
        theirs = run_mergekit(text.format(**mixed))
        assert theirs.keys() == whole.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(whole[name], value, rtol=1e-5, atol=1e-6, msg=name)
    same = {"base": apart[BASE], "a": apart[E0], "b": apart[E1]}
    whole = read_model(Path(run(home, text.format(**same)).snapshot.path))
    assert all(torch.equal(whole[n], t) for n, t in found[False].items())


def test_filters_see_the_names_of_the_base_and_in_mergekit_those_of_transformers(
    home: Warehouse, family_of: FamilyOf
) -> None:
    """`w2` is part of a name on the hub, `down_proj` of the same matrices' name there."""
    family = family_of("mixtral", "float32")
    text = (
        f"merge_method: passthrough\nmodels: [{{model: {family / BASE}}}]\nparameters:\n"
        "  scale: [{filter: w2, value: 2}, {filter: down_proj, value: 4}, {value: 1}]\n"
        "dtype: float32\n"
    )
    below = fused("mixtral", read_model(family / BASE))
    theirs = run_mergekit(text)
    ours = fused("mixtral", read_model(Path(run(home, text).snapshot.path)))
    name = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(theirs[name], 4 * below[name])
    assert torch.equal(ours[name], 2 * below[name])


def test_experts_stored_apart_are_trimmed_apart_and_by_mergekit_as_one(
    home: Warehouse, family_of: FamilyOf, tmp_path: Path
) -> None:
    family = family_of("mixtral", "float32")
    together = [
        rewritten(family / n, tmp_path / n, lambda t: fused("mixtral", t)) for n in (BASE, E0, E1)
    ]
    text = TIES.format(base=family / BASE, a=family / E0, b=family / E1)
    apart = fused("mixtral", read_model(Path(run(home, text).snapshot.path)))
    text = TIES.format(base=together[0], a=together[1], b=together[2])
    whole = read_model(Path(run(home, text).snapshot.path))
    stacks = [name for name, value in whole.items() if value.ndim == 3]
    assert stacks
    assert all(torch.equal(apart[n], t) for n, t in whole.items() if n not in stacks)
    assert not all(torch.equal(apart[n], whole[n]) for n in stacks)


def test_single_experts_that_an_adapter_updates_are_not_fused(
    home: Warehouse, family_of: FamilyOf, tmp_path: Path
) -> None:
    family = family_of("mixtral", "float32")
    other = rewritten(family / E0, tmp_path / "fused", lambda t: fused("mixtral", t))
    module = "model.layers.0.block_sparse_moe.experts.1.w1"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    n_out, n_in = read_model(family / BASE)[f"{module}.weight"].shape
    factors = {"A": torch.ones(2, n_in), "B": torch.ones(n_out, 2)}
    tensors = {f"base_model.model.{module}.lora_{k}.weight": v for k, v in factors.items()}
    save_file(tensors, adapter / "adapter_model.safetensors")
    models = {"base": family / BASE, "a": adapter, "b": family / E1}
    run(home, TIES.format(**models))
    raw = parse(
        LINEAR.format(base=other, a=f"{family / BASE}+{adapter}", b=other), name="t", where="t"
    )
    with pytest.raises(IncompatibleCheckpointsError, match=r"(?s)cannot be fused.*in one layout"):
        resolve(home, raw)
