"""Adapters and deltas as views: every tensor finds its place in the base, or is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from mergepipe_pipeline.checkpoints.adapter import adapter_views, delta_views
from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.domain.view import LowRank
from mergepipe_pipeline.errors import CheckpointError
from tests.checkpoints.adapters import BASE, Q, Shapes, adapter, pair, used, value
from tests.support.laws import examples


@pytest.mark.parametrize("module", [Q, Q.removeprefix("model."), "language." + Q])
@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
@pytest.mark.parametrize("name", ["", ".default", ".mine"])
def test_a_tensor_is_found_with_fewer_or_more_prefixes_and_under_any_adapter_name(
    module: str, prefix: str, name: str
) -> None:
    views = adapter_views(adapter(pair(prefix + module, name=name)), BASE)
    assert list(views) == [f"{Q}.weight"]
    low_rank = views[f"{Q}.weight"].low_rank
    assert isinstance(low_rank, LowRank)
    assert (low_rank.scale, low_rank.transposed) == (2.0, False)


def test_an_end_that_several_base_tensors_have_is_refused_with_their_names() -> None:
    names = ["text.layers.0.q.weight", "vision.layers.0.q.weight"]
    with pytest.raises(CheckpointError, match=rf"several.*found {names[0]}, {names[1]}"):
        adapter_views(adapter(pair("layers.0.q")), names)
    assert list(adapter_views(adapter(pair("text.layers.0.q")), names)) == names[:1]


def test_a_low_rank_view_has_the_dtype_of_b_and_the_base_s_shape() -> None:
    view = adapter_views(adapter(pair(Q), dtype="BF16"), BASE)[f"{Q}.weight"]
    assert (view.dtype, view.shape, view.stored, view.stands_alone) == ("BF16", (8, 6), (), False)
    assert view.nbytes == 2 * (2 * 6 + 8 * 2)


def test_without_shapes_the_config_says_whether_an_update_is_transposed() -> None:
    for flag, shape in ((False, (8, 6)), (True, (6, 8))):
        view = adapter_views(adapter(pair(Q), fan_in_fan_out=flag), list(BASE))[f"{Q}.weight"]
        assert view.shape == shape
        assert isinstance(view.low_rank, LowRank)
        assert view.low_rank.transposed is flag


def test_a_resized_embedding_is_a_whole_tensor_of_its_own_shape() -> None:
    saved = {**pair(Q), "base_model.model.model.embed_tokens.weight": (13, 6)}
    view = adapter_views(adapter(saved), BASE)["model.embed_tokens.weight"]
    assert (view.shape, view.low_rank, view.stands_alone) == ((13, 6), None, True)


@pytest.mark.parametrize("key", ["modules_to_save.default.weight", "modules_to_save.weight"])
def test_whole_modules_are_found_under_their_older_names(key: str) -> None:
    views = adapter_views(adapter({f"base_model.model.model.embed_tokens.{key}": (11, 6)}), BASE)
    assert list(views) == ["model.embed_tokens.weight"]


EMBEDDING = "model.embed_tokens"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{Q}.lora_A.weight": (2, 6)}, r"without its partner.*q_proj\.lora_A.*found lora_A\."),
        ({f"{Q}.lora_B.weight": (8, 2)}, r"without its partner.*found lora_B\."),
        (pair(Q, r=3), r"another rank.*rank 2, found A \[3, 6\] and B \[8, 3\]"),
        (pair(Q, n_in=7), r"not fit the base.*\[8, 6\], found shape \[8, 7\]"),
        (pair(Q) | {f"{Q}.lora_magnitude_vector": (8,)}, "unknown meaning.*magnitude"),
        (pair(Q) | {f"{Q}.lora_B.bias": (8,)}, r"unknown meaning.*lora_B\.bias"),
        (pair(Q) | pair(Q, name=".b"), "which it changes elsewhere too"),
        (pair(Q) | pair(Q.removeprefix("model.")), "which it changes elsewhere too"),
        (
            {f"{Q}.lora_A.weight": (2, 6), f"{Q.removeprefix('model.')}.lora_B.weight": (8, 2)},
            "which it changes elsewhere too",
        ),
        (pair("model.layers.9.q_proj"), "base does not have.*layers.9.*tie it"),
        ({"lm_head.weight": (11, 6)}, "base does not have.*lm_head.weight.*tie it"),
        ({f"{Q}.lora_A.weight": (2, 6, 1, 1), f"{Q}.lora_B.weight": (8, 2, 1, 1)}, "no linear"),
        ({f"{Q}.lora_A.weight": (2, 6), f"{Q}.lora_embedding_B": (8, 2)}, "without its partner"),
        (
            {f"{EMBEDDING}.lora_embedding_A": (2, 6), f"{EMBEDDING}.lora_embedding_B": (11, 2)},
            r"not fit the base.*\[11, 6\], found shape \[6, 11\]",
        ),
        (
            {
                f"{EMBEDDING}.lora_embedding_A": (2, 11),
                f"{EMBEDDING}.lora_embedding_B": (6, 2),
                f"{EMBEDDING}.base_layer.weight": (13, 6),
            },
            r"not fit its factors.*\[11, 6\], found shape \[13, 6\]",
        ),
        ({f"{EMBEDDING}.token_adapter.trainable_tokens_delta": (1, 6)}, "unknown meaning"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(tensors: Shapes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        adapter_views(adapter(tensors), BASE)


KEYS = st.builds(
    ".".join,
    st.tuples(
        st.sampled_from(["base_model.model", "model", "base_model.model.model"]),
        st.sampled_from(["layers.0.self_attn.q_proj", "embed_tokens", "q_proj", "lora_A"]),
        st.sampled_from(
            [
                "lora_A.weight",
                "lora_B.weight",
                "lora_B.default.weight",
                "lora_embedding_A",
                "lora_embedding_B",
                "base_layer.weight",
                "weight",
                "bias",
                "lora_A",
            ]
        ),
    ),
)


@settings(max_examples=examples(50), deadline=None)
@given(st.dictionaries(KEYS, st.sampled_from([(2, 6), (8, 2), (2, 11), (6, 2), (11, 6), (8, 6)])))
def test_every_tensor_is_used_once_or_the_adapter_is_refused(tensors: Shapes) -> None:
    try:
        views = adapter_views(adapter(tensors), BASE)
    except CheckpointError:
        return
    assert sorted(n for view in views.values() for n in used(view)) == sorted(tensors)
    assert set(views) <= set(BASE)
    assert all(v.low_rank is None or v.shape == BASE[n] for n, v in views.items())


def test_integer_factors_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"dtype without arithmetic.*found I8"):
        adapter_views(adapter(pair(Q), dtype="I8"), BASE)


def test_a_delta_checkpoint_gives_differences_that_need_the_base(tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray] = {
        "w": np.ones((2, 3), np.float32),
        "v": np.ones(4, np.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"mergepipe": "delta"})
    views = delta_views(open_checkpoint(str(tmp_path), "d"))
    assert {n: (v.dtype, v.shape) for n, v in views.items()} == {
        "w": ("F32", (2, 3)),
        "v": ("F16", (4,)),
    }
    assert all(v.is_delta and not v.stands_alone for v in views.values())
    np.testing.assert_array_equal(value(views["w"], tensors, 2 * tensors["w"]), 3 * tensors["w"])


def test_a_delta_of_integers_is_refused(tmp_path: Path) -> None:
    save_file({"n": np.ones(3, np.int32)}, tmp_path / "d.safetensors", {"mergepipe": "delta"})
    with pytest.raises(CheckpointError, match=r"delta holds a tensor of a dtype.*n.*found I32"):
        delta_views(open_checkpoint(str(tmp_path), "d"))
