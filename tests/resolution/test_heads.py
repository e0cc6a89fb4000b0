"""A head and an embedding stand for one another only where a model's config ties them.

The models are transformers' own; what a merge makes is compared with torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mergepipe_pipeline.domain.model_config import UNTIED_BY_DEFAULT, ties_head
from mergepipe_pipeline.errors import MergePipeError, RecipeError
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import resolve
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run, tensors

transformers = pytest.importorskip("transformers")

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def save(folder: Path, kind: str, seed: int, **config: object) -> Path:
    """A llama of a task, `kind` being what stands behind Llama in its class."""
    torch.manual_seed(seed)
    cls = getattr(transformers, f"Llama{kind}")
    model = cls(transformers.LlamaConfig(**SIZES | {"tie_word_embeddings": False} | config))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and a language expert, reward models, encoders, and models of tied heads."""
    folder = tmp_path_factory.mktemp("zoo")
    kinds = {"base": "ForCausalLM", "lm": "ForCausalLM", "encoder": "Model"}
    kinds |= {f"reward_{i}": "ForSequenceClassification" for i in "ab"}
    for seed, (name, kind) in enumerate(kinds.items()):
        save(folder / name, kind, seed)
    for seed, name in enumerate(("tied_base", "tied_lm"), 20):
        save(folder / name, "ForCausalLM", seed, tie_word_embeddings=True)
    save(folder / "tied_encoder", "Model", 30, tie_word_embeddings=True)
    return folder


def recipe(method: str, *models: Path, base: Path | None = None) -> str:
    lines = [f"merge_method: {method}", *([f"base_model: {base}"] if base else []), "models:"]
    lines += [f"- {{model: {m}, parameters: {{weight: 0.5}}}}" for m in models]
    return "\n".join([*lines, ""])


def said(home: Warehouse, text: str) -> tuple[str, ...]:
    return resolve(home, parse(text, name="t", where="t")).recipe.warnings


@pytest.mark.parametrize("names", [("reward_a", "reward_b"), ("encoder",), ("lm", "reward_a")])
def test_an_expert_without_a_head_leaves_it_to_the_base_and_the_others(
    home: Warehouse, zoo: Path, names: tuple[str, ...]
) -> None:
    text = recipe("task_arithmetic", *(zoo / n for n in names), base=zoo / "base")
    ours = tensors(run(home, text).snapshot.path)
    base = tensors(zoo / "base")
    deltas = [
        tensors(zoo / n)[HEAD].double() - base[HEAD].double()
        for n in names
        if HEAD in tensors(zoo / n)
    ]
    right = base[HEAD].double() + 0.5 * sum(deltas, torch.zeros(base[HEAD].shape).double())
    torch.testing.assert_close(ours[HEAD].double(), right, rtol=0, atol=5e-7)
    assert ours.keys() == base.keys()
    for name in names:
        if name != "lm":
            assert any(name in w and f"no {HEAD}" in w for w in said(home, text))


@pytest.mark.parametrize("names", [("lm", "encoder"), ("encoder", "lm"), ("reward_a", "lm")])
def test_a_missing_head_is_refused_where_no_base_has_one(
    home: Warehouse, zoo: Path, names: tuple[str, ...]
) -> None:
    with pytest.raises(RecipeError, match=r"lacks 1 of the tensors.*(lm_head|score).*base_model"):
        run(home, recipe("linear", *(zoo / n for n in names)))


def test_a_base_with_another_head_keeps_it(home: Warehouse, zoo: Path) -> None:
    text = recipe("task_arithmetic", zoo / "lm", zoo / "reward_b", base=zoo / "reward_a")
    ours, base = tensors(run(home, text).snapshot.path), tensors(zoo / "reward_a")
    other = tensors(zoo / "reward_b")
    right = base["score.weight"] + 0.5 * (other["score.weight"] - base["score.weight"])
    torch.testing.assert_close(ours["score.weight"], right)
    assert HEAD not in ours
    assert any("lm_head.weight: they are left out" in w for w in said(home, text))


def test_a_tied_expert_gives_its_embedding_to_the_head(home: Warehouse, zoo: Path) -> None:
    text = recipe("task_arithmetic", zoo / "tied_lm", base=zoo / "base")
    ours, base = tensors(run(home, text).snapshot.path), tensors(zoo / "base")
    expert = tensors(zoo / "tied_lm")[EMBEDDING]
    right = base[HEAD].double() + 0.5 * (expert.double() - base[HEAD].double())
    torch.testing.assert_close(ours[HEAD].double(), right, rtol=0, atol=5e-7)


def test_an_encoder_whose_config_ties_has_no_head_all_the_same(home: Warehouse, zoo: Path) -> None:
    text = recipe("task_arithmetic", zoo / "tied_encoder", base=zoo / "base")
    ours = tensors(run(home, text).snapshot.path)
    assert torch.equal(ours[HEAD], tensors(zoo / "base")[HEAD])


def test_slices_that_end_in_a_model_of_another_task_are_refused(home: Warehouse, zoo: Path) -> None:
    text = (
        "merge_method: passthrough\nslices:\n"
        f"- sources: [{{model: {zoo / 'lm'}, layer_range: [0, 1]}}]\n"
        f"- sources: [{{model: {zoo / 'reward_a'}, layer_range: [1, 2]}}]\n"
    )
    with pytest.raises(RecipeError, match=r"lacks the head.*lm_head\.weight"):
        run(home, text)


def test_slices_that_end_in_a_tied_model_have_its_embedding_as_their_head(
    home: Warehouse, zoo: Path
) -> None:
    text = (
        "merge_method: passthrough\nslices:\n"
        f"- sources: [{{model: {zoo / 'lm'}, layer_range: [0, 1]}}]\n"
        f"- sources: [{{model: {zoo / 'tied_lm'}, layer_range: [1, 2]}}]\n"
    )
    snapshot = run(home, text).snapshot
    ours = tensors(snapshot.path)
    assert torch.equal(ours[HEAD], tensors(zoo / "tied_lm")[EMBEDDING])
    assert torch.equal(ours[EMBEDDING], tensors(zoo / "lm")[EMBEDDING])
    config = json.loads((Path(snapshot.path) / "config.json").read_text())
    assert config["tie_word_embeddings"] is False


def test_a_t5_with_a_head_of_its_own_never_gives_it_for_the_embedding(
    home: Warehouse, tmp_path: Path
) -> None:
    config = transformers.T5Config(
        vocab_size=48, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    config.tie_word_embeddings = False
    for seed, name in enumerate(("base", "expert")):
        torch.manual_seed(seed)
        model = transformers.T5ForConditionalGeneration(config)
        values = {
            n: v.clone()
            for n, v in model.state_dict().items()
            if not n.endswith("coder.embed_tokens.weight")
        }
        if name == "expert":
            values["encoder.embed_tokens.weight"] = values.pop("shared.weight")
            lost = {n: v for n, v in values.items() if n != "encoder.embed_tokens.weight"}
        folder = tmp_path / name
        folder.mkdir()
        stated = config.to_dict() | {"architectures": ["T5ForConditionalGeneration"]}
        (folder / "config.json").write_text(json.dumps(stated))
        save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    text = recipe("task_arithmetic", tmp_path / "expert", base=tmp_path / "base")
    ours, base = tensors(run(home, text).snapshot.path), tensors(tmp_path / "base")
    expert = tensors(tmp_path / "expert")["encoder.embed_tokens.weight"]
    right = base["shared.weight"].double() * 0.5 + expert.double() * 0.5
    torch.testing.assert_close(ours["shared.weight"].double(), right, rtol=0, atol=5e-7)
    save_file(lost, tmp_path / "expert" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MergePipeError, match=r"lacks 1 of the tensors.*shared\.weight"):
        run(home, text)


def test_the_types_that_tie_nothing_by_default_are_those_of_transformers() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    wrong = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        default = getattr(CONFIG_MAPPING[kind], "tie_word_embeddings", None)
        stated = {"model_type": kind, "architectures": ["XForCausalLM"]}
        if isinstance(default, bool) and ties_head(stated) is not default:
            wrong[kind] = default
    assert wrong == {}
    assert "llama" in UNTIED_BY_DEFAULT
