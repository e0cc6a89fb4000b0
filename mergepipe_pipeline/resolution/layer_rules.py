"""The rules of transformers' classes: what each layer is by its number, and which config says so.

A rule per class and kind of choice: which attention a layer has, whether its MLP is sparse, whether
it has rope. Stated from what transformers 5 does with a config; the library itself is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

Config = Mapping[str, Any]
Kinds = Callable[[Config, int], list[Any] | None]
Changes = Callable[[Config, Sequence[Any]], Iterable[dict[str, Any]]]


def _nothing(config: Config, kinds: Sequence[Any]) -> Iterable[dict[str, Any]]:
    return ()


@dataclass(frozen=True)
class Rule:
    """The kinds of n layers by a config: `kinds`, None where only a stored list can tell.

    `changes` are those of a config that may make it say a list of kinds; `keeping` what ranges of
    layers must keep where none does.
    """

    kinds: Kinds
    changes: Changes = _nothing
    keeping: str = ""


def listed(key: str, derived: Kinds) -> Rule:
    """A list under `key`, or what the class derives where a config has none (or an empty one)."""

    def kinds(config: Config, n: int) -> list[Any] | None:
        stored = config.get(key)
        return stored if isinstance(stored, list) and stored else derived(config, n)

    return Rule(kinds, lambda config, wanted: [{key: list(wanted)}], f"what `{key}` can say")


def numbered(key: str, default: Callable[[Config, int], Iterable[int]] | None = None) -> Rule:
    """Layers by their numbers under `key`; without it what `default` gives, None: no layer."""

    def kinds(config: Config, n: int) -> list[Any]:
        numbers = config.get(key)
        if numbers is None:
            numbers = [] if default is None else default(config, n)
        chosen = set(numbers)
        return [i in chosen for i in range(n)]

    return Rule(kinds, lambda config, wanted: [{key: _numbers(wanted)}], f"what `{key}` can say")


def _numbers(wanted: Sequence[Any]) -> list[int]:
    return [i for i, is_so in enumerate(wanted) if is_so]


def _searched(keys: Sequence[str], kinds: Kinds, keeping: str) -> Rule:
    """Kinds that follow from numbers alone, one under each of the keys."""

    def changes(config: Config, wanted: Sequence[Any]) -> Iterable[dict[str, Any]]:
        for numbers in product(range(len(wanted) + 2), repeat=len(keys)):
            yield dict(zip(keys, numbers, strict=True))

    return Rule(kinds, changes, keeping)


def _each(of: Callable[[Config, int], Any]) -> Kinds:
    """Kinds that follow from the config and the layer's own number."""
    return lambda config, n: [of(config, i) for i in range(n)]


_IN_PLACE = (
    "every layer at its place from the first on, each once: what it computes follows from it"
)
_ALL_IN_PLACE = "all layers at their places: they share weights or caches by their numbers"
_FIRST = "the first layer at its place, once: it is made otherwise than the others"


def _in_place(applies: Callable[[Config], Any] = lambda config: True) -> Rule:
    return Rule(_each(lambda c, i: i if applies(c) else 0), keeping=_IN_PLACE)


def _all_in_place(applies: Callable[[Config], Any] = lambda config: True) -> Rule:
    def kinds(config: Config, n: int) -> list[Any]:
        return [(i, n) if applies(config) else 0 for i in range(n)]

    return Rule(kinds, keeping=_ALL_IN_PLACE)


def _every(
    period: str | int,
    default: int = 0,
    full: str = "full_attention",
    other: str = "sliding_attention",
    shift: int = 1,
) -> Rule:
    """`layer_types`, where each layer is `full` whose number plus `shift` is a multiple."""

    def derived(config: Config, n: int) -> list[Any] | None:
        step = config.get(period, default) if isinstance(period, str) else period
        if not isinstance(step, int) or step < 1:
            return None
        return [other if (i + shift) % step else full for i in range(n)]

    return listed("layer_types", derived)


def _windows(default: int, *, flag: bool = True) -> Rule:
    """`layer_types` of Qwen: windows from `max_window_layers` on, where they are used at all."""

    def of(config: Config, i: int) -> str:
        used = config.get("use_sliding_window", False) if flag else True
        used = used and config.get("sliding_window", 4096) is not None
        beyond = i >= config.get("max_window_layers", default)
        return "sliding_attention" if used and beyond else "full_attention"

    return listed("layer_types", _each(of))


def _qwen2_moe_windows(config: Config, i: int) -> str:
    used = config.get("use_sliding_window", False) and i < config.get("max_window_layers", 28)
    return "sliding_attention" if used and i % 2 == 0 else "full_attention"


def _dense_first(key: str | None, default: int) -> Kinds:
    def of(config: Config, i: int) -> str:
        n = config.get(key, default) if key is not None else default
        return "dense" if i < (n or 0) else "sparse"

    return _each(of)


def _prefix(key: str, default: int) -> Rule:
    keeping = f"the dense layers (the first `{key}`) in front, and none of the others among them"
    return _searched((key,), _dense_first(key, default), keeping)


def _sparse(default: tuple[int, ...] = ()) -> Rule:
    """Qwen's experts: in each layer whose number plus one is a multiple, but for named ones."""

    def of(config: Config, i: int) -> str:
        named = config.get("mlp_only_layers")
        is_sparse = i not in (default if named is None else named) and (
            (i + 1) % config.get("decoder_sparse_step", 1) == 0
        )
        return "sparse" if is_sparse and config.get("num_experts", 1) else "dense"

    def changes(config: Config, wanted: Sequence[Any]) -> Iterable[dict[str, Any]]:
        dense = _numbers([kind == "dense" for kind in wanted])
        yield {"mlp_only_layers": dense}
        yield {"decoder_sparse_step": 1, "mlp_only_layers": dense}

    return Rule(_each(of), changes, "layers with experts, if the model has any")


def _ernie(config: Config, n: int) -> list[Any]:
    start, end = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    end, step = n - 1 if end == -1 else end, config.get("moe_layer_interval", 1)
    return ["sparse" if start <= i <= end and (i + 1) % step == 0 else "dense" for i in range(n)]


def _periodic(period: str, offset: str, defaults: tuple[int, int]) -> Rule:
    """Jamba: the layers whose number leaves `offset` when divided by `period`."""

    def kinds(config: Config, n: int) -> list[Any]:
        p, o = config.get(period, defaults[0]), config.get(offset, defaults[1])
        return [i % p == o for i in range(n)] if o < p else []

    return _searched((period, offset), kinds, f"one distance (`{period}`) between such layers")


def _no_rope(interval_default: int) -> Rule:
    def of(config: Config, i: int) -> int:
        return int((i + 1) % config.get("no_rope_layer_interval", interval_default) != 0)

    return listed("no_rope_layers", _each(of))


def _rope_of(config: Config, n: int) -> list[Any]:
    return _no_rope(4).kinds(config, n) or []


def _smollm3(config: Config, n: int) -> list[Any]:
    windows = config.get("use_sliding_window", False) and config.get("sliding_window") is not None
    return [
        "sliding_attention" if windows and not has_rope else "full_attention"
        for has_rope in _rope_of(config, n)
    ]


def _llama4(config: Config, n: int) -> list[Any]:
    return ["chunked_attention" if rope else "full_attention" for rope in _rope_of(config, n)]


def _llama4_experts(config: Config, n: int) -> Iterable[int]:
    step = config.get("interleave_moe_layer_step", 1)
    return range(step - 1, n, step)


def _full_at_end(kinds: list[Any] | None) -> list[Any] | None:
    return [*kinds[:-1], "full_attention"] if kinds else kinds


def _gemma4() -> Rule:
    """Gemma 3's rule, but the last layer has full attention whatever a config says."""
    rule = _every(6)
    keeping = "a layer with full attention at the end: the class makes it one"
    return Rule(lambda c, n: _full_at_end(rule.kinds(c, n)), rule.changes, keeping)


def _olmo_hybrid(config: Config, n: int) -> list[Any]:
    kinds = ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(n)]
    return kinds if "full_attention" in kinds else [*kinds[:-1], "full_attention"]


def _recurrent(config: Config, n: int) -> list[Any]:
    kinds = list(config.get("block_types") or ("recurrent", "recurrent", "attention"))
    return (kinds * n)[:n]


def _gpt_neo(config: Config, n: int) -> list[Any]:
    kinds: list[Any] = []
    for names, times in config.get("attention_types") or [[["global", "local"], 12]]:
        kinds += list(names) * times
    return kinds


def _gpt_neo_changes(config: Config, wanted: Sequence[Any]) -> Iterable[dict[str, Any]]:
    yield {"attention_types": [[list(wanted), 1]]}


def _lfm2(config: Config, n: int) -> list[Any]:
    full = config.get("full_attn_idxs")
    return ["full_attention" if full is None or i in full else "conv" for i in range(n)]


def _deepstack(config: Config, i: int) -> int:
    vision = config.get("vision_config")
    indexes = vision.get("deepstack_visual_indexes") if isinstance(vision, Mapping) else None
    return min(i, 3 if indexes is None else len(indexes))


def _steps(config: Config, i: int) -> Any:
    """Which layers of an encoder and a decoder have experts, whichever of both it is."""
    steps = (config.get("encoder_sparse_step", 0), config.get("decoder_sparse_step", 0))
    return tuple((i + 1) % step if step else 0 for step in steps)


def _has_tables(config: Config) -> bool:
    """Whether layers share caches, or have parts of one table of embeddings."""
    return bool(config.get("num_kv_shared_layers", 0) or config.get("hidden_size_per_layer_input"))


_HYBRID = _every("full_attention_interval", 4, other="linear_attention")
_DEEPSTACK = Rule(
    _each(_deepstack), keeping="the first layers, which images are added to, in front"
)
_EXPERTS = {"mlp_layer_types": _sparse()}
_DENSE_FIRST = {"mlp_layer_types": _prefix("first_k_dense_replace", 1)}

#: What layers are by their numbers: by class (`model_type`), then by what is chosen.
RULES: dict[str, dict[str, Rule]] = {
    "afmoe": {
        "layer_types": _every("global_attn_every_n_layers", 4),
        "mlp_layer_types": _prefix("num_dense_layers", 1),
    },
    "bamba": {"attn_layer_indices": numbered("attn_layer_indices")},
    "beam": {"layers": _in_place()},
    "blip_2_qformer": {
        "layers": Rule(_each(lambda c, i: i % c.get("cross_attention_frequency", 2)))
    },
    "cohere2": {"layer_types": _every("sliding_window_pattern", 4)},
    "cwm": {"layer_types": _every(4, shift=0)},
    "deberta-v2": {"layers": Rule(_each(lambda c, i: not i and c.get("conv_kernel_size", 0)))},
    "deepseek_v2": {"mlp_layer_types": _prefix("first_k_dense_replace", 0)},
    "deepseek_v3": {"mlp_layer_types": _prefix("first_k_dense_replace", 3)},
    "diffllama": {"layers": _in_place()},
    "dots1": {
        "layer_types": _windows(62, flag=False),
        "mlp_layer_types": _prefix("first_k_dense_replace", 0),
    },
    "ernie4_5_moe": {
        "mlp_layer_types": _searched(
            ("moe_layer_start_index", "moe_layer_end_index"), _ernie, "layers with experts in a row"
        )
    },
    "evolla": {"layers": _all_in_place()},
    "exaone_moe": {"layer_types": _every("sliding_window_pattern", 4)},
    "exaone4": {"layer_types": _every("sliding_window_pattern", 4)},
    "gemma2": {"layer_types": _every(2)},
    "gemma3_text": {"layer_types": _every("sliding_window_pattern", 6)},
    "gemma3n_text": {"layers": _all_in_place(), "layer_types": _every(5)},
    "gemma4_text": {"layers": _all_in_place(_has_tables), "layer_types": _gemma4()},
    "glm4_moe": _DENSE_FIRST,
    "glm4v_moe_text": _DENSE_FIRST,
    "gpt2": {"layers": _in_place(lambda c: c.get("scale_attn_by_inverse_layer_idx", False))},
    "gpt_neo": {"attention_types": Rule(_gpt_neo, _gpt_neo_changes)},
    "gpt_neox_japanese": {"layers": Rule(lambda c, n: [i == n - 1 for i in range(n)])},
    "gpt_oss": {"layer_types": _every(2)},
    "granite_swa": {"layer_types": _every(4, shift=0)},
    "granitemoe_swa": {"layer_types": _every(4, shift=0)},
    "granitemoehybrid": {
        "layer_types": listed("layer_types", _each(lambda c, i: "linear_attention"))
    },
    "inkling2_text": {
        "layers": Rule(_each(lambda c, i: i % c.get("n_layers_per_attn_res_block", 1)))
    },
    "jamba": {
        "layer_types": _periodic("attn_layer_period", "attn_layer_offset", (8, 4)),
        "mlp_layer_types": _periodic("expert_layer_period", "expert_layer_offset", (2, 1)),
    },
    "lfm2": {
        "full_attn_idxs": numbered("full_attn_idxs", lambda c, n: range(n)),
        "layer_types": listed("layer_types", _lfm2),
    },
    "lfm2_moe": {"mlp_layer_types": _prefix("num_dense_layers", 2)},
    "llama4_text": {
        "no_rope_layers": _no_rope(4),
        "layer_types": listed("layer_types", _llama4),
        "moe_layers": numbered("moe_layers", _llama4_experts),
    },
    "minimax": {"layer_types": _every(2, full="linear_attention", other="full_attention")},
    "mistral4": {"mlp_layer_types": _prefix("first_k_dense_replace", 0)},
    "mistral_large4_text": {"layers": _all_in_place()},
    "mllama_text_model": {
        "cross_attention_layers": numbered("cross_attention_layers", lambda c, n: range(3, 39, 5))
    },
    "modernbert": {
        "layer_types": _every("global_attn_every_n_layers", 3, shift=0),
        "layers": Rule(_each(lambda c, i: not i), keeping=_FIRST),
    },
    "modernbert-decoder": {
        "layer_types": _every("global_attn_every_n_layers", 3, shift=0),
        "layers": Rule(_each(lambda c, i: not i), keeping=_FIRST),
    },
    "molmo2_text": {"rope_scaling_layers": numbered("rope_scaling_layers", lambda c, n: range(n))},
    "nllb-moe": {"layers": Rule(_each(_steps))},
    "olmo3": {"layer_types": _every(4)},
    "olmo_hybrid": {"layer_types": listed("layer_types", _olmo_hybrid)},
    "qwen2": {"layer_types": _windows(28)},
    "qwen2_5_omni_text": {"layer_types": _windows(28)},
    "qwen2_5_vl_text": {"layer_types": _windows(80)},
    "qwen2_moe": {"layer_types": listed("layer_types", _each(_qwen2_moe_windows)), **_EXPERTS},
    "qwen2_vl_text": {"layer_types": _windows(80)},
    "qwen3": {"layer_types": _windows(28)},
    "qwen3_5_moe_text": {"layer_types": _HYBRID},
    "qwen3_5_text": {"layer_types": _HYBRID},
    "qwen3_moe": _EXPERTS,
    "qwen3_next": {"layer_types": _HYBRID, **_EXPERTS},
    "qwen3_omni_moe_text": {**_EXPERTS, "deepstack": _DEEPSTACK},
    "qwen3_vl_moe_text": {**_EXPERTS, "deepstack": _DEEPSTACK},
    "qwen3_vl_text": {"deepstack": _DEEPSTACK},
    "recurrent_gemma": {
        "block_types": Rule(_recurrent, lambda c, wanted: [{"block_types": list(wanted)}])
    },
    "rwkv": {"layers": Rule(_each(lambda c, i: not i), keeping=_FIRST)},
    "smollm3": {
        "no_rope_layers": _no_rope(4),
        "layer_types": listed("layer_types", _smollm3),
    },
    "switch_transformers": {"layers": Rule(_each(lambda c, i: (not i, _steps(c, i - 1))))},
    "t5_gemma_module": {"layer_types": _every(2)},
    "vaultgemma": {"layer_types": _every(2)},
    "zamba": {"layers": _all_in_place()},
    "zamba2": {"layers": _all_in_place()},
}
for _class in ("instructblip_qformer", "instructblipvideo_qformer"):
    RULES[_class] = RULES["blip_2_qformer"]
for _class in ("imagegpt", "decision_transformer"):
    RULES[_class] = RULES["gpt2"]
_OTHER_FIRST = "longt5 mt5 pix2struct_text_model pop2piano t5 udop umt5 wavlm"
for _class in _OTHER_FIRST.split():
    RULES[_class] = {"layers": Rule(_each(lambda c, i: not i), keeping=_FIRST)}

#: Classes whose first layers are dense, by the key that says how many, and how many by default.
_FIRST_DENSE: dict[tuple[str | None, int], str] = {
    ("first_k_dense_replace", 2): "bailing_hybrid",
    (None, 3): "beam glm5_next_text",
    ("first_k_dense_replace", 3): "deepseek_v32 glm_moe_dsa",
    (None, 1): "ernie4_5_vl_moe_text glm4_moe_lite hy_v3 hy_v4 laguna mimo_v2_flash",
    ("first_k_dense_replace", 1): "exaone_moe kimi_linear mistral_large4_text unlimited_ocr_text",
}
for _dense, _classes in _FIRST_DENSE.items():
    for _class in _classes.split():
        _rule = listed("mlp_layer_types", _dense_first(*_dense))
        RULES.setdefault(_class, {})["mlp_layer_types"] = _rule

#: Lists that these classes derive and that only a stored one is taken from here: transformers
#: writes it into each config that it saves.
_STORED = {
    "indexer_types": "glm5_next_text glm_moe_dsa hy_v4",
    "layer_rope_theta": "muse_glimmer_text muse_spark_text",
    "layer_types": (
        "bailing_hybrid beam cohere2_moe deepseek_v4 diffusion_gemma_text dots3_note_text "
        "embedding_gemma2_text flint gemma4_unified_text glm5_next_text inkling2_text "
        "inkling_text kimi_linear kolibri1 lfm3 mimo_v2_flash minimax_m3_vl_text "
        "muse_glimmer_text muse_spark_text neomme qwen4_exp_text step3p5 t5gemma2_decoder "
        "t5gemma2_text ultrabert"
    ),
    "mlp_layer_types": (
        "axk1 axk2 cohere2_moe deepseek_v4 dots3_note_text inkling_text minimax_m3_vl_text step3p5"
    ),
}
for _key, _classes in _STORED.items():
    for _class in _classes.split():
        RULES.setdefault(_class, {})[_key] = listed(_key, lambda config, n: None)
RULES["flint"]["experts"] = _sparse((0, 1))
RULES["gemma4_unified_text"]["layers"] = _all_in_place(_has_tables)

#: Lists of layers' numbers in classes that have no rules.
NUMBERED_KEYS = (
    *("attn_layer_indices", "full_attn_idxs", "local_layer_ids", "mlp_only_layers", "moe_layers"),
)
#: Keys by which code that is not known here may choose what a layer is, with the values that choose
#: nothing.
_CHOOSING: tuple[tuple[tuple[Any, ...], str], ...] = (
    (
        (),
        "attn_layer_offset block_types expert_layer_offset index_topk_pattern "
        "kv_source_layers linear_attn_config max_window_layers moe_layers_enum "
        "rope_scaling_layers",
    ),
    (
        (0, 1),
        "attn_layer_period decoder_sparse_step expert_layer_period "
        "full_attention_interval global_attn_every_n_layers index_topk_freq "
        "interleave_moe_layer_step layer_group_size moe_every_n_layers moe_layer_freq "
        "moe_layer_interval sliding_window_pattern",
    ),
    (
        (0,),
        "cross_attention_frequency cross_layer_interval first_k_dense_replace "
        "moe_layer_num_skipped moe_layer_start_index n_dense_layers "
        "no_rope_layer_interval num_dense_layers num_hash_layers num_kv_shared_layers",
    ),
    (
        ([],),
        "cross_attention_layers deepstack_visual_indexes fullatt_block_indexes "
        "global_attn_indexes ple_layer_ids window_block_indexes window_block_indices",
    ),
    (([], {}), "deepstack_layer_map"),
    ((False,), "scale_attn_by_inverse_layer_idx use_cla"),
)
CHOOSING_KEYS = dict(sorted((key, values) for values, keys in _CHOOSING for key in keys.split()))


def rules_of(model_type: object) -> Mapping[str, Rule] | None:
    """The rules of a class, or of the text part of one that sees or hears; None: none are known."""
    names = (model_type, f"{model_type}_text", f"{model_type}_text_model", f"{model_type}_thinker")
    return next((RULES[name] for name in names if isinstance(name, str) and name in RULES), None)
