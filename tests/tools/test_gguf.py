"""`convert` of GGUF files: the model that the file holds, or a refusal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from mergepipe_pipeline.errors import CheckpointChangedError, CheckpointError, MergePipeError
from mergepipe_pipeline.verbs.explain import explain
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.tools import convert
from mergepipe_pipeline.verbs.verify import verify, verify_all
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.laws import examples
from tests.tools.test_convert import Replacing

if find_spec("gguf") is None or find_spec("transformers") is None:
    pytest.skip("the extra `gguf` is not installed", allow_module_level=True)

from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Kind
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.tools.ggufs import Vocabulary, byte_level, llama3_factors, pieces, write

#: Of transformers: parts of it that are told to go, and a bar that shows how it reads a file.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}
_LONG = [1.0 + i / 4 for i in range(4)]
_DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


@cache
def model_of(model_type: str, n_tokens: int, **values: Any) -> Any:
    """A model of random weights; norms too, and nothing is what it begins with."""
    sizes = {
        "vocab_size": n_tokens,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    decoded = {
        k: json.loads(v) if isinstance(v, str) and v[0] in "{[" else v for k, v in values.items()
    }
    config = AutoConfig.for_model(model_type, **{**sizes, **decoded})
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


def state_of(model: Any) -> dict[str, torch.Tensor]:
    tied = model.config.tie_word_embeddings
    return {k: v for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}


def read(folder: Path | str) -> dict[str, torch.Tensor]:
    return {k: v for f in Path(folder).glob("*.safetensors") for k, v in load_file(f).items()}


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(60).reshape(2, 30) % model.config.vocab_size
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


def loaded(folder: Path | str, **named: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **named).eval()


def rope(**values: Any) -> str:
    """Rotary parameters as text: what a cached function can take."""
    return json.dumps({"rope_theta": 10000.0, **values}, sort_keys=True)


#: By name: architecture, model type, the config's values, the file's other keys; whether
#: transformers reads all of that from the file.
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], bool]] = {
    "llama": ("llama", "llama", {}, {"rope.dimension_count": 8}, True),
    "llama, tied, sizes of heads by default": (
        "llama",
        "llama",
        {"tie_word_embeddings": True},
        {"attention.key_length": None, "attention.value_length": None, "vocab_size": None},
        True,
    ),
    "llama with biases": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}, {}, False),
    "llama 3.1": (
        "llama",
        "llama",
        {
            "rope_parameters": rope(
                rope_theta=500000.0,
                rope_type="llama3",
                original_max_position_embeddings=8192,
                **_LLAMA3,
            )
        },
        {},
        False,
    ),
    "llama, stretched": (
        "llama",
        "llama",
        {"rope_parameters": rope(rope_type="linear", factor=4.0)},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        False,
    ),
    "mistral": ("llama", "mistral", {"head_dim": 16, "sliding_window": None}, {}, False),
    "qwen2": ("qwen2", "qwen2", {"tie_word_embeddings": True}, {"rope.freq_base": 1e4}, True),
    "qwen2, stretched": (
        "qwen2",
        "qwen2",
        {
            "rope_parameters": rope(
                rope_type="yarn", factor=4.0, original_max_position_embeddings=64
            )
        },
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
        False,
    ),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 128}, {}, True),
    "qwen3 with small heads": ("qwen3", "qwen3", {"head_dim": 16}, {}, False),
    "gemma": ("gemma", "gemma", {"head_dim": 16}, {"rope.freq_base": None}, False),
    "gemma2": (
        "gemma2",
        "gemma2",
        {"head_dim": 256, "sliding_window": 8},
        {
            "attention.sliding_window": 8,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        True,
    ),
    "gemma2 of another scale": (
        "gemma2",
        "gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "final_logit_softcapping": 5.0,
        },
        {"attention.sliding_window": 8, "final_logit_softcapping": 5.0},
        False,
    ),
    "gemma2 of 46 layers": (
        "gemma2",
        "gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 8, "num_hidden_layers": 46},
        {},
        False,
    ),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        {"head_dim": 256, "sliding_window": 8, "num_hidden_layers": 7},
        {"attention.sliding_window": 8},
        True,
    ),
    "gemma3, stretched": (
        "gemma3",
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "num_hidden_layers": 6,
            "rope_parameters": json.dumps(
                {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": _DEFAULT,
                }
            ),
        },
        {
            "attention.sliding_window": 8,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
            "rope.freq_base_swa": 1e4,
        },
        False,
    ),
    "phi3": ("phi3", "phi3", {}, {"rope.dimension_count": 8, "attention.sliding_window": 0}, True),
    "phi3 for long texts": (
        "phi3",
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "sliding_window": 20,
            "rope_parameters": rope(
                rope_type="longrope",
                original_max_position_embeddings=64,
                short_factor=[1.0] * 4,
                long_factor=_LONG,
                attention_factor=1.25,
            ),
        },
        {
            "rope.dimension_count": 8,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": 1.25,
            "attention.sliding_window": 20,
        },
        False,
    ),
}
#: Tensors that say how the rotary embedding is stretched.
FACTORS = {
    "llama 3.1": {"rope_freqs.weight": llama3_factors(500000.0, 8, 8.0, 8192)},
    "phi3 for long texts": {
        "rope_factors_long.weight": np.array(_LONG, np.float32),
        "rope_factors_short.weight": np.ones(4, np.float32),
    },
}


def vocabulary_of(architecture: str) -> Vocabulary:
    if architecture.startswith("qwen"):
        return byte_level("qwen2")
    return pieces(gemma=architecture.startswith("gemma"))


def written(path: Path, name: str, **changes: Any) -> tuple[Path, Any]:
    """The file of one of `MODELS`, and the model that it is."""
    architecture, model_type, values, keys, _ = MODELS[name]
    vocabulary = vocabulary_of(architecture)
    ids = {k: vocabulary.settings.get(k) for k in ("bos_token_id", "eos_token_id")}
    model = model_of(model_type, len(vocabulary.tokens), **{**ids, **values})
    keys = {**keys, **changes.pop("keys", {})}
    arguments = {"keys": keys, "extra": FACTORS.get(name), **changes}
    return write(path, architecture, model, vocabulary, **arguments), model


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


@cache
def whole_file() -> bytes:
    """The bytes of a small file of which everything is known."""
    with TemporaryDirectory() as folder:
        kinds = {"blk.0.ffn_down.weight": "Q8_0", "output.weight": "F16"}
        return written(Path(folder) / "m.gguf", "llama", kinds=kinds)[0].read_bytes()


def changed(data: bytes, name: bytes, offset: int, new: bytes) -> bytes:
    """`data` with other bytes at `offset` from the end of the text `name`, its last occurrence."""
    at = data.rindex(name) + len(name) + offset
    return data[:at] + new + data[at + len(new) :]


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


_Q, _DOWN, _NORM = b"blk.0.attn_q.weight", b"blk.0.ffn_down.weight", b"output_norm.weight"
_HUGE = (1 << 63) - 1


def faults() -> dict[str, Callable[[bytes], bytes]]:
    """Ways in which a file is no longer one, by name."""

    def at(start: int, new: bytes) -> Callable[[bytes], bytes]:
        return lambda d: d[:start] + new + d[start + len(new) :]

    def after(name: bytes, offset: int, new: bytes) -> Callable[[bytes], bytes]:
        return lambda d: changed(d, name, offset, new)

    def renamed(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
        assert len(old) == len(new)
        return lambda d: d.replace(old, new)

    key = b"llama.block_count"
    return {
        "nothing": lambda d: b"",
        "magic of GGML": at(0, b"lmgg"),
        "a zip": at(0, b"PK\x03\x04"),
        "version 0": at(4, u32(0)),
        "version 1": at(4, u32(1)),
        "version 4": at(4, u32(4)),
        "big-endian": at(4, (3).to_bytes(4, "big")),
        "no tensors": at(8, u64(0)),
        "a tensor less": lambda d: at(8, u64(int.from_bytes(d[8:16], "little") - 1))(d),
        "a tensor more": lambda d: at(8, u64(int.from_bytes(d[8:16], "little") + 1))(d),
        "2^63 tensors": at(8, u64(_HUGE)),
        "no metadata": at(16, u64(0)),
        "a key less": lambda d: at(16, u64(int.from_bytes(d[16:24], "little") - 1))(d),
        "a key more": lambda d: at(16, u64(int.from_bytes(d[16:24], "little") + 1))(d),
        "2^63 keys": at(16, u64(_HUGE)),
        "a key of no bytes": at(24, u64(0)),
        "a key of 2^63 bytes": at(24, u64(_HUGE)),
        "a key that is no UTF-8": at(32, b"\xff\xfe"),
        "a value of type 13": after(key, 0, u32(13)),
        "a value that is an array": after(key, 0, u32(9)),
        "a float for a count": after(key, 0, u32(6)),
        "no layers": after(key, 4, u32(0)),
        "2^31 layers": after(key, 4, u32(1 << 31)),
        "a layer less": after(key, 4, u32(1)),
        "a layer more": after(key, 4, u32(3)),
        "other heads": after(b"llama.attention.head_count", 4, u32(8)),
        "no heads": after(b"llama.attention.head_count", 4, u32(0)),
        "heads that do not divide": after(b"llama.attention.head_count_kv", 4, u32(3)),
        "other heads of keys": after(b"llama.attention.head_count_kv", 4, u32(4)),
        "an odd width of heads": after(b"llama.attention.key_length", 4, u32(7)),
        "other widths of values": after(b"llama.attention.value_length", 4, u32(16)),
        "another hidden size": after(b"llama.embedding_length", 4, u32(64)),
        "another inner size": after(b"llama.feed_forward_length", 4, u32(32)),
        "another vocabulary": after(b"llama.vocab_size", 4, u32(280)),
        "an epsilon of NaN": after(b"layer_norm_rms_epsilon", 4, b"\x00\x00\xc0\x7f"),
        "an epsilon below 0": after(b"layer_norm_rms_epsilon", 4, b"\x00\x00\x80\xbf"),
        "a base of 0": after(b"llama.rope.freq_base", 4, u32(0)),
        "half of each head turned": after(b"llama.rope.dimension_count", 4, u32(4)),
        "an unknown key": renamed(b"llama.rope.dimension_count", b"llama.rope.dimension_sauce"),
        "a key twice": renamed(
            b"llama.attention.value_length",
            b"llama.attention.value_length"[:16] + b"key_length\0\0",
        ),
        "an unknown architecture": renamed(b"llama", b"lhama"),
        "a token outside": after(b"tokenizer.ggml.eos_token_id", 4, u32(1 << 20)),
        "2^63 tokens": after(b"tokenizer.ggml.tokens", 8, u64(_HUGE)),
        "tokens that are arrays": after(b"tokenizer.ggml.tokens", 4, u32(9)),
        "tokens of 2^63 bytes": after(b"tokenizer.ggml.tokens", 16, u64(_HUGE)),
        "a truth value of 2": after(b"tokenizer.ggml.add_bos_token", 4, b"\x02"),
        "an unknown tokenizer": renamed(
            b"\x05\0\0\0\0\0\0\0llama\x12", b"\x05\0\0\0\0\0\0\0lhama\x12"
        ),
        "a name of another tensor": renamed(_Q, b"blk.0.attn_x.weight"),
        "a name twice": renamed(_Q, b"blk.0.attn_k.weight"),
        "no dimensions": after(_Q, 0, u32(0)),
        "five dimensions": after(_Q, 0, u32(5)),
        "2^31 dimensions": after(_Q, 0, u32(1 << 31)),
        "a shape turned over": lambda d: changed(d, _DOWN, 4, u64(32) + u64(64)),
        "no columns": after(_Q, 4, u64(0)),
        "2^63 columns": after(_Q, 4, u64(_HUGE)),
        "columns that overflow": after(_Q, 4, u64(1 << 33) + u64(1 << 33)),
        "half a block of columns": after(_DOWN, 4, u64(48)),
        "a type that is gone": after(_Q, 20, u32(4)),
        "a type that is no number": after(_Q, 20, u32(26)),
        "an unknown type": after(_Q, 20, u32(1000)),
        "a type of other sizes": after(_DOWN, 20, u32(2)),
        "an offset outside": after(_Q, 24, u64(_HUGE)),
        "an offset of another": after(_Q, 24, u64(0)),
        "an offset by one": lambda d: changed(
            d, _Q, 24, bytes([d[d.rindex(_Q) + len(_Q) + 24] + 1])
        ),
        "a vector as a matrix": after(_NORM, 0, u32(2)),
        "half": lambda d: d[: len(d) // 2],
        "the header alone": lambda d: d[: d.rindex(b"weight") + 40],
        "a byte less": lambda d: d[:-64],
        "a page more": lambda d: d + bytes(4096),
    }


@pytest.mark.parametrize("name", faults())
def test_a_file_with_a_fault_is_refused_and_nothing_is_written(
    home: Warehouse, tmp_path: Path, name: str
) -> None:
    path, data = tmp_path / "m.gguf", whole_file()
    path.write_bytes(faults()[name](data))
    assert path.read_bytes() != data
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        convert(home, str(path), tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "warehouse"]


@settings(max_examples=examples(50))
@given(st.data())
def test_a_flipped_bit_of_the_header_is_refused_or_changes_a_setting_and_no_weight(
    data: st.DataObject,
) -> None:
    whole = whole_file()
    end = whole.rindex(b"weight") + 60
    at, bit = data.draw(st.integers(0, end)), data.draw(st.integers(0, 7))
    flipped = whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
    with TemporaryDirectory() as folder:
        home = Warehouse.at(Path(folder) / "warehouse")
        results = []
        for name, content in (("whole", whole), ("flipped", flipped)):
            (Path(folder) / f"{name}.gguf").write_bytes(content)
            try:
                results.append(
                    Path(convert(home, f"{folder}/{name}.gguf", f"{folder}/{name}").path)
                )
            except CheckpointError:
                assert name == "flipped"
                assert not (Path(folder) / name).exists()
                return
        one, other = map(read, results)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[k], v) for k, v in other.items())
        configs = [json.loads((r / "config.json").read_text()) for r in results]
        before, after = ({k: repr(v) for k, v in c.items()} for c in configs)
        assert len(before.items() ^ after.items()) <= 2


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"split.count": 3}, "join the parts"),
        ({"general.type": "adapter"}, "holds no whole model"),
        ({"general.type": "mmproj"}, "holds no whole model"),
        ({"expert_count": 8}, r"does not understand.*llama\.expert_count"),
        ({"attention.scale": 0.5}, r"does not understand.*attention\.scale"),
        ({"attention.causal": False}, r"attention\.causal"),
        ({"rope.scaling.type": "su"}, "none, linear or yarn"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, "original_context_length"),
        ({"context_length": None}, "context_length"),
    ],
)
def test_what_a_file_says_and_no_config_can_is_refused_by_name(
    home: Warehouse, tmp_path: Path, keys: dict[str, Any], said: str
) -> None:
    path, _ = written(tmp_path / "m.gguf", "llama", keys=keys)
    with pytest.raises(CheckpointError, match=said):
        convert(home, str(path))
    assert not list(home.snapshots.glob("*"))


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("rope_freqs.weight", "factors of Llama 3"),
        ("blk.0.attn_q.bias", r"attn_q\.bias.*shape \[32\], found shape \[4\]"),
        ("blk.0.ffn_gate_exps.weight", r"ffn_gate_exps.*tensors of its architecture"),
    ],
)
def test_tensors_that_no_model_of_the_config_has_are_refused_by_name(
    home: Warehouse, tmp_path: Path, extra: str, said: str
) -> None:
    values = np.array([1, 1, 2, 9], np.float32)
    path, _ = written(tmp_path / "m.gguf", "llama", extra={extra: values})
    with pytest.raises(CheckpointError, match=said):
        convert(home, str(path))


def test_a_way_to_split_text_that_is_unknown_is_refused_but_for_a_folder_with_the_tokenizer(
    home: Warehouse, tmp_path: Path
) -> None:
    folder, known = tmp_path / "model", byte_level("llama-bpe")
    folder.mkdir()
    model = model_of("llama", len(known.tokens))
    write(tmp_path / "known.gguf", "llama", model, known)
    path = write(folder / "m.gguf", "llama", model, byte_level("default"))
    with pytest.raises(CheckpointError, match=r"gpt2 with default.*tokenizer\.json"):
        convert(home, str(folder))
    original = Path(convert(home, str(tmp_path / "known.gguf"), tmp_path / "known").path)
    assert len(AutoTokenizer.from_pretrained(original)) == len(known.tokens)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((original / name).read_bytes())
    made = convert(home, str(folder), tmp_path / "out")
    assert made.details["tokenizer"] == "the folder's"
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        original / "tokenizer.json"
    ).read_bytes()
    with pytest.raises(CheckpointError, match="gpt2 with default"):
        convert(home, str(path))
    (folder / "other.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"cannot be told.*m\.gguf, other\.gguf"):
        convert(home, str(folder))


def test_a_number_too_large_for_the_asked_type_is_refused(home: Warehouse, tmp_path: Path) -> None:
    path, model = written(tmp_path / "m.gguf", "llama")
    half = read(convert(home, str(path), tmp_path / "half", dtype="F16").path)
    assert all(torch.equal(half[k], v.half()) for k, v in state_of(model).items())
    data = path.read_bytes()
    path.write_bytes(data[:-4] + np.float32(70000).tobytes())
    with pytest.raises(CheckpointError, match=r"too large.*output\.weight.*65504.*70000"):
        convert(home, str(path), tmp_path / "out", dtype="F16")
    assert not (tmp_path / "out").exists()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(MergePipeError, match="pickled tensors keep theirs"):
        convert(home, str(tmp_path / "pytorch_model.bin"), dtype="F16")


def test_a_file_that_is_replaced_while_it_is_converted_is_refused(
    home: Warehouse, tmp_path: Path
) -> None:
    path, _ = written(tmp_path / "m.gguf", "llama")
    other, _ = written(tmp_path / "other", "llama", kinds={"output.weight": "F16"})
    with pytest.raises(CheckpointChangedError, match=r"m\.gguf"):
        convert(home, str(path), tmp_path / "out", Replacing(other, path))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("missing", ["gguf", "transformers"])
def test_a_missing_library_is_said_with_the_extra_that_brings_it(
    home: Warehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    path, _ = written(tmp_path / "m.gguf", "llama")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MergePipeError, match=rf"{missing}.*mergepipe-pipeline\[gguf\]"):
        convert(home, str(path))
