"""Structure from tensor names, for the architectures that transformers writes."""

from __future__ import annotations

import pytest

from mergepipe_pipeline.domain.layers import (
    embedding_like,
    is_buffer,
    is_optional,
    is_post,
    layer_index,
    layer_name,
    layer_stack,
    stack_counts,
    tied_partner,
    with_layer_index,
)

# architecture: one tensor of layer 3, the vocabulary's input, a last tensor, its head if it has one
FAMILIES = {
    "llama": (
        "model.layers.3.mlp.up_proj.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    ),
    "phi": (
        "model.layers.3.self_attn.dense.bias",
        "model.embed_tokens.weight",
        "model.final_layernorm.bias",
        "lm_head.bias",
    ),
    "mixtral": (
        "model.layers.3.block_sparse_moe.experts.7.w1.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    ),
    "qwen_moe": (
        "model.layers.3.mlp.experts.59.up_proj.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    ),
    "gpt2": ("h.3.attn.c_attn.weight", "wte.weight", "ln_f.weight", None),
    "gpt2_lm": (
        "transformer.h.3.ln_1.bias",
        "transformer.wte.weight",
        "transformer.ln_f.weight",
        "lm_head.weight",
    ),
    "gpt_neox": (
        "gpt_neox.layers.3.attention.dense.weight",
        "gpt_neox.embed_in.weight",
        "gpt_neox.final_layer_norm.weight",
        "embed_out.weight",
    ),
    "falcon": (
        "transformer.h.3.self_attention.dense.weight",
        "transformer.word_embeddings.weight",
        "transformer.ln_f.bias",
        "lm_head.weight",
    ),
    "mamba": (
        "backbone.layers.3.mixer.A_log",
        "backbone.embeddings.weight",
        "backbone.norm_f.weight",
        "lm_head.weight",
    ),
    "bert": (
        "bert.encoder.layer.3.output.LayerNorm.weight",
        "bert.embeddings.word_embeddings.weight",
        "bert.pooler.dense.weight",
        "cls.predictions.decoder.weight",
    ),
    "t5": (
        "encoder.block.3.layer.0.SelfAttention.q.weight",
        "shared.weight",
        "encoder.final_layer_norm.weight",
        "lm_head.weight",
    ),
    "internlm2": (
        "model.layers.3.attention.wqkv.weight",
        "model.tok_embeddings.weight",
        "model.norm.weight",
        "output.weight",
    ),
    "chatglm": (
        "transformer.encoder.layers.3.mlp.dense_h_to_4h.weight",
        "transformer.embedding.word_embeddings.weight",
        "transformer.encoder.final_layernorm.weight",
        "transformer.output_layer.weight",
    ),
    "whisper": (
        "model.decoder.layers.3.fc1.weight",
        "model.decoder.embed_tokens.weight",
        "model.decoder.layer_norm.weight",
        "proj_out.weight",
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_architecture_has_layers_an_embedding_and_an_end(family: str) -> None:
    layer, embedding, last, head = FAMILIES[family]
    assert layer_index(layer) == 3
    assert not is_post(layer)
    assert layer_index(embedding) is None
    assert not is_post(embedding)
    assert embedding_like(embedding)
    assert is_post(last)
    assert not embedding_like(last)
    if head is not None:
        assert is_post(head)
        assert embedding_like(head)
        assert is_optional(head)


@pytest.mark.parametrize("family", [f for f, names in FAMILIES.items() if names[3]])
def test_the_embedding_and_the_head_of_each_architecture_stand_for_each_other(family: str) -> None:
    _, embedding, last, head = FAMILIES[family]
    if head is None or not head.endswith(".weight"):
        return
    assert tied_partner(head, [last, embedding]) == embedding
    assert tied_partner(embedding, [last, head]) == head
    assert tied_partner(head, [last]) is None
    assert tied_partner(last, [embedding, head]) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_gets_another_number_and_nothing_else_does(family: str) -> None:
    layer, embedding, _, _ = FAMILIES[family]
    moved = with_layer_index(layer, 41)
    assert layer_index(moved) == 41
    assert layer_stack(moved) == layer_stack(layer)
    assert with_layer_index(moved, 3) == layer
    assert with_layer_index(embedding, 41) == embedding


def test_each_stack_has_its_own_count() -> None:
    names = [
        "model.visual.blocks.4.attn.qkv.weight",
        "model.language_model.layers.0.mlp.up.weight",
        "model.language_model.layers.9.mlp.up.weight",
        "model.visual.merger.mlp.0.weight",
        "lm_head.weight",
    ]
    assert stack_counts(names) == {"model.visual.blocks.": 5, "model.language_model.layers.": 10}


@pytest.mark.parametrize(
    "name",
    [
        "transformer.wpe.weight",
        "bert.embeddings.position_embeddings.weight",
        "bert.embeddings.token_type_embeddings.weight",
        "bert.embeddings.LayerNorm.weight",
        "model.embed_positions.weight",
        "visual.patch_embed.proj.weight",
        "backbone.layers.0.embeddings.weight",
        "model.layers.0.mlp.shared.up.weight",
    ],
)
def test_what_only_looks_like_a_vocabulary_is_none(name: str) -> None:
    assert not embedding_like(name)
    assert not is_post(name)


def test_t5_shares_one_matrix_between_both_embeddings() -> None:
    assert tied_partner("encoder.embed_tokens.weight", ["shared.weight"]) == "shared.weight"


def test_layers_sort_between_embed_and_head() -> None:
    assert layer_name("model.layers.3.x.weight", 12) == "layer.03"
    assert layer_name("model.layers.3.x.weight", 120) == "layer.003"
    assert layer_name("model.embed_tokens.weight", 12) == "embed"
    assert layer_name("model.norm.weight", 12) == "head"


@pytest.mark.parametrize(
    "name",
    [
        "gpt_neox.layers.0.attention.bias",
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq",
        "transformer.h.0.attn.attention.bias",
        "transformer.h.0.attn.causal_mask",
        "transformer.h.0.attn.masked_bias",
        "h.0.attn.bias",
    ],
)
def test_masks_and_frequencies_that_old_files_store_are_buffers(name: str) -> None:
    assert is_buffer(name)
    assert not is_buffer("model.layers.0.self_attn.q_proj.bias")
    assert not is_buffer("encoder.layer.0.attention.output.dense.bias")
