"""What rules say of layers by their numbers is what transformers derives from the same config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mergepipe_pipeline.resolution.layer_rules import NUMBERED_KEYS, rules_of

pytest.importorskip("transformers")
#: Classes whose layers never change places.
FIXED = ("gemma3n_text", "mistral_large4_text", "zamba")
NUMBERS = [
    ("afmoe", {"global_attn_every_n_layers": 3}),
    ("cohere2", {"sliding_window_pattern": 3}),
    ("dots1", {"max_window_layers": 2}),
    ("exaone4", {"sliding_window_pattern": 2}),
    ("exaone_moe", {"first_k_dense_replace": 4}),
    ("gemma3_text", {"sliding_window_pattern": 4}),
    ("kimi_linear", {"first_k_dense_replace": 3}),
    ("lfm2", {"full_attn_idxs": [1, 4]}),
    ("llama4_text", {"no_rope_layer_interval": 2, "interleave_moe_layer_step": 2}),
    ("modernbert", {"global_attn_every_n_layers": 2}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}),
    ("qwen2_5_vl_text", {"use_sliding_window": True, "max_window_layers": 3}),
    ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 5}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ("qwen3_next", {"full_attention_interval": 3}),
    ("smollm3", {"no_rope_layer_interval": 3, "use_sliding_window": True, "sliding_window": 8}),
]


def derived(model_type: str, n: int, **numbers: Any) -> dict[str, Any]:
    """The config that a class makes of its defaults, `n` layers and some numbers."""
    from transformers import CONFIG_MAPPING

    cls: Any = CONFIG_MAPPING[model_type]
    config: dict[str, Any] = cls(num_hidden_layers=n, **numbers).to_dict()
    return config | numbers


def without_lists(
    config: dict[str, Any], n: int, kept: set[str]
) -> Iterator[tuple[str, list[Any]]]:
    """Take the lists with an entry per layer out of a config, and give them."""
    for key, value in list(config.items()):
        if isinstance(value, list) and len(value) == n and key not in kept:
            yield key, config.pop(key)


@pytest.mark.parametrize(("model_type", "numbers"), NUMBERS)
def test_lists_that_a_class_derives_from_numbers_are_derived_alike(
    model_type: str, numbers: dict[str, Any]
) -> None:
    config = derived(model_type, 9, **numbers)
    lists = dict(without_lists(config, 9, set(numbers)))
    rules = rules_of(model_type)
    assert rules is not None
    assert lists
    for key, value in lists.items():
        kinds = rules[key].kinds(config, 9)
        assert kinds in (None, value, _members(value, 9)), key


def predicts_text(model_type: str) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or model_type.endswith("_text")


@pytest.mark.filterwarnings("ignore")
def test_no_class_of_transformers_has_kinds_of_layers_that_no_rule_knows() -> None:
    from transformers import CONFIG_MAPPING

    unknown, wrong, known = [], [], 0
    for model_type in sorted({t for t in CONFIG_MAPPING if predicts_text(t)} - {*FIXED}):
        for n in (11, 14):
            try:
                config = derived(model_type, n)
            except Exception:
                continue
            for key, value in list(without_lists(config, n, set())):
                rule = (rules_of(model_type) or {}).get(key)
                if rule is None:
                    uniform = all(entry == value[0] for entry in value)
                    unknown += [] if uniform or key in NUMBERED_KEYS else [(model_type, key)]
                    continue
                kinds = rule.kinds(config, n)
                known += kinds is not None
                if kinds is not None and kinds != value and kinds != _members(value, n):
                    wrong.append((model_type, key, kinds, value))
    assert (unknown, wrong) == ([], [])
    assert known > 50


def _members(numbers: list[Any], n: int) -> list[bool]:
    return [i in numbers for i in range(n)]
