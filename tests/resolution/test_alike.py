"""Models that do not compute alike are named with what differs; other heads are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mergepipe_pipeline.errors import IncompatibleCheckpointsError
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import resolve
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run
from tests.resolution.test_slices import change_config, logits
from tests.support.family import tensors_of, write_model

SIZES = {"layers": 2, "hidden": 32, "vocab": 64}


def write(folder: Path, name: str, **config: Any) -> Path:
    """A tiny llama whose config also has these keys."""
    values = tensors_of(len(name), None, dtype=torch.float32, **SIZES)
    write_model(folder / name, values, **SIZES)
    change_config(folder / name, **config)
    return folder / name


def averaged(*models: Path, base: Path | None = None) -> str:
    listed = "".join(f"- {{model: {model}, parameters: {{weight: 0.5}}}}\n" for model in models)
    if base is None:
        return f"merge_method: linear\nmodels:\n{listed}"
    return f"merge_method: task_arithmetic\nbase_model: {base}\nmodels:\n{listed}"


def told(home: Warehouse, text: str) -> list[str]:
    """What is said of models that do not compute alike."""
    warnings = resolve(home, parse(text, name="t", where="t")).recipe.warnings
    return [w for w in warnings if "compute alike" in w]


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ({"rope_theta": 1e4}, {"rope_theta": 1e6}, "rope_theta is 10000.0 in a, 1000000.0 in b"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            'rope_scaling is linear {"factor": 8.0} in a, default in b',
        ),
        ({"rms_norm_eps": 1e-5}, {"rms_norm_eps": 1e-2}, "rms_norm_eps is 1e-05 in a, 0.01 in b"),
        ({"hidden_act": "silu"}, {"hidden_act": "gelu"}, "hidden_act is silu in a, gelu in b"),
        (
            {"final_logit_softcapping": 30.0},
            {},
            "final_logit_softcapping is 30.0 in a, unset in b",
        ),
        (
            {"sliding_window": 8},
            {"sliding_window": 4},
            "sliding_window is 8 in a, 4 in b",
        ),
        (
            {"residual_multiplier": 0.5},
            {"residual_multiplier": 1.0},
            "residual_multiplier is 0.5 in a, 1.0 in b",
        ),
        (
            {"model_type": "gemma2", "layer_types": ["full_attention", "sliding_attention"]},
            {"model_type": "gemma2"},
            "layer_types[0] is full_attention in a, sliding_attention in b",
        ),
        (
            {"vision_config": {"hidden_act": "gelu", "hidden_size": 8}},
            {"vision_config": {"hidden_act": "quick_gelu", "hidden_size": 8}},
            "vision_config.hidden_act is gelu in a, quick_gelu in b",
        ),
    ],
)
def test_what_models_compute_otherwise_is_named_with_whose_value_stays(
    home: Warehouse, tmp_path: Path, a: dict[str, Any], b: dict[str, Any], said: str
) -> None:
    first, second = write(tmp_path, "a", **a), write(tmp_path, "b", **b)
    (warning,) = told(home, averaged(first, second))
    assert f"the result is run as 'a' says: {said}" in warning
    (warning,) = told(home, averaged(first, base=second))
    assert "the result is run as 'b' says: " in warning


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"rope_theta": 1e6}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}}),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}},
        ),
        (
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
                    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
                }
            },
        ),
        ({}, {"rope_theta": 10000.0}),
        ({"hidden_act": "silu"}, {"hidden_act": "swish"}),
        (
            {"use_sliding_window": False, "sliding_window": 8},
            {"use_sliding_window": False, "sliding_window": 4},
        ),
        ({"torch_dtype": "float16", "use_cache": False}, {"eos_token_id": 5, "dropout": 0.1}),
        (
            {"model_type": "gemma2", "layer_types": ["sliding_attention", "full_attention"]},
            {"model_type": "gemma2"},
        ),
    ],
)
def test_one_meaning_in_two_spellings_and_keys_of_training_are_not_told(
    home: Warehouse, tmp_path: Path, a: dict[str, Any], b: dict[str, Any]
) -> None:
    assert not told(home, averaged(write(tmp_path, "a", **a), write(tmp_path, "b", **b)))


def test_a_model_that_takes_no_part_and_an_only_model_are_not_compared(
    home: Warehouse, tmp_path: Path
) -> None:
    a, b = write(tmp_path, "a"), write(tmp_path, "b", rope_theta=1e6)
    assert not told(home, f"merge_method: passthrough\nmodels: [{{model: {b}}}]\n")
    assert not told(home, averaged(a, write(tmp_path, "c")))


@pytest.mark.parametrize(
    "other",
    [
        {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4},
        {"num_attention_heads": 8, "num_key_value_heads": 8},
    ],
)
def test_heads_of_another_size_in_equal_tensors_are_refused(
    home: Warehouse, tmp_path: Path, other: dict[str, Any]
) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    heads |= {"head_dim": 8} if "head_dim" in other else {}
    a, b = write(tmp_path, "a", **heads), write(tmp_path, "b", **other)
    with pytest.raises(IncompatibleCheckpointsError, match=r"b, num_attention_heads.* as in .*a"):
        resolve(home, parse(averaged(a, b), name="t", where="t"))
    one = run(home, averaged(a, write(tmp_path, "c", **heads))).snapshot.path
    assert logits(one).isfinite().all()


def test_the_result_of_models_that_are_alike_but_for_one_value_has_the_base_s(
    home: Warehouse, tmp_path: Path
) -> None:
    """Logits are those of the merged weights under the base's config, and not under the other."""
    pytest.importorskip("transformers")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    a = write(tmp_path, "a", rms_norm_eps=1e-5, **heads)
    b = write(tmp_path, "bb", rms_norm_eps=1.0, **heads)
    result = Path(run(home, averaged(b, base=a)).snapshot.path)
    ours = logits(str(result))
    copied = tmp_path / "copy"
    copied.mkdir()
    for file in result.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    change_config(copied, rms_norm_eps=1e-5)
    assert torch.equal(logits(str(copied)), ours)
    change_config(copied, rms_norm_eps=1.0)
    assert not torch.allclose(logits(str(copied)), ours)
