"""Whether models that are merged by their tensors' names compute alike, as their configs say.

A result is run by one config, that of its template. Keys about training, dtypes, versions, tokens
and caches do not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.recipe import Recipe
from mergepipe_pipeline.errors import IncompatibleCheckpointsError
from mergepipe_pipeline.resolution.layer_config import SAME_KINDS, kinds_of

#: Keys of what a model computes, besides rope, heads and what single layers are.
_COMPUTING = re.compile(
    r"^(?:(?:rms_|layer_?)?norm_eps(?:ilon)?|layernorm_epsilon"
    r"|(?:ffn_)?hidden_act(?:ivation)?|activation_function|feed_forward_proj|dense_act_fn"
    r"|\w*softcapping|use_sliding_window|sliding_window|attention_window_size|local_attention"
    r"|attention_chunk_size|attn_temperature_tuning|attn_scale|floor_scale|query_pre_attn_scalar"
    r"|(?:embedding|residual|attention|lm_head|key|attention_in|attention_out)_multiplier"
    r"|logits_scaling|logit_scale|scale_(?:emb|depth|embedding|attn_weights)|dim_model_base"
    r"|num_experts_per_tok(?:en)?|moe_(?:topk|k)|norm_topk_prob|routed_scaling_factor"
    r"|scoring_func|topk_method|n_group|topk_group|swiglu_limit|clip_qkv|alibi|parallel_attn"
    r"|use_parallel_residual|position_embedding_type|use_bidirectional_attention"
    r"|relative_attention_(?:num_buckets|max_distance))$"
)
_HEADS = (
    *("num_attention_heads", "n_head", "num_heads", "n_heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
_WIDTHS, _HEAD_SIZES = ("hidden_size", "n_embd", "d_model", "dim"), ("head_dim", "d_kv")
#: Values that say what a config without the key says, whatever the class.
_DEFAULTS = {
    "rope_scaling": "default",
    "use_sliding_window": False,
    "scale_attn_weights": True,
    "alibi": False,
    "position_embedding_type": "absolute",
    "use_bidirectional_attention": False,
}
#: Classes whose rope has this theta where their config has none.
_THETA = 10000.0
_THETA_CLASSES = frozenset(
    {"gemma", "gemma2", "gpt_neox", "llama", "mistral", "olmo", "phi", "phi3", "qwen2", "stablelm"}
)
#: Names of one activation, and of one kind of layers.
_SAME = {"swish": "silu", **SAME_KINDS}
#: Settings of rope that are no parameters of its scaling.
_ROPE_OWN = ("rope_theta", "partial_rotary_factor", "rope_type", "type")
#: What a config does not say.
_UNSET = "unset"
#: The most keys that are listed.
_LISTED = 12


def compute_alike(recipe: Recipe, models: Sequence[Model], template: int) -> list[str]:
    """A warning that lists in what models do not compute alike, and whose values the result has.

    Raises IncompatibleCheckpointsError where equal tensors are cut into heads of other sizes,
    CheckpointError for a config that is not valid.
    """
    order = [template, *sorted(recipe.used - {template})]
    whole = [models[m] for m in order if not models[m].is_partial]
    whole = [model for model in whole if model.checkpoint.config]
    names = [model.name for model in whole]
    parts = [dict(_parts(model.stated)) for model in whole]
    for part in dict.fromkeys(key for of_model in parts for key in of_model):
        _refuse_other_heads(
            part, [(n, p[part]) for n, p in zip(names, parts, strict=True) if part in p]
        )
    facts = [dict(_facts(of_model)) for of_model in parts]
    if not recipe.sliced:
        _add_kinds(facts, [kinds_of(model) for model in whole])
    told = [*_architectures(names, [p[""] for p in parts]), *_differences(names, facts)]
    if not told:
        return []
    shown = "; ".join(told[:_LISTED]) + "; …" * (len(told) > _LISTED)
    return [
        "the models do not compute alike, and the result is run as "
        f"{models[template].name!r} says: {shown}"
    ]


def _parts(config: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """The parts of a config by name: that of the text, which may be all of it, is called ""."""
    text = config.get("text_config")
    yield "", {**config, **text} if isinstance(text, dict) else config
    for name in ("audio_config", "vision_config"):
        if isinstance(config.get(name), dict):
            yield f"{name}.", config[name]


def _refuse_other_heads(part: str, configs: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise IncompatibleCheckpointsError where one width is cut into heads of other sizes."""
    for key in _HEADS:
        seen: dict[int, tuple[str, int]] = {}
        for name, config in configs:
            heads, size = config.get(key), _first(config, _HEAD_SIZES)
            width = heads * size if isinstance(heads, int) and size else _first(config, _WIDTHS)
            if not isinstance(heads, int) or width is None:
                continue
            other, count = seen.setdefault(width, (name, heads))
            if count != heads:
                raise IncompatibleCheckpointsError(
                    "Models whose heads are of another size cannot be merged",
                    where=f"{name}, {part}{key}",
                    expected=f"{count}, as in {other}: its tensors are as large, but cut otherwise",
                    found=str(heads),
                    next_step="merge models with heads of one size, or leave one of these out",
                )


def _first(config: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    return next((config[key] for key in keys if isinstance(config.get(key), int)), None)


def _facts(parts: Mapping[str, Mapping[str, Any]]) -> Iterable[tuple[str, Any]]:
    """Yield what a config says of how its model computes, by dotted key."""
    for part, config in parts.items():
        yield from ((part + key, value) for key, value in _rope(config))
        for key, value in config.items():
            idle = key == "sliding_window" and config.get("use_sliding_window") is False
            if _COMPUTING.search(key) and value is not None and not idle:
                yield part + key, _SAME.get(value, value) if isinstance(value, str) else value


def _rope(config: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Rope's settings in the spellings of transformers 4 and 5, each with its kind of layers."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    new, old = new if isinstance(new, dict) else {}, old if isinstance(old, dict) else {}
    nested = {kind: v for kind, v in new.items() if isinstance(v, dict)}
    flat = {
        "rope_theta": config.get("rope_theta", config.get("global_rope_theta")),
        "partial_rotary_factor": config.get("partial_rotary_factor", config.get("rotary_pct")),
        **old,
        **{key: value for key, value in new.items() if key not in nested},
    }
    if flat["rope_theta"] is None and config.get("model_type") in _THETA_CLASSES:
        flat["rope_theta"] = _THETA
    local = config.get("rope_local_base_freq", config.get("local_rope_theta"))
    if local is not None and not nested:
        nested = {"full_attention": flat, "sliding_attention": {"rope_theta": local}}
    for kind, settings in (nested or {"": flat}).items():
        end = f" ({kind})" if kind else ""
        for key in ("rope_theta", "partial_rotary_factor"):
            if settings.get(key) is not None:
                yield key + end, settings[key]
        scaling = settings.get("rope_type") or settings.get("type") or "default"
        rest = {k: v for k, v in settings.items() if k not in _ROPE_OWN and v is not None}
        if scaling != "default":
            yield f"rope_scaling{end}", f"{scaling} {json.dumps(rest, sort_keys=True)}"


def _add_kinds(facts: Sequence[dict[str, Any]], kinds: Sequence[Mapping[str, Any]]) -> None:
    """Add what layers are to the models' facts, of the first layer that differs."""
    for topic in dict.fromkeys(topic for known in kinds for topic in known):
        by_model = [
            (f, known[topic]) for f, known in zip(facts, kinds, strict=True) if topic in known
        ]
        for i in range(min(len(known) for _, known in by_model)):
            entries = [_SAME.get(known[i], known[i]) for _, known in by_model]
            if any(entry != entries[0] for entry in entries):
                for (of_model, _), entry in zip(by_model, entries, strict=True):
                    of_model[f"{topic}[{i}]"] = entry
                break


def _differences(names: Sequence[str], facts: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """One text per key that not all models have with one value."""
    for key in dict.fromkeys(key for said in facts for key in said):
        default = _DEFAULTS.get(key.split(" ")[0].rpartition(".")[2], _UNSET)
        values = [said.get(key, default) for said in facts]
        if all(value == values[0] for value in values):
            continue
        names_by_value: dict[str, list[str]] = {}
        for name, value in zip(names, values, strict=True):
            names_by_value.setdefault(f"{value}", []).append(name)
        listed = [f"{value} in {' and '.join(who)}" for value, who in names_by_value.items()]
        yield f"{key} is {', '.join(listed)}"


def _architectures(names: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say that models whose tensors are named alike are of different architectures."""
    model_by_kind: dict[str, str] = {}
    for name, config in zip(names, configs, strict=True):
        kinds = config.get("architectures")
        if isinstance(kinds, list) and kinds:
            model_by_kind.setdefault(str(kinds[0]), name)
    if len(model_by_kind) < 2:
        return []
    listed = ", ".join(f"{name} is a {kind}" for kind, name in model_by_kind.items())
    return [
        f"they are of different architectures ({listed}), where tensors of one name may mean "
        "different things, and mergekit asks for --allow-crimes"
    ]
