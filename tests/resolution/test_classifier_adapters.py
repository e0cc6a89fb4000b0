"""Adapters that make a classifier of a language model: as PEFT merges them, or refused.

PEFT trains, merges and saves here and now; transformers loads its folder and ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mergepipe_pipeline.errors import IncompatibleCheckpointsError
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import resolve
from mergepipe_pipeline.resolution.task_heads import classifier_of
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run, tensors
from tests.parity.test_tied_adapters import assert_close, recipe, trained, unloaded
from tests.resolution.test_adapters import save

pytest.importorskip("peft")

_SIZES = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_WIDE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 2}
_GROUPED = _SIZES | _WIDE | _HEADS | {"num_key_value_heads": 1}
#: Models by name: their type and config.
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GROUPED | {"tie_word_embeddings": False}),
    "tied": ("qwen2", _GROUPED | {"tie_word_embeddings": True}),
    "gemma": ("gemma3_text", _GROUPED | {"head_dim": 16}),
    "gpt2": ("gpt2", _SIZES | {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}),
    "roberta": ("roberta", _SIZES | _WIDE | _HEADS | {"max_position_embeddings": 64}),
    "bert": ("bert", _SIZES | _WIDE | _HEADS),
}
#: Adapters: their base, task, number of labels, and the modules that they update.
CASES: dict[str, tuple[str, str, int, list[str]]] = {
    "reward": ("llama", "SEQ_CLS", 1, ["q_proj", "down_proj"]),
    "classes": ("tied", "SEQ_CLS", 3, ["v_proj", "embed_tokens"]),
    "two classes": ("gemma", "SEQ_CLS", 2, ["v_proj"]),
    "conv1d": ("gpt2", "SEQ_CLS", 2, ["c_attn"]),
    "tokens": ("llama", "TOKEN_CLS", 5, ["v_proj"]),
    "encoder": ("roberta", "SEQ_CLS", 4, ["query"]),
    "tokens of an encoder": ("roberta", "TOKEN_CLS", 4, ["query"]),
    "pooled": ("bert", "SEQ_CLS", 2, ["query"]),
}
RIGHT = [case for case in CASES if case != "pooled"]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `BASE`, `CASE` (the adapter) and `CASE merged` (what PEFT makes of both)."""
    folder = tmp_path_factory.mktemp("heads")
    for base in BASES:
        save(language_model(base), folder / base)
    for seed, (case, (base, task, n_labels, targets)) in enumerate(CASES.items()):
        model = auto(task).from_pretrained(folder / base, num_labels=n_labels, dtype=torch.float32)
        more = {"fan_in_fan_out": True} if base == "gpt2" else {}
        adapted = trained(model, folder / case, targets, seed, task_type=task, **more)
        save(unloaded(adapted), folder / f"{case} merged")
    return folder


def language_model(base: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    kind, sizes = BASES[base]
    torch.manual_seed(1)
    loader = AutoModelForMaskedLM if base in ("roberta", "bert") else AutoModelForCausalLM
    return loader.from_config(AutoConfig.for_model(kind, **sizes))


def auto(task: str) -> Any:
    import transformers

    name = {"SEQ_CLS": "Sequence", "TOKEN_CLS": "Token"}[task]
    return getattr(transformers, f"AutoModelFor{name}Classification")


def says(folder: str | Path, task: str) -> torch.Tensor:
    """Logits of a fixed text."""
    model = auto(task).from_pretrained(str(folder), dtype=torch.float32).eval()
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(3, 33)[None]).logits
    return found


def config_of(folder: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return found


@pytest.mark.parametrize("case", RIGHT)
def test_a_classifier_s_adapter_on_its_language_model_is_what_peft_merges(
    home: Warehouse, zoo: Path, case: str
) -> None:
    base, task, n_labels, _ = CASES[case]
    snapshot = run(home, recipe("passthrough", None, [f"{zoo / base}+{zoo / case}"])).snapshot
    merged = zoo / f"{case} merged"
    assert_close(tensors(snapshot.path), tensors(merged))
    torch.testing.assert_close(says(snapshot.path, task), says(merged, task))
    found, expected = config_of(snapshot.path), config_of(merged)
    assert found["architectures"] == expected["architectures"]
    labels = {str(i): f"LABEL_{i}" for i in range(n_labels)}
    assert (found["id2label"], expected.get("id2label", labels)) == (labels, labels)


def test_classifiers_of_one_base_merge_with_each_other(home: Warehouse, zoo: Path) -> None:
    reward = f"{zoo / 'llama'}+{zoo / 'reward'}"
    text = recipe("linear", None, [reward, f"{zoo / 'reward merged'}"], 0.5)
    resolved = resolve(home, parse(text, name="t", where="t"))
    assert not any("architectures" in w or "left out" in w for w in resolved.recipe.warnings)
    text = recipe("task_arithmetic", reward, [f"{zoo / 'reward merged'}"], 0.5)
    assert_close(tensors(run(home, text).snapshot.path), tensors(zoo / "reward merged"))


def test_a_classifier_of_other_labels_lies_on_a_classifier(
    home: Warehouse, zoo: Path, tmp_path: Path
) -> None:
    first = zoo / "reward merged"
    model = auto("SEQ_CLS").from_pretrained(
        first, num_labels=3, dtype=torch.float32, ignore_mismatched_sizes=True
    )
    adapted = trained(model, tmp_path / "a", ["v_proj"], 9, task_type="SEQ_CLS")
    save(unloaded(adapted), tmp_path / "merged")
    snapshot = run(home, recipe("passthrough", None, [f"{first}+{tmp_path / 'a'}"])).snapshot
    assert_close(tensors(snapshot.path), tensors(tmp_path / "merged"))
    torch.testing.assert_close(says(snapshot.path, "SEQ_CLS"), says(tmp_path / "merged", "SEQ_CLS"))


@pytest.mark.parametrize("method", ["task_arithmetic", "passthrough"])
@pytest.mark.parametrize("model", ["{base}+{adapter}", "{adapter}"])
def test_a_classifier_s_adapter_is_not_merged_on_a_language_model(
    home: Warehouse, zoo: Path, method: str, model: str
) -> None:
    text = recipe(method, zoo / "llama", [model.format(base=zoo / "llama", adapter=zoo / "reward")])
    with pytest.raises(
        IncompatibleCheckpointsError, match=r"no classifier.*score\.weight"
    ) as found:
        resolve(home, parse(text, name="t", where="t"))
    assert f"base_model: {zoo / 'llama'}+{zoo / 'reward'}" in str(found.value.next_step)


def test_an_encoder_whose_classifier_has_more_than_its_adapter_keeps_is_refused(
    home: Warehouse, zoo: Path
) -> None:
    text = recipe("passthrough", None, [f"{zoo / 'bert'}+{zoo / 'pooled'}"])
    with pytest.raises(IncompatibleCheckpointsError, match=r"BertForMaskedLM.*merge_and_unload"):
        resolve(home, parse(text, name="t", where="t"))


def test_a_base_whose_names_are_not_those_of_the_classifier_is_refused(
    home: Warehouse, zoo: Path, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    values = {n.removeprefix("transformer."): v for n, v in tensors(zoo / "gpt2").items()}
    save_file(values, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((zoo / "gpt2" / "config.json").read_text())
    text = recipe("passthrough", None, [f"{tmp_path}+{zoo / 'conv1d'}"])
    with pytest.raises(IncompatibleCheckpointsError, match=r"other names.*save_pretrained"):
        resolve(home, parse(text, name="t", where="t"))


@pytest.mark.parametrize("task", ["SEQ_CLS", "TOKEN_CLS"])
def test_classes_are_named_as_transformers_names_them(task: str) -> None:
    from transformers.models.auto import modeling_auto as auto_names

    kind = {"SEQ_CLS": "SEQUENCE", "TOKEN_CLS": "TOKEN"}[task]
    classes = getattr(auto_names, f"MODEL_FOR_{kind}_CLASSIFICATION_MAPPING_NAMES")
    checked = 0
    for model_type, name in auto_names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        found = classifier_of(name, model_type, "score", task)
        if model_type in classes and found is not None:
            checked += 1
            assert found == classes[model_type], name
    assert checked > 50
