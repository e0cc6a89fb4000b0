"""Which architectures are drawn, and how a tiny config of each is.

Keys are model types of transformers. A config is drawn as its users find it: windows, layers of two
kinds in any order, dense layers among mixtures, and the numbers that older configs have instead of
lists. Attention windows are shorter than the text, so that a layer of the wrong kind shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


@dataclass(slots=True)
class Draw:
    """A seeded source of sizes and choices for one model."""

    rng: random.Random
    layers: int

    def pick(self, *values: Any) -> Any:
        return self.rng.choice(values)

    def chance(self, probability: float = 0.5) -> bool:
        return self.rng.random() < probability

    def kinds(self, *kinds: str) -> list[str]:
        """A kind per layer, in any order, each at least once."""
        more = [self.pick(*kinds) for _ in range(self.layers - len(kinds))]
        drawn = [*kinds, *more]
        self.rng.shuffle(drawn)
        return drawn

    def some(self) -> list[int]:
        """Numbers of some layers, neither all nor none."""
        chosen = self.rng.sample(range(self.layers), self.rng.randint(1, self.layers - 1))
        return sorted(chosen)

    def window(self) -> int:
        return self.rng.randint(4, 9)


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a config is drawn, on top of `common`; `auto` is the transformers class that loads it.

    `sliced`: its layers are one list, which slices may reorder. `old` renames what
    `save_pretrained` writes to an older spelling of the hub (pattern, replacement). `legacy`
    renames keys of config.json to what older files have; None: the key is dropped, where the
    class derives its value again.
    """

    draw: Callable[[Draw], Config] = field(default=lambda d: {})
    auto: str = "AutoModelForCausalLM"
    sliced: bool = True
    old: tuple[tuple[str, str], ...] = ()
    legacy: tuple[tuple[str, str | None], ...] = (("layer_types", None),)


def common(d: Draw) -> Config:
    """Sizes that most architectures name alike."""
    heads = d.pick(2, 4)
    return {
        "vocab_size": d.pick(61, 64, 67),
        "hidden_size": 32,
        "intermediate_size": d.pick(40, 48),
        "num_hidden_layers": d.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": d.pick(1, 2, heads),
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": d.chance(),
    }


def _window(d: Draw) -> Config:
    """A window for all layers or none."""
    return {"sliding_window": d.pick(None, d.window())}


def _alternating(d: Draw) -> Config:
    """Windows in some layers: listed, or as the class lays them out."""
    listed = {"layer_types": d.kinds(_FULL, _SLIDING)} if d.chance() else {}
    return {"head_dim": 8, "sliding_window": d.window(), **listed}


def _pattern(d: Draw) -> Config:
    """Windows in all layers but each n-th, in the key of older configs."""
    drawn = _alternating(d)
    return drawn if "layer_types" in drawn else {**drawn, "sliding_window_pattern": d.pick(2, 3)}


def _upper_windows(d: Draw) -> Config:
    """Windows from a layer on (Qwen 2)."""
    if d.chance(0.3):
        return {}
    at = d.rng.randint(1, d.layers - 1)
    return {"use_sliding_window": True, "sliding_window": d.window(), "max_window_layers": at}


def _experts(d: Draw) -> Config:
    return {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def _sparse(d: Draw) -> Config:
    """Experts in some layers: of each n-th, or not of those listed (Qwen MoE)."""
    which = {"mlp_only_layers": d.some()} if d.chance() else {"decoder_sparse_step": d.pick(1, 2)}
    return _experts(d) | which


def _latent(d: Draw) -> Config:
    """Dense layers first, then experts, over latent attention (DeepSeek)."""
    return {
        "kv_lora_rank": 8,
        "q_lora_rank": d.pick(None, 12),
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": None,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": d.rng.randint(0, d.layers - 1),
    }


def _glm_moe(d: Draw) -> Config:
    first = d.rng.randint(0, d.layers - 1)
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return sizes | {"head_dim": 8, "first_k_dense_replace": first, "use_qk_norm": d.chance()}


def _mamba2(d: Draw) -> Config:
    return {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}


def _jamba(d: Draw) -> Config:
    attention, experts = d.pick(2, 3), d.pick(1, 2)
    return {
        "attn_layer_period": attention,
        "attn_layer_offset": d.rng.randrange(attention),
        "expert_layer_period": experts,
        "expert_layer_offset": d.rng.randrange(experts),
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 4,
        "use_mamba_kernels": False,
    }


def _llama4(d: Draw) -> Config:
    which = {"moe_layers": d.some()} if d.chance() else {"interleave_moe_layer_step": d.pick(1, 2)}
    return which | {
        "head_dim": 8,
        "intermediate_size_mlp": 40,
        "num_local_experts": 2,
        "attention_chunk_size": 8,
        "no_rope_layer_interval": d.pick(2, 3),
        "attn_temperature_tuning": False,
    }


def _smollm3(d: Draw) -> Config:
    if d.chance():
        listed = {"no_rope_layers": [d.pick(0, 1) for _ in range(d.layers)]}
    else:
        listed = {"no_rope_layer_interval": d.pick(2, 3)}
    return listed | {"use_sliding_window": d.chance(), "sliding_window": d.window()}


def _ernie_moe(d: Draw) -> Config:
    return {
        "moe_intermediate_size": 16,
        "moe_k": 2,
        "moe_num_experts": 4,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": d.rng.randint(0, 2),
        "moe_layer_interval": d.pick(1, 2),
    }


def _qwen3_next(d: Draw) -> Config:
    listed = {"layer_types": d.kinds(_FULL, _LINEAR)} if d.chance() else {}
    return (
        listed
        | _sparse(d)
        | {
            "head_dim": 8,
            "shared_expert_intermediate_size": 16,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        }
    )


def _gemma3n(d: Draw) -> Config:
    return _alternating(d) | {
        "vocab_size_per_layer_input": 61,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [d.pick(0.0, 0.9) for _ in range(d.layers)],
        "altup_num_inputs": 2,
    }


def _gpt_neo(d: Draw) -> Config:
    types = [[[d.pick("global", "local")], 1] for _ in range(d.layers)]
    return {"attention_types": types, "window_size": d.window()}


def _encoder_decoder(d: Draw) -> Config:
    """Encoder and decoder of unequal depth, in the words of T5 and of BART."""
    return {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 40,
        "num_layers": d.layers,
        "num_decoder_layers": d.layers - 1,
        "num_heads": 4,
        "encoder_layers": d.layers,
        "decoder_layers": d.layers - 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 40,
        "decoder_ffn_dim": 48,
        "decoder_start_token_id": 0,
    }


_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
_TOWER |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}


def _vision(text: str, tower: str, **more: Any) -> Callable[[Draw], Config]:
    """A language model of a model type beside a vision tower."""

    def draw(d: Draw) -> Config:
        sizes = common(d)
        inner = sizes | {"model_type": text, "head_dim": 8}
        vision = _TOWER | {"model_type": tower, "projection_dim": 32}
        ids = {"image_token_index": 60, "boi_token_index": 58, "eoi_token_index": 59}
        tied = {"tie_word_embeddings": sizes["tie_word_embeddings"]}
        return {"text_config": inner, "vision_config": vision} | ids | tied | more

    return draw


def _qwen_vision(d: Draw) -> Config:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    text = common(d) | {"num_attention_heads": 4, "head_dim": 8, "rope_parameters": rope}
    vision = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2}
    vision |= {"out_hidden_size": 32, "patch_size": 4, "fullatt_block_indexes": [0]}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    ids = {"image_token_id": 57, "video_token_id": 58}
    ids |= {"vision_start_token_id": 59, "vision_end_token_id": 60}
    tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
    return {"text_config": text, "vision_config": vision} | ids | tied


_SEQ2SEQ = {"auto": "AutoModelForSeq2SeqLM", "sliced": False}
_IMAGE: dict[str, Any] = {"auto": "AutoModelForImageTextToText", "sliced": False}
#: CLIP and SigLIP towers were wrapped once more in files before transformers 5.
_NESTED_TOWER = (r"^vision_tower\.", "vision_tower.vision_model.")
_KINDS = (("layer_types", None),)
_KINDS_BY_STEP = (*_KINDS, ("_sliding_window_pattern", "sliding_window_pattern"))

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(lambda d: {"attention_bias": d.chance(), "mlp_bias": d.chance()}),
    "mistral": Architecture(_window),
    "ministral": Architecture(_alternating),
    "qwen2": Architecture(_upper_windows),
    "qwen3": Architecture(lambda d: _upper_windows(d) | {"head_dim": 8}),
    "qwen2_moe": Architecture(
        lambda d: _upper_windows(d) | _sparse(d) | {"shared_expert_intermediate_size": 16}
    ),
    "qwen3_moe": Architecture(lambda d: _sparse(d) | {"head_dim": 8}),
    "qwen3_next": Architecture(_qwen3_next),
    "mixtral": Architecture(lambda d: _window(d) | {"num_local_experts": 4}),
    "gemma": Architecture(lambda d: {"head_dim": 8}),
    "gemma2": Architecture(_alternating),
    "gemma3_text": Architecture(_pattern, legacy=_KINDS_BY_STEP),
    "gemma3n_text": Architecture(_gemma3n),
    "phi": Architecture(lambda d: {"qk_layernorm": d.chance()}),
    "phi3": Architecture(_window),
    "gpt2": Architecture(
        lambda d: {"scale_attn_by_inverse_layer_idx": d.chance(), "n_inner": d.pick(None, 40)},
        old=((r"^transformer\.", ""),),
    ),
    "gpt_neo": Architecture(_gpt_neo),
    "gpt_neox": Architecture(lambda d: {"use_parallel_residual": d.chance()}),
    "gptj": Architecture(lambda d: {"rotary_dim": 4}),
    "gpt_oss": Architecture(lambda d: _alternating(d) | {"num_local_experts": 4}),
    "opt": Architecture(
        lambda d: {"ffn_dim": 40, "word_embed_proj_dim": d.pick(32, 16)},
        old=((r"^model\.", ""),),
    ),
    "bloom": Architecture(
        lambda d: {"apply_residual_connection_post_layernorm": d.chance()},
        old=((r"^transformer\.", ""),),
    ),
    "falcon": Architecture(
        lambda d: {"alibi": d.chance(), "multi_query": d.chance(), "parallel_attn": d.chance()}
    ),
    "starcoder2": Architecture(_window),
    "stablelm": Architecture(
        lambda d: {"use_parallel_residual": d.chance(), "qk_layernorm": d.chance()}
    ),
    "olmo": Architecture(lambda d: {"clip_qkv": d.pick(None, 0.5)}),
    "olmo2": Architecture(),
    "olmo3": Architecture(_alternating),
    "olmoe": Architecture(_experts),
    "cohere": Architecture(lambda d: {"use_qk_norm": d.chance()}),
    "cohere2": Architecture(lambda d: {k: v for k, v in _pattern(d).items() if k != "head_dim"}),
    "granite": Architecture(lambda d: {"residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "granitemoe": Architecture(lambda d: {"num_local_experts": 4, "embedding_multiplier": 2.0}),
    "granitemoehybrid": Architecture(
        lambda d: (
            _mamba2(d)
            | {"layer_types": d.kinds(_FULL, _LINEAR), "shared_intermediate_size": 16}
            | {"num_local_experts": d.pick(0, 4)}
        )
    ),
    "bamba": Architecture(lambda d: _mamba2(d) | {"attn_layer_indices": d.some()}),
    "jamba": Architecture(_jamba),
    "mamba2": Architecture(
        lambda d: {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16}
    ),
    "recurrent_gemma": Architecture(
        lambda d: {
            "attention_window_size": d.window(),
            "block_types": d.kinds("recurrent", "attention"),
        }
    ),
    "lfm2": Architecture(lambda d: {"full_attn_idxs": d.some(), "block_multiple_of": 8}),
    "minimax": Architecture(
        lambda d: (
            {"layer_types": d.kinds(_FULL, _LINEAR), "head_dim": 8, "block_size": 16}
            | {"num_local_experts": 4, "mlp_alpha_factor": 1.5}
        )
    ),
    "deepseek_v2": Architecture(_latent),
    "deepseek_v3": Architecture(_latent),
    "glm": Architecture(lambda d: {"head_dim": 8}),
    "glm4": Architecture(lambda d: {"head_dim": 8}),
    "glm4_moe": Architecture(_glm_moe),
    "ernie4_5_moe": Architecture(_ernie_moe),
    "llama4_text": Architecture(_llama4),
    "smollm3": Architecture(_smollm3),
    "exaone4": Architecture(_pattern),
    "nemotron": Architecture(),
    "seed_oss": Architecture(lambda d: {"head_dim": 8, "attention_bias": d.chance()}),
    "arcee": Architecture(),
    "bert": Architecture(auto="AutoModelForMaskedLM"),
    "t5": Architecture(
        lambda d: _encoder_decoder(d) | {"feed_forward_proj": d.pick("relu", "gated-gelu")},
        **_SEQ2SEQ,
    ),
    "bart": Architecture(_encoder_decoder, **_SEQ2SEQ),
    "llava": Architecture(_vision("llama", "clip_vision_model"), old=(_NESTED_TOWER,), **_IMAGE),
    "mistral3": Architecture(_vision("mistral", "pixtral"), **_IMAGE),
    "paligemma": Architecture(
        _vision("gemma", "siglip_vision_model", projection_dim=32), old=(_NESTED_TOWER,), **_IMAGE
    ),
    "gemma3": Architecture(
        _vision("gemma3_text", "siglip_vision_model", mm_tokens_per_image=4),
        old=(_NESTED_TOWER,),
        **_IMAGE,
    ),
    "qwen2_5_vl": Architecture(_qwen_vision, **_IMAGE),
    "qwen3_vl": Architecture(_qwen_vision, **_IMAGE),
}
