"""A config that is no plain LoRA is refused at its key; what has no effect is let through."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.checkpoints.adapter import adapter_views
from mergepipe_pipeline.checkpoints.adapter_config import parse_adapter_config
from mergepipe_pipeline.errors import CheckpointError
from tests.checkpoints.adapters import BASE, Q, adapter, pair
from tests.support.laws import examples


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, 'kind of adapter is not read.*found "IA3"'),
        ({"peft_type": None}, "kind of adapter is not read.*found null"),
        ({"target_parameters": "experts.down_proj"}, "target_parameters.*a list"),
        ({"trainable_token_indices": {"embed_tokens": 0}}, "trainable_token_indices.*a list"),
        ({"trainable_token_indices": [3, 3]}, "trainable_token_indices.*every token once"),
        ({"trainable_token_indices": "all"}, "trainable_token_indices.*a list of tokens"),
        ({"bias": "some"}, "bias.*none, all or lora_only"),
        ({"use_dora": 1}, "use_dora.*true or false"),
        ({"use_dora": True}, "without its partner.*lora_magnitude_vector"),
        ({"use_qalora": True}, "QALoRA"),
        ({"kasa_config": {}}, None),
        ({"init_lora_weights": "loftq"}, 'found "loftq".*merge_and_unload'),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "corda"}, r'"corda".*path_initial_model_for_weight_conversion'),
        ({"init_lora_weights": "OLoRA", "velora_config": {"num_groups": 4}}, None),
        ({"init_lora_weights": "eva", "eva_config": {"rho": 2.0}}, None),
        ({"init_lora_weights": True, "corda_config": {"x": 1}}, None),
        ({"init_lora_weights": "Gaussian"}, None),
        ({"init_lora_weights": ["pissa"]}, r'found \["pissa"\].*merge_and_unload'),
        ({"\ud800": True}, "config cannot be read"),
        ({"use_something_new": True}, "unknown setting.*use_something_new"),
        ({"use_something_new": None}, None),
        ({"r": 0}, "not valid.*, r.*a rank from 1 to 2.31, found 0"),
        ({"r": "8"}, "not valid.*, r"),
        ({"lora_alpha": float("inf")}, "lora_alpha.*a finite number"),
        ({"lora_alpha": 10**400}, "lora_alpha.*a finite number"),
        ({"lora_alpha": 1e39}, "lora_alpha.*float32 can hold, found 1e.39"),
        ({"lora_alpha": True}, "lora_alpha.*a finite number"),
        ({"use_rslora": "yes"}, "use_rslora.*true or false"),
        ({"rank_pattern": []}, None),
        ({"rank_pattern": [1]}, "rank_pattern.*an object"),
        ({"rank_pattern": {"(": 4}}, r"rank_pattern\.\(.*regular expression"),
        ({"alpha_pattern": {"q": "x"}}, r"alpha_pattern\.q.*finite number"),
    ],
)
def test_a_config_that_is_no_plain_lora_is_refused_at_its_key(
    config: dict[str, Any], message: str | None
) -> None:
    checkpoint = adapter(pair(Q), **config)
    if message is None:
        assert adapter_views(checkpoint, BASE)
    else:
        with pytest.raises(CheckpointError, match=message):
            adapter_views(checkpoint, BASE)


@settings(max_examples=examples(50), deadline=None)
@given(st.text(max_size=30) | st.recursive(st.none() | st.integers(), st.lists).map(json.dumps))
def test_no_text_is_read_as_a_config_by_accident(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"config cannot be read|kind of adapter"):
        parse_adapter_config(text, "f")


MODULES = ["q_proj", "model.layers.1.q_proj", "model.layers.12.mlp.up_proj", "xq_proj", "", "a.b"]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    "pattern",
    [
        *("q_proj", r"layers.\d+.*_proj", "^model.layers.1.q_proj", r".*\.(q|up)_proj"),
        *("a)|(q_proj", r"layers\.(1|12)\..*", "q_proj$", "", ".*", "[qu]p?_proj", "(?i:Q_PROJ)"),
    ],
)
def test_a_pattern_matches_what_peft_matches(pattern: str, module: str) -> None:
    text = json.dumps({"peft_type": "LORA", "r": 1, "rank_pattern": {pattern: 2}})
    matched = parse_adapter_config(text, "x").rank_of(module) == 2
    assert matched == (re.match(rf"(.*\.)?({pattern})$", module) is not None)


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(a|a)" * 40 + "b", "(.*)*.*.*.*x"])
def test_no_pattern_takes_ages(pattern: str) -> None:
    text = json.dumps({"peft_type": "LORA", "r": 1, "alpha_pattern": {pattern: 2.0}})
    start_s = time.process_time()
    assert parse_adapter_config(text, "x").scale_of("a" * 2000) == 8.0
    assert time.process_time() - start_s < 5


@pytest.mark.parametrize("pattern", ["(?=a)", r"(a)\1", "(a{1000}){1000}", "(" * 5000])
def test_a_pattern_that_cannot_be_matched_in_linear_time_is_refused(pattern: str) -> None:
    text = json.dumps({"peft_type": "LORA", "rank_pattern": {pattern: 2}})
    with pytest.raises(CheckpointError, match="regular expression without lookaround"):
        parse_adapter_config(text, "x")
