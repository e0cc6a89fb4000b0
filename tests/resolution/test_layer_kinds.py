"""Layers of one model in another order compute what they did: as transformers' own, reordered."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mergepipe_pipeline.errors import IncompatibleCheckpointsError
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import foreseen, resolve
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run

pytest.importorskip("transformers")
N = 6
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": N,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
HEADS = {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOW = {"sliding_window": 4}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 2,
}
MAMBA = {"mamba_d_state": 4, "mamba_d_conv": 2, "mamba_expand": 2}
PRUNED, TURNED = [0, 1, 3, 4, 5], [3, 4, 5, 0, 1, 1, 2]
#: A model's type, its numbers, and the keys that its config on the hub does not have.
MODELS: dict[str, tuple[str, Mapping[str, Any], tuple[str, ...]]] = {
    "bamba": (
        "bamba",
        {
            "attn_layer_indices": [1, 4],
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 4,
            "mamba_chunk_size": 8,
        },
        (),
    ),
    "cohere2": ("cohere2", WINDOW | {"sliding_window_pattern": 3}, ("layer_types",)),
    "deepseek": ("deepseek_v3", LATENT | {"first_k_dense_replace": 2}, ()),
    "ernie": ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}, ()),
    "gemma2": ("gemma2", HEADS | WINDOW, ("layer_types",)),
    "gemma3": ("gemma3_text", HEADS | WINDOW | {"sliding_window_pattern": 3}, ("layer_types",)),
    "gemma3_stored": ("gemma3_text", HEADS | WINDOW | {"sliding_window_pattern": 3}, ()),
    "glm4_moe": (
        "glm4_moe",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 2,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 8,
        },
        (),
    ),
    "granite_hybrid": (
        "granitemoehybrid",
        {
            "layer_types": ["mamba", "attention", "mamba"] * 2,
            "num_local_experts": 0,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 4,
            "shared_intermediate_size": 32,
            "mamba_chunk_size": 8,
        },
        (),
    ),
    "granite_swa": ("granite_swa", WINDOW, ("layer_types",)),
    "jamba": (
        "jamba",
        MAMBA
        | {
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "num_experts": 4,
            "use_mamba_kernels": False,
            "mamba_dt_rank": 4,
        },
        (),
    ),
    "llama4": (
        "llama4_text",
        {
            "no_rope_layer_interval": 2,
            "interleave_moe_layer_step": 3,
            "num_local_experts": 2,
            "attention_chunk_size": 4,
            "intermediate_size_mlp": 32,
            "head_dim": 8,
        },
        ("layer_types", "no_rope_layers", "moe_layers"),
    ),
    "olmo3": ("olmo3", WINDOW, ("layer_types",)),
    "qwen2": (
        "qwen2",
        WINDOW | {"use_sliding_window": True, "max_window_layers": 3},
        ("layer_types",),
    ),
    "qwen3": (
        "qwen3",
        HEADS | WINDOW | {"use_sliding_window": True, "max_window_layers": 2},
        ("layer_types",),
    ),
    "qwen2_moe": (
        "qwen2_moe",
        EXPERTS | {"mlp_only_layers": [1, 4], "shared_expert_intermediate_size": 16},
        ("layer_types",),
    ),
    "qwen3_moe": ("qwen3_moe", HEADS | EXPERTS | {"mlp_only_layers": [1, 4]}, ()),
    "qwen3_moe_step": ("qwen3_moe", HEADS | EXPERTS | {"decoder_sparse_step": 2}, ()),
    "qwen3_next": (
        "qwen3_next",
        {
            **(HEADS | EXPERTS | LINEAR),
            "full_attention_interval": 3,
            "shared_expert_intermediate_size": 16,
        },
        ("layer_types",),
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}, ()),
    "smollm3_hub": ("smollm3", {"no_rope_layer_interval": 2}, ("no_rope_layers", "layer_types")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kinds")


def write(folder: Path, name: str, **more: Any) -> Path:
    """A model of random weights in `folder`, once, with the config that its hub has."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    model_type, numbers, dropped = MODELS[name]
    path = folder / name
    if not path.exists():
        torch.manual_seed(3)
        config = CONFIG_MAPPING[model_type](**{**SIZES, **numbers, **more})
        AutoModelForCausalLM.from_config(config).float().save_pretrained(path)
        stored = json.loads((path / "config.json").read_text()) | dict(numbers)
        stored = {key: value for key, value in stored.items() if key not in dropped}
        (path / "config.json").write_text(json.dumps(stored))
    return path


def stacked(path: Path, order: Sequence[int]) -> str:
    """A recipe of a model's layers in an order, a slice each."""
    parts = [f"  - sources: [{{model: {path}, layer_range: [{i}, {i + 1}]}}]\n" for i in order]
    return "merge_method: passthrough\nslices:\n" + "".join(parts)


def loaded(path: Path | str) -> Any:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model, info = auto.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(24).reshape(1, 24) * 7 % 60 + 3
    with torch.no_grad():
        out: torch.Tensor = model(ids, use_cache=False).logits
    return out


def reordered(path: Path, order: Sequence[int]) -> torch.Tensor:
    """Logits of a model whose own layers are put into another order after it was made."""
    model = loaded(path)
    model.model.layers = torch.nn.ModuleList([copy.deepcopy(model.model.layers[i]) for i in order])
    for place, layer in enumerate(model.model.layers):
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = place
    config = model.config
    for key in ("layer_types", "layers_block_type", "layer_rope_theta"):
        kinds = vars(config).get(key)
        if kinds:
            object.__setattr__(config, key, [kinds[i] for i in order])
    if chosen := vars(config).get("attn_layer_indices"):
        config.attn_layer_indices = [place for place, i in enumerate(order) if i in chosen]
    object.__setattr__(config, "num_hidden_layers", len(order))
    return logits(model)


#: Orders that no config of a class can say, with what they would have to keep.
UNSAYABLE = {
    ("deepseek", "turned"): r"the dense layers \(the first `first_k_dense_replace`\) in front",
    ("ernie", "turned"): "layers with experts in a row",
    ("glm4_moe", "turned"): r"the dense layers \(the first `first_k_dense_replace`\) in front",
    ("jamba", "pruned"): r"one distance \(`expert_layer_period`\) between such layers",
    ("jamba", "turned"): r"one distance \(`attn_layer_period`\) between such layers",
}


@pytest.mark.parametrize("what", ["pruned", "turned"])
@pytest.mark.parametrize("name", MODELS)
def test_layers_in_another_order_are_the_same_layers_or_are_refused(
    home: Warehouse, folder: Path, name: str, what: str
) -> None:
    order = PRUNED if what == "pruned" else TURNED
    source = write(folder, name)
    if (name, what) in UNSAYABLE:
        with pytest.raises(IncompatibleCheckpointsError, match=UNSAYABLE[name, what]):
            resolve(home, parse(stacked(source, order), name="t", where="t"))
        return
    assert_reordered(home, source, order)


@pytest.mark.parametrize(
    ("name", "order", "said"),
    [
        ("deepseek", [1, 2, 3, 5], {"first_k_dense_replace": 1}),
        ("deepseek", [3, 2, 4], {"first_k_dense_replace": 0}),
        ("deepseek", [0, 1, 1, 2], {"first_k_dense_replace": 3}),
        ("jamba", [3, 4, 5, 0, 1, 2], {"expert_layer_offset": 0, "attn_layer_offset": 1}),
        ("jamba", [0, 1, 2], {"attn_layer_offset": 1, "expert_layer_offset": 1}),
        ("ernie", [2, 3, 5], {"moe_layer_start_index": 0}),
        ("qwen3_moe_step", [0, 1, 2, 3], {"decoder_sparse_step": 2, "mlp_only_layers": []}),
        ("gemma2", [0, 1, 2, 3], {"layer_types": None}),
    ],
)
def test_a_number_that_says_the_order_is_kept_or_found(
    home: Warehouse, folder: Path, name: str, order: list[int], said: dict[str, Any]
) -> None:
    config = assert_reordered(home, write(folder, name), order)
    assert {key: config.get(key) for key in said} == said


def assert_reordered(home: Warehouse, source: Path, order: list[int]) -> dict[str, Any]:
    """Compare a merge with the reordered model, and return its config."""
    result = Path(run(home, stacked(source, order)).snapshot.path)
    expected = reordered(source, order)
    assert float(expected.std()) > 0
    assert float((logits(loaded(result)) - expected).abs().max()) <= 1e-6
    config: dict[str, Any] = json.loads((result / "config.json").read_text())
    return config


def plain(folder: Path, **config: Any) -> Path:
    """A model of one vector per layer with this config."""
    folder.mkdir()
    part = config.get("text_config", config)
    stack = "language_model.model.layers" if "text_config" in config else "model.layers"
    values = {
        f"{stack}.{i}.norm.weight": torch.full((4,), float(i))
        for i in range(part["num_hidden_layers"])
    }
    save_file(values, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config_of(home: Warehouse, text: str) -> dict[str, Any]:
    """The config that a recipe's result will have."""
    resolved = resolve(home, parse(text, name="t", where="t"))
    stage = foreseen(resolved.recipe, resolved.models, resolved.side)
    config: dict[str, Any] = json.loads(stage.config or "{}")
    return config


@pytest.mark.parametrize(
    ("config", "topic"),
    [
        ({"model_type": "gemma3n_text"}, "all layers at their places"),
        ({"model_type": "gemma4_text", "num_kv_shared_layers": 2}, "all layers at their places"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "every layer at its"),
        ({"model_type": "diffllama"}, "every layer at its place"),
        ({"model_type": "modernbert"}, "the first layer at its place"),
        (
            {"model_type": "gemma4_text", "layer_types": ["s", "full_attention"] * 2},
            "at the end",
        ),
        ({"model_type": "kolibri1"}, "save it again: it then lists `layer_types`"),
        ({"model_type": "kimi_k2", "first_k_dense_replace": 1}, "take the key out of config.json"),
        ({"sliding_window_pattern": 6}, "take the key out of config.json"),
        ({"max_window_layers": 2, "use_sliding_window": True}, "take the key out of config.json"),
    ],
)
def test_what_no_config_says_of_moved_layers_is_refused_with_a_step(
    home: Warehouse, tmp_path: Path, config: dict[str, Any], topic: str
) -> None:
    source = plain(tmp_path / "a", num_hidden_layers=4, **config)
    with pytest.raises(IncompatibleCheckpointsError, match=topic):
        resolve(home, parse(stacked(source, [3, 1, 0, 2]), name="t", where="t"))
    kept = config_of(home, stacked(source, [0, 1, 2, 3]))
    assert kept == {"num_hidden_layers": 4, **config}


def test_every_list_with_an_entry_per_layer_follows_and_no_other(
    home: Warehouse, tmp_path: Path
) -> None:
    stated = {
        "num_hidden_layers": 4,
        "num_kv_heads": [1, 2, 3, 4],
        "ffn_multipliers": [0.5, 1.0, 1.5, 2.0],
        "block_configs": [{"n": i, "skips": None} for i in range(4)],
        "hybrid_override_pattern": "M*-E",
        "per_layer_config": {"0": {"head_dim": 8}, "3": {"head_dim": [1, 2]}},
        "attn_layer_indices": [1, 3],
        "eos_token_id": [1, 2, 3, 4],
        "architectures": ["A", "B", "C", "D"],
        "layer_scale": 4,
    }
    config = config_of(home, stacked(plain(tmp_path / "a", **stated), [3, 3, 0, 1, 2]))
    assert config == {
        **{key: stated[key] for key in ("eos_token_id", "architectures", "layer_scale")},
        "num_hidden_layers": 5,
        "num_kv_heads": [4, 4, 1, 2, 3],
        "ffn_multipliers": [2.0, 2.0, 0.5, 1.0, 1.5],
        "block_configs": [{"n": i, "skips": None} for i in (3, 3, 0, 1, 2)],
        "hybrid_override_pattern": "EEM*-",
        "per_layer_config": {
            "0": {"head_dim": [1, 2]},
            "1": {"head_dim": [1, 2]},
            "2": {"head_dim": 8},
        },
        "attn_layer_indices": [0, 1, 3],
    }


def test_layers_of_several_models_are_what_each_model_says(home: Warehouse, tmp_path: Path) -> None:
    windows = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4}
    a = plain(tmp_path / "a", num_hidden_layers=4, max_window_layers=2, **windows)
    b = plain(tmp_path / "b", num_hidden_layers=3, max_window_layers=0, **windows)
    text = stacked(a, [0, 3]) + stacked(b, [1]).split("slices:\n")[1]
    full, sliding = "full_attention", "sliding_attention"
    assert config_of(home, text)["layer_types"] == [full, sliding, sliding]
    text = stacked(b, [1]) + stacked(a, [0, 1, 2]).split("slices:\n")[1]
    assert config_of(home, text)["layer_types"] == [sliding, full, full, sliding]


@pytest.mark.parametrize("method", ["passthrough", "linear"])
def test_layers_are_what_their_source_says_and_not_the_model_that_gives_the_config(
    home: Warehouse, tmp_path: Path, method: str
) -> None:
    windows = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4}
    a = plain(tmp_path / "a", num_hidden_layers=4, max_window_layers=2, **windows)
    b = plain(tmp_path / "b", num_hidden_layers=4, max_window_layers=4, **windows)
    text = stacked(a, [3, 0, 1, 2]).replace("passthrough", f"{method}\nbase_model: {b}")
    text = text.replace("]}", "], parameters: {weight: 1}}") if method == "linear" else text
    full, sliding = "full_attention", "sliding_attention"
    assert config_of(home, text)["layer_types"] == [sliding, full, full, sliding]


def test_a_base_that_gives_the_config_gives_no_kinds_to_layers_of_another_model(
    home: Warehouse, folder: Path, tmp_path: Path
) -> None:
    source, base = write(folder, "qwen2"), write(tmp_path, "qwen2")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"max_window_layers": N}))
    text = stacked(source, TURNED).replace("passthrough", f"passthrough\nbase_model: {base}")
    result = loaded(run(home, text).snapshot.path)
    assert float((logits(result) - reordered(source, TURNED)).abs().max()) <= 1e-6


def other_class(folder: Path, name: str, of: str, **numbers: Any) -> Path:
    """A model of random weights of a class that is not among `MODELS`."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[of](**{**SIZES, **numbers})
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder / name)
    return folder / name


def test_a_dense_layer_among_layers_with_experts_is_said_to_be_dense(
    home: Warehouse, folder: Path, tmp_path: Path
) -> None:
    sparse = other_class(tmp_path, "sparse", "qwen3_moe", **(HEADS | EXPERTS))
    dense = other_class(tmp_path, "dense", "qwen3", **HEADS)
    text = stacked(sparse, [0, 1]) + stacked(dense, [2]).split("slices:\n")[1]
    result = Path(run(home, text).snapshot.path)
    assert json.loads((result / "config.json").read_text())["mlp_only_layers"] == [2]
    made, taken, kept = (loaded(p).model.layers for p in (result, dense, sparse))
    for layer, source in ((made[2], taken[2]), (made[1], kept[1])):
        states = layer.state_dict(), source.state_dict()
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_dense_layer_is_refused_where_no_config_says_that_it_is(
    home: Warehouse, tmp_path: Path
) -> None:
    sparse = other_class(tmp_path, "sparse", "olmoe", num_experts=4, num_experts_per_tok=2)
    dense = other_class(tmp_path, "dense", "llama")
    text = stacked(sparse, [0, 1]) + stacked(dense, [2]).split("slices:\n")[1]
    with pytest.raises(IncompatibleCheckpointsError, match=r"dense, tensor model\.layers\.2\.mlp"):
        config_of(home, text)


@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "slerp"])
@pytest.mark.parametrize("kind", ["windows", "experts", "listed"])
def test_layers_of_two_kinds_are_not_merged_into_one(
    home: Warehouse, tmp_path: Path, method: str, kind: str
) -> None:
    configs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "windows": (
            {"model_type": "gemma2"},
            {"model_type": "gemma2", "layer_types": ["sliding_attention", "full_attention"] * 2},
        ),
        "experts": (
            {"model_type": "deepseek_v3", "first_k_dense_replace": 1},
            {"model_type": "deepseek_v3", "first_k_dense_replace": 1},
        ),
        "listed": ({"layer_types": ["x", "y", "x", "y"]}, {"layer_types": ["x", "y", "x", "y"]}),
    }
    of_a, of_b = configs[kind]
    a = plain(tmp_path / "a", num_hidden_layers=4, **of_a)
    b = plain(tmp_path / "b", num_hidden_layers=4, **of_b)

    def text(starts: tuple[int, int]) -> str:
        sources = "".join(
            f"    - {{model: {m}, layer_range: [{i}, {i + 2}], parameters: {{weight: 1}}}}\n"
            for m, i in zip((a, b), starts, strict=True)
        )
        base = "" if method == "linear" else f"base_model: {a}\nparameters: {{t: 0.5}}\n"
        return f"merge_method: {method}\n{base}slices:\n  - sources:\n{sources}"

    config_of(home, text((2, 2)))
    with pytest.raises(IncompatibleCheckpointsError, match=r"as layer \d of b\. .*one kind meet"):
        config_of(home, text((0, 1)))


def test_lists_that_only_one_of_two_models_has_are_refused(home: Warehouse, tmp_path: Path) -> None:
    a = plain(tmp_path / "a", num_hidden_layers=4, num_kv_heads=[1, 2, 3, 4])
    b = plain(tmp_path / "b", num_hidden_layers=4)
    text = stacked(a, [0, 1]) + stacked(b, [1, 2]).split("slices:\n")[1]
    with pytest.raises(IncompatibleCheckpointsError, match=r"b, config\.json does not list"):
        resolve(home, parse(text, name="t", where="t"))


def test_the_text_part_of_a_model_that_sees_is_what_slices_change(
    home: Warehouse, tmp_path: Path
) -> None:
    text = {"num_hidden_layers": 4, "sliding_window_pattern": 2}
    stated = {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"depths": [1, 2, 3, 4]},
    }
    config = config_of(home, stacked(plain(tmp_path / "a", **stated), [1, 3, 0]))
    kinds = ["full_attention", "full_attention", "sliding_attention"]
    assert config["text_config"] == text | {"num_hidden_layers": 3, "layer_types": kinds}
    assert config["vision_config"] == stated["vision_config"]


def test_a_depth_in_a_part_that_is_not_known_is_refused(home: Warehouse, tmp_path: Path) -> None:
    source = plain(tmp_path / "a", num_hidden_layers=4)
    stated = {"model_type": "mine", "llm_config": {"num_hidden_layers": 4}}
    (source / "config.json").write_text(json.dumps(stated))
    with pytest.raises(IncompatibleCheckpointsError, match="parts llm_config"):
        resolve(home, parse(stacked(source, [0, 1, 3]), name="t", where="t"))
    assert config_of(home, stacked(source, [3, 2, 1, 0])) == stated
