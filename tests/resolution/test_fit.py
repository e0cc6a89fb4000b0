"""Models whose tensors find no place in the base: refused by every verb, never the base again."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mergepipe_pipeline.errors import CheckpointError, IncompatibleCheckpointsError, MergePipeError
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import resolve
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.verbs.conflicts import conflicts
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.tools import extract_lora
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run, tensors
from tests.support.family import tensors_of, write_model

Tensors = dict[str, torch.Tensor]

_MISTRAL = {
    "model.embed_tokens": "tok_embeddings",
    "model.": "",
    "self_attn.": "attention.",
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.down_proj": "ffn_down",
    "mlp.up_proj": "ffn_up",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def reworded(words: dict[str, str]) -> Callable[[Tensors], Tensors]:
    def names(values: Tensors) -> Tensors:
        out = {}
        for name, value in values.items():
            for old, new in words.items():
                name = name.replace(old, new)
            out[name] = value
        return out

    return names


def flat(values: Tensors) -> Tensors:
    """One vector for each layer, as FSDP holds it."""
    out = {}
    for i in range(2):
        own = [v.flatten() for n, v in values.items() if f".layers.{i}." in n]
        out[f"model.layers.{i}._fsdp_wrapped_module._flat_param"] = torch.cat(own)
    outside = [v.flatten() for n, v in values.items() if ".layers." not in n]
    return out | {"_fsdp_wrapped_module._flat_param": torch.cat(outside)}


#: Formats whose tensors have other names, with a name of theirs and the base's that the error has.
FORMATS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "mistral": (reworded(_MISTRAL), "found layers.0.attention.wk.weight"),
    "gguf": (reworded(_GGUF), "found blk.0.attn_k.weight"),
    "flat": (flat, "found model.layers.0._flat_param"),
}
TASK = (
    "merge_method: task_arithmetic\nbase_model: {}\n"
    "models: [{{model: {}, parameters: {{weight: 1}}}}]\n"
)
MIX = "merge_method: linear\nparameters: {{weight: 1}}\nmodels: [{{model: {}}}, {{model: {}}}]\n"
STACK = (
    "merge_method: passthrough\nslices:\n- sources: [{{model: {}, layer_range: [0, 2]}}]\n"
    "- sources: [{{model: {}, layer_range: [0, 1]}}]\n"
)


def llama(folder: Path, expert: int | None, change: Callable[[Tensors], Tensors] = dict) -> Path:
    values = change(tensors_of(1, expert, hidden=8, vocab=16, dtype=torch.float32))
    return write_model(folder, values, hidden=8, vocab=16)


@pytest.mark.parametrize("text", [TASK, MIX, STACK], ids=["task", "linear", "slices"])
@pytest.mark.parametrize("format_", FORMATS)
def test_a_model_whose_layers_find_no_place_is_refused_with_names_of_both_sides(
    home: Warehouse, tmp_path: Path, format_: str, text: str
) -> None:
    change, name = FORMATS[format_]
    base, expert = llama(tmp_path / "b", None), llama(tmp_path / "e", 0, change)
    both = rf"(?s)no place.*model\.layers\.0\.input_layernorm\.weight.*{re.escape(name)}"
    for form in (text.format(base, expert), text.format(expert, base)):
        with pytest.raises(IncompatibleCheckpointsError, match="no place in the model"):
            resolve(home, parse(form, name="r", where="r"))
    with pytest.raises(IncompatibleCheckpointsError, match=both):
        run(home, text.format(base, expert))


@pytest.mark.parametrize("format_", FORMATS)
def test_no_verb_takes_such_a_model_for_its_base(
    home: Warehouse, tmp_path: Path, format_: str
) -> None:
    register(home, llama(tmp_path / "b", None), "base")
    register(home, llama(tmp_path / "e", 0, FORMATS[format_][0]), "expert")
    parsed = parse(TASK.format("base", "expert"), name="r", where="r")
    for verb in (
        lambda: analyze(home, ["expert"], base="base"),
        lambda: pack(home, ["expert"], base="base"),
        lambda: conflicts(home, parsed),
        lambda: extract_lora(home, "expert", "base", tmp_path / "lora"),
    ):
        with pytest.raises(IncompatibleCheckpointsError):
            verb()


def test_a_model_of_which_half_finds_no_place_is_refused(home: Warehouse, tmp_path: Path) -> None:
    def mostly_other(values: Tensors) -> Tensors:
        return {n.replace("proj.", "matrix."): v for n, v in values.items()}

    base, expert = llama(tmp_path / "b", None), llama(tmp_path / "e", 0, mostly_other)
    with pytest.raises(IncompatibleCheckpointsError, match="of 20 tensors 6 have a place"):
        run(home, TASK.format(base, expert))


def test_slices_may_take_layers_that_the_first_model_does_not_have(
    home: Warehouse, tmp_path: Path
) -> None:
    short = llama(tmp_path / "short", None)
    values = tensors_of(2, 0, layers=5, hidden=8, vocab=16, dtype=torch.float32)
    deep = write_model(tmp_path / "deep", values, layers=5, hidden=8, vocab=16)
    found = tensors(run(home, STACK.format(short, deep).replace("[0, 1]", "[4, 5]")).snapshot.path)
    name = "model.layers.{}.mlp.up_proj.weight"
    assert torch.equal(found[name.format(2)], values[name.format(4)])


def vision(folder: Path, n_layers: int) -> Path:
    """A model whose vision tower has layers of two tensors."""
    text = tensors_of(1, 0, hidden=8, vocab=16, dtype=torch.float32)
    values = {n.replace("model.", "model.language_model."): v for n, v in text.items()}
    for i in range(n_layers):
        stem = f"model.vision_tower.layers.{i}."
        values |= {f"{stem}fc1.weight": torch.ones(4, 4), f"{stem}fc2.weight": torch.ones(4, 4)}
    return write_model(folder, values, hidden=8, vocab=16)


def test_a_vision_model_with_too_much_for_a_language_base_is_to_be_the_base(
    home: Warehouse, tmp_path: Path
) -> None:
    base, expert = llama(tmp_path / "text", None), vision(tmp_path / "vision", 20)
    with pytest.raises(IncompatibleCheckpointsError, match="make vision the base, and merge text"):
        run(home, TASK.format(base, expert))
    found = tensors(run(home, TASK.format(expert, base)).snapshot.path)
    text = tensors_of(1, None, hidden=8, vocab=16, dtype=torch.float32)
    for name, value in text.items():
        own = name.replace("model.", "model.language_model.")
        torch.testing.assert_close(found[own], value, rtol=0, atol=1e-6, msg=name)
    assert torch.equal(found["model.vision_tower.layers.7.fc1.weight"], torch.ones(4, 4))


def test_a_model_that_gives_one_module_alone_has_its_place_there(
    home: Warehouse, tmp_path: Path
) -> None:
    base, expert = vision(tmp_path / "base", 20), vision(tmp_path / "vision", 20)
    text = (
        f"merge_method: linear\nbase_model: {base}\nmodules:\n"
        f"  vision_tower: {{models: [{{model: {expert}, parameters: {{weight: 1}}}}]}}\n"
        f"  text_decoder: {{models: [{{model: {llama(tmp_path / 'text', None)}, "
        "parameters: {weight: 1}}]}\n"
    )
    found = tensors(run(home, text).snapshot.path)
    own = tensors_of(1, None, hidden=8, vocab=16, dtype=torch.float32)
    name = "layers.1.mlp.up_proj.weight"
    assert torch.equal(found[f"model.language_model.{name}"], own[f"model.{name}"])


def lora(folder: Path, modules: list[str]) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 1}')
    shapes = {"A": (1, 8), "B": (8, 1)}
    factors = {
        f"base_model.model.{m}.lora_{k}.weight": torch.ones(s)
        for m in modules
        for k, s in shapes.items()
    }
    save_file(factors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    "modules",
    [
        ["model.layers.0.attention.wq", "model.layers.1.attention.wq"],
        ["model.layers.0.self_attn.q_proj", "model.layers.7.self_attn.q_proj"],
        ["model.layers.0.self_attn.q_proj", "model.vision_tower.layers.0.self_attn.q_proj"],
    ],
)
def test_an_adapter_of_which_some_module_finds_no_place_is_refused(
    home: Warehouse, tmp_path: Path, modules: list[str]
) -> None:
    base, adapter = llama(tmp_path / "b", None), lora(tmp_path / "lora", modules)
    for model in (adapter, f"{base}+{adapter}"):
        with pytest.raises(CheckpointError, match="that the base does not have"):
            run(home, TASK.format(base, model))


def test_a_delta_without_a_place_is_refused(home: Warehouse, tmp_path: Path) -> None:
    base = llama(tmp_path / "b", None)
    delta = FORMATS["mistral"][0](tensors_of(1, 0, hidden=8, vocab=16, dtype=torch.float32))
    (tmp_path / "d").mkdir()
    save_file(delta, tmp_path / "d" / "model.safetensors", metadata={"mergepipe": "delta"})
    with pytest.raises(MergePipeError, match="no place"):
        run(home, TASK.format(base, tmp_path / "d"))


@pytest.mark.parametrize("keeps_factors", [False, True])
def test_a_whole_model_in_pefts_wrappers_is_refused(
    home: Warehouse, tmp_path: Path, keeps_factors: bool
) -> None:
    def wrapped(values: Tensors) -> Tensors:
        out = {}
        for name, value in values.items():
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            is_target = "proj" in name
            out[f"{stem}{'.base_layer' if is_target else ''}.weight"] = value
            if is_target and keeps_factors:
                out[f"{stem}.lora_A.default.weight"] = torch.ones(1, value.shape[1])
                out[f"{stem}.lora_B.default.weight"] = torch.ones(value.shape[0], 1)
        return out

    base, expert = llama(tmp_path / "b", None), llama(tmp_path / "e", 0, wrapped)
    with pytest.raises(MergePipeError):
        run(home, TASK.format(base, expert))
