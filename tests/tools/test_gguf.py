"""`convert` of GGUF files gives the model that the file holds."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.verbs.explain import explain
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.tools import convert
from mergepipe_pipeline.verbs.verify import verify, verify_all
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.laws import examples
from tests.tools.test_convert import read

if find_spec("gguf") is None or find_spec("transformers") is None:
    pytest.skip("the extra `gguf` is not installed", allow_module_level=True)

from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tools.gguf_models import MODELS, model_of, state_of, written
from tests.tools.ggufs import byte_level, pieces, write

#: Of transformers: parts of it that are told to go, and a bar that shows how it reads a file.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(60).reshape(2, 30) % model.config.vocab_size
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


def loaded(folder: Path | str, **named: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **named).eval()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_each_architecture_comes_back_from_its_file_bit_by_bit(
    home: Warehouse, tmp_path: Path, name: str
) -> None:
    path, model = written(tmp_path / "model.gguf", name)
    made = convert(home, str(path), tmp_path / "out")
    expected, found = state_of(model), read(made.path)
    assert found.keys() == expected.keys()
    # Norms of Gemma are stored with one added, which rounds.
    rounded = {
        k: (v + 1) - 1 if name[:5] == "gemma" and "norm" in k else v for k, v in expected.items()
    }
    assert all(torch.equal(found[k], v) for k, v in rounded.items())
    ours = loaded(made.path)
    atol = 1e-4 if name.startswith("gemma") else 0
    assert torch.allclose(logits(ours), logits(model), rtol=0, atol=atol)
    is_mistral = MODELS[name][1] == "mistral"
    assert is_mistral or ours.config.rope_parameters == model.config.rope_parameters
    assert ours.config.architectures == [type(ours).__name__]
    assert ours.config.eos_token_id == model.config.eos_token_id
    if MODELS[name][4]:
        theirs = loaded(tmp_path, gguf_file="model.gguf")
        assert torch.equal(logits(ours), logits(theirs))
        same_config(ours.config.to_dict(), theirs.config.to_dict())


def same_config(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Whatever transformers makes of the file is in our config; float32 as its shortest decimal."""
    apart = {
        "architectures",
        "dtype",
        "quantization_config",
        "_model_name_or_path",
        "_name_or_path",
    }
    for key in theirs.keys() - apart:
        value = theirs[key]
        is_float = isinstance(value, float)
        assert ours.get(key) == (pytest.approx(value, rel=1e-6) if is_float else value), key


#: Texts of the tokens' own letters, so that merges happen, and any others.
TEXTS = st.one_of(
    st.text(st.sampled_from("hello w12 3'sd.\n\t▁<>|"), max_size=20),
    st.text(max_size=20),
    st.lists(
        st.sampled_from(["hello", " world", "123", "<|end|>", "<think>", "<s>", "  ", "é漢"])
    ).map("".join),
)
VOCABULARIES = {
    "llama": ("llama", pieces()),
    "llama 3": ("llama", byte_level("llama-bpe")),
    "tekken": ("llama", byte_level("tekken")),
    "qwen2": ("qwen2", byte_level("qwen2")),
    "gpt-2": ("qwen3", byte_level("gpt-2")),
    "gemma2": ("gemma2", pieces(gemma=True)),
    "gemma3": ("gemma3", pieces(gemma=True)),
    "phi3": ("phi3", pieces()),
}
_KEYS = {"gemma3": {"attention.sliding_window": 8}, "gemma2": {"attention.sliding_window": 8}}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_the_tokenizer_of_the_folder_and_that_of_the_file_encode_and_decode_alike(
    home: Warehouse, tmp_path: Path, name: str
) -> None:
    architecture, vocabulary = VOCABULARIES[name]
    model_type = "gemma3_text" if architecture == "gemma3" else architecture
    model = model_of(model_type, len(vocabulary.tokens))
    write(tmp_path / "m.gguf", architecture, model, vocabulary, _KEYS.get(architecture))
    made = convert(home, str(tmp_path / "m.gguf"), tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = AutoTokenizer.from_pretrained(made.path)
    chat = [{"role": "user", "content": "hello"}]
    assert ours.apply_chat_template(chat, tokenize=False) == "hello"
    assert ours.chat_template == theirs.chat_template
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (
        vocabulary.settings.get("bos_token_id"),
        vocabulary.settings.get("eos_token_id"),
        vocabulary.settings.get("padding_token_id"),
    )

    @settings(max_examples=examples(25))
    @given(TEXTS)
    def law(text: str) -> None:
        ids = theirs(text)["input_ids"]
        assert ours(text)["input_ids"] == ids
        assert ours.decode(ids) == theirs.decode(ids)

    law()


def test_a_vocabulary_that_splits_digits_splits_them_as_its_own_tokenizer_does(
    home: Warehouse, tmp_path: Path
) -> None:
    vocabulary = byte_level("smollm")
    write(tmp_path / "m.gguf", "llama", model_of("llama", len(vocabulary.tokens)), vocabulary)
    made = convert(home, str(tmp_path / "m.gguf"), tmp_path / "out")
    ours = AutoTokenizer.from_pretrained(made.path)
    assert ours.tokenize("hello 123's") == ["hello", "Ġ", "1", "2", "3", "'s"]


def decodable() -> list[str]:
    """All types that the package decodes."""
    found = []
    for kind, (_, nbytes) in GGML_QUANT_SIZES.items():
        try:
            quants.dequantize(np.zeros((1, nbytes), np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind.name)
    return found


def coded(path: Path, kinds: list[str]) -> tuple[Path, dict[str, Any]]:
    """A file with a layer of random codes for each type, and the codes of what has some."""
    model = model_of(
        "llama",
        len(pieces().tokens),
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=len(kinds),
        num_attention_heads=4,
    )
    random, codes = np.random.default_rng(0), {}
    original = quants.quantize

    def codes_of(values: Any, kind: Kind) -> Any:
        if kind.name in ("F32", "F16", "BF16"):
            return original(values, kind)
        block, nbytes = GGML_QUANT_SIZES[kind]
        shape = (*values.shape[:-1], values.shape[-1] // block * nbytes)
        # Bytes below 0x78: any two of them are a finite float16.
        return random.integers(0, 0x78, shape, np.uint8)

    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    by_name = {f"blk.{i}.{n}.weight": k for i, k in enumerate(kinds) for n in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quants, "quantize", codes_of)
        write(path, "llama", model, pieces(), kinds=by_name)
    from gguf import GGUFReader

    codes = {t.name: (np.array(t.data), t.tensor_type) for t in GGUFReader(path).tensors}
    return path, codes


def test_every_type_that_the_package_decodes_has_its_numbers_and_codes_are_rounded_to_bfloat16(
    home: Warehouse, tmp_path: Path
) -> None:
    kinds = decodable()
    assert {"Q8_0", "Q6_K", "Q5_0", "Q4_K", "Q4_0", "Q2_K", "F16", "BF16", "F32"} <= set(kinds)
    path, codes = coded(tmp_path / "m.gguf", kinds)
    whole = read(convert(home, str(path), tmp_path / "whole", dtype="F32").path)
    made = convert(home, str(path), tmp_path / "default")
    default, rounded = read(made.path), 0
    for i, kind in enumerate(kinds):
        for stored, name in (("attn_q", "self_attn.q_proj"), ("ffn_down", "mlp.down_proj")):
            data, number = codes[f"blk.{i}.{stored}.weight"]
            values = quants.dequantize(data, number)
            if stored == "attn_q":
                values = values.reshape(4, 32, 2, 256).swapaxes(1, 2).reshape(256, 256)
            name = f"model.layers.{i}.{name}.weight"
            assert whole[name].numpy().tobytes() == np.ascontiguousarray(values).tobytes(), kind
            kept = {"F32": torch.float32, "F16": torch.float16}.get(kind, torch.bfloat16)
            assert torch.equal(default[name], torch.from_numpy(values.copy()).to(kept)), kind
    rounded = sum(int((default[n].float() != whole[n]).sum()) for n in whole)
    assert made.details["rounded"] == rounded > 0
    assert json.loads((tmp_path / "default" / "config.json").read_text())["dtype"] == "bfloat16"
    told = explain(home, convert(home, str(path)).snapshot_id).provenance["made_by"]["told"]
    assert told["rounded"] == rounded
    assert told["rounding"] == "to nearest, ties to even"
    assert told["stored_as"].keys() == set(kinds)


def test_a_snapshot_of_a_file_is_verified_and_merged_and_a_merge_of_the_file_names_the_verb(
    home: Warehouse, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path, model = written(folder / "model.gguf", "llama")
    recipe = tmp_path / "r.yml"
    text = "merge_method: linear\nmodels:\n  - model: {}\n    parameters: {{weight: 1}}\n"
    for place in (path, folder):
        recipe.write_text(text.format(place))
        with pytest.raises(MergePipeError, match=r"mergepipe convert FILE\.gguf"):
            merge(home, recipe)
    made = convert(home, str(folder))
    assert verify(home, made.snapshot_id).nbytes > made.nbytes
    recipe.write_text(text.format(made.path))
    merged = read(merge(home, recipe).outcome.snapshot.path)
    assert all(torch.equal(merged[k], v) for k, v in state_of(model).items())
    assert verify_all(home).findings == ()
    assert convert(home, str(folder)).snapshot_id == made.snapshot_id


def test_a_large_model_becomes_several_files_that_an_index_puts_together(
    home: Warehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mergepipe_pipeline.tools.gguf_convert._SHARD_NBYTES", 40_000)
    path, model = written(tmp_path / "m.gguf", "llama")
    made = convert(home, str(path), tmp_path / "out")
    files = sorted(p.name for p in Path(made.path).glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert torch.equal(logits(loaded(made.path)), logits(model))


def test_a_file_of_the_hubs_cache_is_a_link_and_is_converted(
    home: Warehouse, tmp_path: Path
) -> None:
    cache = tmp_path / "models--org--model"
    for folder in ("blobs", "snapshots/main"):
        (cache / folder).mkdir(parents=True)
    blob, model = written(cache / "blobs" / "0123", "llama")
    link = cache / "snapshots" / "main" / "m.gguf"
    link.symlink_to(blob)
    for place in (link, link.parent):
        assert torch.equal(logits(loaded(convert(home, str(place)).path)), logits(model))
