"""What the metadata of a GGUF file say, as values of a transformers config.

Each key of the architecture is understood, or the file is refused: a key that is passed over may
mean another model. llama.cpp's rules and defaults hold where transformers' differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mergepipe_pipeline.arrays import F32Array
from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.storage.regular import text_of
from mergepipe_pipeline.tools.gguf_file import GgufFile, Value, refused

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
#: Tensors that are settings: factors of the rotary frequencies.
LLAMA3_FACTORS = "rope_freqs.weight"
LONG_FACTORS = {
    "rope_factors_long.weight": "long_factor",
    "rope_factors_short.weight": "short_factor",
}
_ARCHITECTURE = "general.architecture"
_MOST = (1 << 31) - 1
_THETA = 10000.0
#: The frequencies of Llama 3.1 to 3.3: low and high factor, and the context that they stretch.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_CONTEXT = 8192
_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How llama.cpp stores what transformers calls `model_type`.

    `is_permuted` is set where rows of query and key are in another order, `shift` is what norms
    have been given. `divided_at` is a number of layers: models of so many divide scores by the
    square root of hidden size per head, not of the size of a head.
    """

    model_type: str
    is_permuted: bool = False
    shift: float = 0.0
    divided_at: int = 0


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", is_permuted=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma": Architecture("gemma", shift=1.0),
    "gemma2": Architecture("gemma2", shift=1.0, divided_at=46),
    "gemma3": Architecture("gemma3_text", shift=1.0, divided_at=62),
    "phi3": Architecture("phi3"),
}


def architecture_of(file: GgufFile) -> str:
    """The architecture, one that is known. Raises CheckpointError for others and for no model."""
    for key, expected in (("general.type", "model"), ("split.count", 1)):
        if file.metadata.get(key, expected) not in (expected, 0):
            raise CheckpointError(
                "A GGUF file holds no whole model",
                where=f"{file.path}, {key}",
                expected=str(expected),
                found=text_of(str(file.metadata[key])[:80]),
                next_step="join the parts with llama.cpp's `llama-gguf-split --merge`"
                if key == "split.count"
                else "give the file of the model itself",
            )
    name = file.metadata.get(_ARCHITECTURE)
    if name not in ARCHITECTURES:
        raise CheckpointError(
            "This architecture is not converted from GGUF",
            where=f"{file.path}, {_ARCHITECTURE}",
            expected=", ".join(ARCHITECTURES),
            found=text_of(str(name)[:80]),
            next_step="get the model that the file was made from",
        )
    return str(name)


class _Keys:
    """The metadata of one architecture, each taken by its end; what nobody takes is refused."""

    def __init__(self, file: GgufFile, prefix: str) -> None:
        self._file, self._prefix = file, prefix
        self._left = {k for k in file.metadata if k.startswith(prefix)}

    def take(self, end: str, default: Value | None) -> Value | None:
        """A value of any type."""
        self._left.discard(self._prefix + end)
        return self._file.metadata.get(self._prefix + end, default)

    def whole(self, end: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`; one without a default must be there."""
        value = self.take(end, default)
        if type(value) is not int or not least <= value <= _MOST:
            raise self.wrong(end, f"a whole number from {least} to {_MOST}", value)
        return value

    def number(self, end: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.take(end, default)
        if type(value) is not float or not 0 < value < math.inf:
            raise self.wrong(end, "a finite number above 0", value)
        return value

    def agree(self, end: str, expected: Value) -> None:
        """Raise CheckpointError if the key is there with another value."""
        if (value := self.take(end, expected)) != expected:
            raise self.wrong(end, str(expected), value)

    def finish(self) -> None:
        """Raise CheckpointError if a key is left."""
        for key in sorted(self._left):
            raise CheckpointError(
                "A GGUF file says something of its model that this version does not understand",
                where=f"{self._file.path}, {text_of(key[:200])}",
                expected="keys whose meaning in a config is known",
                found=text_of(str(self._file.metadata[key])[:80]),
                next_step="get the model that the file was made from",
            )

    def wrong(self, end: str, expected: str, found: object) -> CheckpointError:
        """The error for a value that makes no sense."""
        return refused(self._file.path, self._prefix + end, expected, found)


def config_values(file: GgufFile, architecture: str) -> dict[str, Any]:
    """The config's values as transformers names them. Raises CheckpointError."""
    keys, known = _Keys(file, f"{architecture}."), ARCHITECTURES[architecture]
    n_rows, hidden = _embedding(file)
    keys.agree("embedding_length", hidden)
    keys.agree("vocab_size", n_rows)
    keys.agree("attention.causal", True)
    if known.is_permuted:
        keys.agree("tensor_data_layout", "Meta AI original pth")
    heads = keys.whole("attention.head_count")
    pairs = keys.whole("attention.head_count_kv", heads)
    if heads % pairs:
        raise keys.wrong("attention.head_count_kv", f"a divisor of {heads}", pairs)
    width = keys.whole("attention.key_length", hidden // heads)
    keys.agree("attention.value_length", width)
    layers = keys.whole("block_count")
    if layers > len(file.tensors):
        raise keys.wrong("block_count", f"at most {len(file.tensors)}, one for a tensor", layers)
    values: dict[str, Any] = {
        "model_type": known.model_type,
        "vocab_size": n_rows,
        "hidden_size": hidden,
        "intermediate_size": keys.whole("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": pairs,
        "head_dim": width,
        "max_position_embeddings": keys.whole("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": HEAD not in file.tensors,
        **_tokens(file, n_rows),
        **_biases(file, known.model_type),
    }
    values |= _rope(keys, file, architecture, values)
    if known.divided_at:
        divided = hidden // heads if layers == known.divided_at else width
        values |= {"query_pre_attn_scalar": divided, **_gemma(keys, architecture)}
    keys.finish()
    return values


def _embedding(file: GgufFile) -> tuple[int, int]:
    packed = file.tensors.get(EMBEDDING)
    if packed is None or len(packed.shape) != 2:
        found = packed.shape if packed else "no such tensor"
        raise refused(file.path, f"tensor {EMBEDDING}", "a row for each token", found)
    return packed.shape[0], packed.shape[1]


def _tokens(file: GgufFile, n_rows: int) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for name, stored in _TOKENS.items():
        key = f"tokenizer.ggml.{stored}_token_id"
        number = file.metadata.get(key)
        if number is not None and (type(number) is not int or not 0 <= number < n_rows):
            raise refused(file.path, key, f"a token below {n_rows}", number)
        found[f"{name}_token_id"] = number
    return found


def _biases(file: GgufFile, model_type: str) -> dict[str, bool]:
    """Which biases a config can ask for: the tensors tell, the metadata do not."""
    if model_type not in ("llama", "qwen3"):
        return {}
    found = {"attention_bias": "blk.0.attn_q.bias" in file.tensors}
    return found | (
        {"mlp_bias": "blk.0.ffn_up.bias" in file.tensors} if model_type == "llama" else {}
    )


def _gemma(keys: _Keys, architecture: str) -> dict[str, Any]:
    """Windows and soft caps, with llama.cpp's defaults."""
    if architecture == "gemma3":
        cap = "final_logit_softcapping"
        found: dict[str, Any] = {"sliding_window": keys.whole("attention.sliding_window")}
        return found | ({} if keys.take(cap, None) is None else {cap: keys.number(cap)})
    return {
        "sliding_window": keys.whole("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _rope(
    keys: _Keys, file: GgufFile, architecture: str, values: Mapping[str, Any]
) -> dict[str, Any]:
    """The rotary embedding, and what else the same keys decide."""
    width = values["head_dim"]
    theta = keys.number("rope.freq_base", None if architecture == "gemma3" else _THETA)
    if architecture == "phi3":
        return _phi3_rope(keys, file, theta, values)
    keys.agree("rope.dimension_count", width)
    rope = {"rope_theta": theta, **_scaling(keys)}
    if architecture == "gemma3":
        of_windows = keys.number("rope.freq_base_swa", _THETA)
        windows = {"rope_type": "default", "rope_theta": of_windows}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": windows}}
    if architecture == "llama" and LLAMA3_FACTORS in file.tensors:
        rope |= _llama3(file.floats(LLAMA3_FACTORS), file, theta, width)
    return {"rope_parameters": rope}


def _scaling(keys: _Keys) -> dict[str, Any]:
    """How the context was stretched. A factor without a type is linear."""
    kind = keys.take("rope.scaling.type", "linear")
    keys.take("rope.scaling.finetuned", None)
    context = "rope.scaling.original_context_length"
    original = keys.whole(context, 0, least=0)
    factor = keys.number("rope.scaling.factor", 1.0)
    if kind == "none" or (kind == "linear" and factor == 1):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise keys.wrong("rope.scaling.type", "none, linear or yarn", kind)
    if not original:
        raise keys.wrong(context, "the context before it was stretched", original)
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}


def _llama3(stored: F32Array, file: GgufFile, theta: float, width: int) -> dict[str, Any]:
    """The scaling of Llama 3.1 whose factors are these; nothing where they are all 1."""
    if len(stored) != width // 2 or not (np.isfinite(stored) & (stored >= 1)).all():
        expected = f"{width // 2} factors of at least 1"
        raise refused(file.path, f"tensor {LLAMA3_FACTORS}", expected, f"{len(stored)} numbers")
    factor = float(str(stored.max()))
    if factor == 1:
        return {}
    lengths = 2 * math.pi * theta ** (np.arange(0, width, 2) / width)
    low, high = _LLAMA3.values()
    smooth = np.clip((_LLAMA3_CONTEXT / lengths - low) / (high - low), 0, 1)
    if not np.allclose(stored, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4, atol=0):
        expected = f"the factors of Llama 3, stretched {factor:g} times"
        raise refused(file.path, f"tensor {LLAMA3_FACTORS}", expected, "others")
    original = {"original_max_position_embeddings": _LLAMA3_CONTEXT}
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3, **original}


def _phi3_rope(
    keys: _Keys, file: GgufFile, theta: float, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Phi-3's: factors for short and long texts, and perhaps only a part of each head."""
    width, context = values["head_dim"], values["max_position_embeddings"]
    turned = keys.whole("rope.dimension_count", width)
    original = keys.whole("rope.scaling.original_context_length", context)
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    rope |= {} if turned == width else {"partial_rotary_factor": turned / width}
    present = [name for name in LONG_FACTORS if name in file.tensors]
    for name in present:
        factors = file.floats(name)
        if len(present) < 2 or len(factors) != turned // 2 or not np.isfinite(factors).all():
            expected = f"{turned // 2} factors for long texts, and as many for short ones"
            raise refused(file.path, f"tensor {name}", expected, f"{len(factors)} numbers")
        rope |= {"rope_type": "longrope", LONG_FACTORS[name]: [float(str(f)) for f in factors]}
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    if present:
        rope |= {"attention_factor": attention, "original_max_position_embeddings": original}
    elif attention != 1:
        raise keys.wrong("rope.scaling.attn_factor", "1 without factors of frequencies", attention)
    window = keys.whole("attention.sliding_window", 0, least=0) or None
    found = {"original_max_position_embeddings": original} if present else {}
    return {"rope_parameters": rope, "sliding_window": window, **found}
