"""Models and adapters with the names of other versions of transformers, and of wrapped modules.

The judges are transformers' own conversion mapping, peft's `merge_and_unload`, and sums in torch.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.domain.tensor_names import any_version
from mergepipe_pipeline.errors import CheckpointError, IncompatibleCheckpointsError
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.tools import extract_lora
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run, tensors
from tests.support.family import tensors_of, write_model

pytest.importorskip("peft")

Tensors = dict[str, torch.Tensor]
_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_ROPE = {"rope_type": "default", "type": "default", "mrope_section": [2, 3, 3]}
_QWEN_VISION = {"depth": 2, "num_heads": 2, "out_hidden_size": 32, "patch_size": 14}
#: Model types with what their tiny configs say.
FAMILIES: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": "clip_vision_model", **_VISION},
        "image_token_index": 90,
    },
    "gemma3": {
        "text_config": {"model_type": "gemma3_text", **_TEXT, "sliding_window": 8},
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
        "mm_tokens_per_image": 1,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **_TEXT},
        "vision_config": {"model_type": "pixtral", **_VISION, "head_dim": 8},
        "spatial_merge_size": 1,
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_scaling": _ROPE},
        "vision_config": {"hidden_size": 16, "intermediate_size": 24, **_QWEN_VISION},
    },
    "qwen2_vl": {
        "text_config": {**_TEXT, "rope_scaling": _ROPE},
        "vision_config": {
            "depth": 2,
            "num_heads": 2,
            "embed_dim": 16,
            "hidden_size": 32,
            "mlp_ratio": 2,
        },
    },
}
VERSIONS = ("new", "old", "hub")


def vision_model(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(kind, **FAMILIES[kind], tie_word_embeddings=False)
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config).float()


def tuned(values: Tensors, seed: int) -> Tensors:
    torch.manual_seed(seed)
    return {n: v + 0.01 * torch.randn(v.shape) for n, v in values.items()}


def written(folder: Path, values: Tensors, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    values = {n: v.clone().contiguous() for n, v in values.items()}
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Vision:
    """A tiny model, its fine-tunes a and b, each in the names of files (old) and of modules (new).

    `old_name` is transformers' own conversion: what it saves each tensor as. On the `hub` are files
    from before version 5, where towers of CLIP and SigLIP have one more part.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        self.model = vision_model(kind)
        self.config = {
            **self.model.config.to_dict(),
            "architectures": [type(self.model).__name__],
        }
        base: Tensors = {n: v.clone() for n, v in self.model.state_dict().items()}
        self.old_name: dict[str, str] = {}
        for name in base:
            (self.old_name[name],) = revert_weight_conversion(self.model, {name: base[name]})
        self.values = {"base": base, "a": tuned(base, 1), "b": tuned(base, 2)}
        self.paths = {}
        for model, values in self.values.items():
            for version in VERSIONS:
                out = folder / f"{model}_{version}"
                self.paths[model, version] = written(out, self.named(values, version), self.config)

    def named(self, values: Tensors, version: str) -> Tensors:
        if version == "new":
            return values
        tower = "vision_tower."
        if version == "hub" and self.config["model_type"] in ("llava", "gemma3"):
            return {
                self.old_name[n].replace(tower, f"{tower}vision_model."): v
                for n, v in values.items()
            }
        return {self.old_name[n]: v for n, v in values.items()}


@pytest.fixture(scope="module", params=FAMILIES)
def vision(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vision:
    return Vision(tmp_path_factory.mktemp(request.param), request.param)


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=name)


def test_names_of_files_and_of_modules_are_known_as_one(vision: Vision) -> None:
    new = [any_version(n) for n in vision.old_name]
    assert len(set(new)) == len(new)
    assert new == [any_version(n) for n in vision.old_name.values()]
    assert any(n != old for n, old in vision.old_name.items())


@pytest.mark.parametrize("version", VERSIONS)
def test_experts_of_both_versions_merge_into_a_base_of_either(
    home: Warehouse, vision: Vision, version: str
) -> None:
    base, a, b = (vision.values[m] for m in ("base", "a", "b"))
    text = (
        f"merge_method: task_arithmetic\nbase_model: {vision.paths['base', version]}\nmodels:\n"
        f"- {{model: {vision.paths['a', 'hub']}, parameters: {{weight: 0.5}}}}\n"
        f"- {{model: {vision.paths['b', 'new']}, parameters: {{weight: 0.25}}}}\n"
    )
    found = tensors(run(home, text).snapshot.path)
    expected = {n: v + 0.5 * (a[n] - v) + 0.25 * (b[n] - v) for n, v in base.items()}
    assert_equal(found, vision.named(expected, version))


@pytest.mark.parametrize("version", ["new", "old"])
def test_a_text_model_merges_into_the_language_side(
    home: Warehouse, vision: Vision, tmp_path: Path, version: str
) -> None:
    base, a = vision.values["base"], vision.values["a"]
    inner = "model.language_model."
    text_names = {n: n.replace(inner, "model.") for n in base if n.startswith((inner, "lm_head."))}
    config = {"architectures": ["LlamaForCausalLM"], **vision.config["text_config"]}
    expert = written(tmp_path / "text", {t: a[n] for n, t in text_names.items()}, config)
    text = (
        f"merge_method: linear\nbase_model: {vision.paths['base', version]}\nmodels:\n"
        f"- {{model: {vision.paths['base', version]}, parameters: {{weight: 0.25}}}}\n"
        f"- {{model: {expert}, parameters: {{weight: 0.75}}}}\n"
    )
    found = tensors(run(home, text).snapshot.path)
    expected = {n: 0.25 * v + 0.75 * a[n] if n in text_names else v for n, v in base.items()}
    assert_equal(found, vision.named(expected, version))


@pytest.fixture(scope="module")
def adapted(vision: Vision, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """An adapter of both sides, as peft saves it, and what peft merges it to."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("adapter")
    model = vision_model(vision.config["model_type"])
    torch.manual_seed(3)
    ends = ["q_proj", "qkv", "down_proj", "lm_head"]
    config = LoraConfig(r=2, lora_alpha=6, target_modules=ends, init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = get_peft_model(model, config)
        peft.save_pretrained(str(folder))
        return folder, dict(peft.merge_and_unload().state_dict())


def in_old_names(adapter: Path, target: Path, old_name: dict[str, str]) -> Path:
    """The adapter as an older peft saved it, around modules with the names of files."""
    modules = {n.rpartition(".")[0]: o.rpartition(".")[0] for n, o in old_name.items()}
    stem = "base_model.model."
    values = {}
    for name, value in load_file(adapter / "adapter_model.safetensors").items():
        own = name.removeprefix(stem)
        module = max((m for m in modules if own.startswith(f"{m}.")), key=len)
        values[f"{stem}{modules[module]}{own.removeprefix(module)}"] = value
    target.mkdir()
    shutil.copy(adapter / "adapter_config.json", target)
    save_file(values, target / "adapter_model.safetensors")
    return target


@pytest.mark.parametrize("version", ["new", "hub"])
@pytest.mark.parametrize("saved", ["new", "old"])
def test_an_adapter_of_either_version_changes_what_peft_changes(
    home: Warehouse,
    vision: Vision,
    adapted: tuple[Path, Tensors],
    tmp_path: Path,
    saved: str,
    version: str,
) -> None:
    adapter, merged = adapted
    if saved == "old":
        adapter = in_old_names(adapter, tmp_path / "old", vision.old_name)
    base = vision.paths["base", version]
    for text in (
        f"merge_method: passthrough\nmodels: [{{model: {base}+{adapter}}}]\ndtype: float32\n",
        f"merge_method: task_arithmetic\nbase_model: {base}\n"
        f"models: [{{model: {adapter}, parameters: {{weight: 1}}}}]\ndtype: float32\n",
    ):
        found = tensors(run(home, text).snapshot.path)
        assert_equal(found, vision.named(merged, version))


def test_experts_of_a_mixture_apart_in_old_names_merge_into_fused_ones_in_new_names(
    home: Warehouse, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    stem, n = "model.language_model.layers.0.", 3
    fused = {
        "model.language_model.embed_tokens.weight": torch.randn(12, 8),
        f"{stem}self_attn.q_proj.weight": torch.randn(8, 8),
        f"{stem}mlp.gate.weight": torch.randn(n, 8),
        f"{stem}mlp.experts.gate_up_proj": torch.randn(n, 12, 8),
        f"{stem}mlp.experts.down_proj": torch.randn(n, 8, 6),
        "model.language_model.norm.weight": torch.randn(8),
    }
    other = tuned(fused, 6)
    apart = {}
    for name, value in other.items():
        name = name.replace("model.language_model.", "language_model.model.")
        if not name.endswith(("gate_up_proj", "down_proj")):
            apart[name] = value
            continue
        for i, matrix in enumerate(value):
            head, _, kind = name.rpartition(".")
            halves = {"down_proj": matrix}
            if kind != "down_proj":
                halves = {"gate_proj": matrix[:6], "up_proj": matrix[6:]}
            apart |= {f"{head}.{i}.{half}.weight": m for half, m in halves.items()}
    base, expert = written(tmp_path / "base", fused, {}), written(tmp_path / "e", apart, {})
    text = (
        f"merge_method: task_arithmetic\nbase_model: {base}\n"
        f"models: [{{model: {expert}, parameters: {{weight: 1}}}}]\n"
    )
    assert_equal(tensors(run(home, text).snapshot.path), other)


#: How training wraps the names of a model's tensors.
WRAPPED: dict[str, Callable[[str], str]] = {
    "fsdp": lambda n: "_fsdp_wrapped_module." + n.replace("s.0.", "s.0._fsdp_wrapped_module."),
    "checkpointed": lambda n: n.replace(".mlp.", "._checkpoint_wrapped_module.mlp."),
    "compiled": lambda n: f"_orig_mod.{n}",
    "distributed": lambda n: f"module.{n}",
    "peft": lambda n: f"base_model.model.{n}",
    "several": lambda n: f"module._orig_mod.base_model.model.{n}",
}


@pytest.mark.parametrize("wrap", WRAPPED)
@pytest.mark.parametrize("which", ["base", "expert", "below an adapter"])
def test_names_of_wrapped_modules_are_read_as_the_modules_own(
    home: Warehouse, tmp_path: Path, wrap: str, which: str
) -> None:
    base, expert = (tensors_of(1, e, hidden=8, vocab=16, dtype=torch.float32) for e in (None, 0))
    wrapped = {
        k: {WRAPPED[wrap](n): v for n, v in t.items()} for k, t in (("b", base), ("e", expert))
    }
    b = write_model(
        tmp_path / "base", wrapped["b"] if which == "base" else base, hidden=8, vocab=16
    )
    values = expert if which == "base" else wrapped["e"]
    e = write_model(tmp_path / "e", values, hidden=8, vocab=16, shards=2)
    name, change = str(e), torch.zeros(8, 8)
    if which == "below an adapter":
        module, factor = "model.layers.1.self_attn.q_proj", torch.full((1, 8), 0.5)
        adapter = tmp_path / "lora"
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text(
            '{"peft_type": "LORA", "r": 1, "lora_alpha": 1}'
        )
        keys = {f"base_model.model.{WRAPPED[wrap](module + '.')}lora_{k}.weight" for k in "AB"}
        save_file(
            {k: factor if "lora_A" in k else factor.T.clone() for k in keys},
            adapter / "adapter_model.safetensors",
        )
        name, change = f"{e}+{adapter}", factor.T @ factor
    text = (
        f"merge_method: task_arithmetic\nbase_model: {b}\n"
        f"models: [{{model: {name}, parameters: {{weight: 0.5}}}}]\n"
    )
    found = tensors(run(home, text).snapshot.path)
    expert["model.layers.1.self_attn.q_proj.weight"] += change
    assert_equal(found, {n: v + 0.5 * (expert[n] - v) for n, v in base.items()})


def test_a_tensor_stored_wrapped_and_unwrapped_is_refused(home: Warehouse, tmp_path: Path) -> None:
    values = tensors_of(1, None, hidden=8, vocab=16)
    name = "model.norm.weight"
    path = write_model(tmp_path / "m", values | {f"module.{name}": values[name].clone()})
    with pytest.raises(CheckpointError, match=r"(?s)holds a tensor twice.*found.*module\.model"):
        register(home, path)


def test_two_versions_of_a_name_in_one_model_are_refused(home: Warehouse, tmp_path: Path) -> None:
    base = {f"model.language_model.layers.0.{n}.weight": torch.ones(4, 4) for n in "abc"}
    twice = {
        n.replace("model.language_model", v): t
        for n, t in base.items()
        for v in ("model", "language_model.model")
    }
    b, e = written(tmp_path / "b", base, {}), written(tmp_path / "e", twice, {})
    text = (
        f"merge_method: task_arithmetic\nbase_model: {b}\n"
        f"models: [{{model: {e}, parameters: {{weight: 1}}}}]\n"
    )
    with pytest.raises(IncompatibleCheckpointsError, match="may mean several tensors"):
        run(home, text)


def test_an_adapter_is_extracted_from_a_fine_tune_with_names_of_another_version(
    home: Warehouse, vision: Vision, tmp_path: Path
) -> None:
    base, a = vision.values["base"], vision.values["a"]
    paths = vision.paths["a", "new"], vision.paths["base", "old"]
    extract_lora(home, str(paths[0]), str(paths[1]), tmp_path / "lora", rank=64)
    name = f"{paths[1]}+{tmp_path / 'lora'}"
    found = tensors(
        run(home, f"merge_method: passthrough\nmodels: [{{model: {name}}}]\n").snapshot.path
    )
    changed = [n for n in base if n.endswith("proj.weight") and ".layers." in n]
    assert len(changed) >= 14
    for n in changed:
        torch.testing.assert_close(found[vision.old_name[n]], a[n], rtol=0, atol=1e-5, msg=n)
