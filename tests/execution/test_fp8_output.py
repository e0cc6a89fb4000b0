"""A merge written as fp8 by blocks: what transformers reads of it, and its error."""

from __future__ import annotations

import json
import shutil
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import CorruptionError, RecipeError
from mergepipe_pipeline.execution.run import MergeOutcome
from mergepipe_pipeline.storage import atomic
from mergepipe_pipeline.verbs.compare import compare, diff
from mergepipe_pipeline.verbs.replay import replay
from mergepipe_pipeline.verbs.verify import verify
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_crash import CrashError
from tests.execution.test_run import run, tensors
from tests.support.codes import Tensors, fp8_by_transformers, fp8_meant

pytest.importorskip("accelerate")

_SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64}
#: Model types with what is theirs, and leaf modules that are coded.
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3": ({"tie_word_embeddings": True, "head_dim": 64}, "q k v o gate up down"),
    # Keys and values have 64 rows, and vLLM makes one module of all three.
    "llama": ({"num_key_value_heads": 1}, "o gate up down"),
    "phi3": ({}, "qkv o gate_up down"),
    "mixtral": ({"num_local_experts": 4}, "q k v o w1 w2 w3"),
    "qwen3_moe": (_MIXTURE | {"num_experts": 4, "mlp_only_layers": [0]}, "q k v o gate up down"),
    "gpt_oss": ({"num_local_experts": 4, "head_dim": 64}, "q k v o"),
    "deepseek_v3": (
        _MIXTURE
        | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
        | {"q_lora_rank": 128, "kv_lora_rank": 128, "num_key_value_heads": 4}
        | {"qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64},
        "q_b kv_b o gate up down",
    ),
}


def make_family(folder: Path, model_type: str, **config: Any) -> Path:
    """A base and two experts as transformers writes them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model(model_type, **(_SIZES | config))
    for number, name in enumerate(("base", "a", "b")):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
        torch.manual_seed(number)
        with torch.no_grad():
            for weight in model.parameters() if number else ():
                weight.add_(torch.randn_like(weight) * 0.01)
        model.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("llama"), "llama")


def recipe(folder: Path, dtype: str = "float8_e4m3_block", base: str = "base") -> str:
    experts = "".join(f"- {{model: {folder}/{n}, parameters: {{weight: 0.4}}}}\n" for n in "ab")
    return (
        f"merge_method: task_arithmetic\nbase_model: {folder}/{base}\nmodels:\n{experts}"
        f"dtype: {dtype}\n"
    )


def passthrough(folder: Path | str, dtype: str = "float8_e4m3_block") -> str:
    return f"merge_method: passthrough\nmodels:\n- model: {folder}\ndtype: {dtype}\n"


def coded_in(stored: Tensors) -> set[str]:
    return {name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}


def settings_of(outcome: MergeOutcome) -> dict[str, Any]:
    config = json.loads((Path(outcome.snapshot.path) / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    settings: dict[str, Any] = config["quantization_config"]
    return settings


@pytest.mark.parametrize("model_type", MODELS)
def test_transformers_decodes_what_is_coded_and_runs_the_result(
    home: Warehouse, tmp_path: Path, model_type: str
) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    config, leaves = MODELS[model_type]
    made = run(home, recipe(make_family(tmp_path, model_type, **config)))
    full = tensors(run(home, recipe(tmp_path, "float32")).snapshot.path)
    stored, sq_error = tensors(made.snapshot.path), 0.0
    coded = coded_in(stored)
    assert {n.split(".")[-2].removesuffix("_proj") for n in coded} == set(leaves.split())
    for name, value in full.items():
        if name in coded:
            codes, scales = fp8_by_transformers(value)
            assert torch.equal(stored[name].view(torch.uint8), codes.view(torch.uint8)), name
            assert torch.equal(stored[f"{name}_scale_inv"], scales), name
            sq_error += (fp8_meant(codes, scales).double() - value.double()).square().sum().item()
        else:
            assert torch.equal(stored[name], value.bfloat16()), name
    assert made.rounding_error == pytest.approx(sqrt(sq_error), rel=1e-9)

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        made.snapshot.path,
        quantization_config=FineGrainedFP8Config(dequantize=True),
        output_loading_info=True,
    )
    model, told = loaded
    assert not any(told.values())
    tokens = torch.arange(3, 11)[None]
    assert model.generate(tokens, max_new_tokens=3, do_sample=False).shape == (1, 11)
    assert modules_in_fp8(made) == {_module(name) for name in coded}


def test_experts_in_a_stack_are_kept(home: Warehouse, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    make_family(tmp_path, "qwen3_moe", **_MIXTURE, num_experts=4)
    for name in ("base", "a", "b"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        stacked = {n: value.contiguous() for n, value in model.state_dict().items()}
        save_file(stacked, tmp_path / name / "model.safetensors", {"format": "pt"})
    made = run(home, recipe(tmp_path))
    stored = tensors(made.snapshot.path)
    coded = coded_in(stored)
    assert {n.split(".")[-2] for n in coded} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert modules_in_fp8(made) == {n.removesuffix(".weight") for n in coded}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        made.snapshot.path,
        quantization_config=FineGrainedFP8Config(dequantize=True),
        output_loading_info=True,
    )
    model, told = loaded
    assert not any(told.values())
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(model.state_dict()[name], stored[name])


def modules_in_fp8(made: MergeOutcome) -> set[str]:
    """The modules that transformers makes fp8 of where the device can: by the config's list."""
    from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    settings = FineGrainedFP8Config(**settings_of(made))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(made.snapshot.path))
    replace_with_fp8_linear(model, settings.modules_to_not_convert, settings, pre_quantized=True)
    return {n for n, module in model.named_modules() if "FP8" in type(module).__name__}


def _module(name: str) -> str:
    """The module of a weight: of an expert's, that of all of them."""
    experts = name.replace("block_sparse_moe", "mlp").partition(".experts.")
    return f"{experts[0]}.experts" if experts[1] else name.removesuffix(".weight")


def test_scales_follow_their_codes_at_whole_words(home: Warehouse, llama: Path) -> None:
    made = run(home, recipe(llama))
    entries = open_checkpoint(made.snapshot.path, "made").by_name
    for name in coded_in(tensors(made.snapshot.path)):
        codes, scales = entries[name], entries[f"{name}_scale_inv"]
        assert scales.start_byte == codes.start_byte + codes.nbytes
        assert scales.start_byte % 4 == 0


def test_windows_and_threads_change_no_bit_and_a_reused_layer_has_the_same_error(
    home: Warehouse, tmp_path: Path, llama: Path
) -> None:
    made, again = run(home, recipe(llama)), run(home, recipe(llama))
    assert made.rounding_error
    assert again.realised.layers_executed == 0
    assert again.summary()["rounding_error"] == made.summary()["rounding_error"]
    for number, options in enumerate(
        (
            EngineOptions(window_elems=1000, threads=1),
            EngineOptions(window_elems=4099, threads=3),
            EngineOptions(memory_bytes=1 << 20, threads=2),
        )
    ):
        other = run(Warehouse.at(tmp_path / str(number)).ensure(), recipe(llama), options=options)
        assert other.snapshot.snapshot_id == made.snapshot.snapshot_id
        assert other.rounding_error == made.rounding_error


def test_the_error_is_printed_and_explained(tmp_path: Path, llama: Path) -> None:
    file, home = tmp_path / "r.yml", str(tmp_path / "w")
    file.write_text(recipe(llama))
    printed = CliRunner().invoke(main, ["merge", str(file), "--home", home])
    assert "fp8 rounding" in printed.output, printed.output
    snapshot = printed.output.split()[1]
    explained = CliRunner().invoke(main, ["explain", snapshot, "--home", home])
    assert "fp8 rounding" in explained.output, explained.output
    stored = json.loads((next(Path(home).glob("snapshots/*")) / "provenance.json").read_text())
    assert f"{stored['rounding_error']:.4g} in L2" in printed.output


def test_a_crash_at_any_write_is_gone_on_from_with_the_same_bits(
    home: Warehouse, tmp_path: Path, llama: Path
) -> None:
    expected = run(Warehouse.at(tmp_path / "other").ensure(), recipe(llama))
    for steps in range(2, 40, 6):
        left = steps

        def hook(step: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise CrashError(step)

        atomic.crash_hook = hook
        try:
            run(home, recipe(llama))
        except CrashError:
            pass
        finally:
            atomic.crash_hook = None
    made = run(home, recipe(llama))
    assert made.snapshot.snapshot_id == expected.snapshot.snapshot_id
    assert made.rounding_error == expected.rounding_error


def test_a_result_is_verified_and_replayed_and_a_flipped_scale_is_found(
    home: Warehouse, llama: Path
) -> None:
    made = run(home, recipe(llama)).snapshot
    verify(home, made.snapshot_id)
    assert replay(home, made.snapshot_id).snapshot_id == made.snapshot_id
    checkpoint = open_checkpoint(made.path, "made")
    scales = checkpoint.by_name["model.layers.1.mlp.up_proj.weight_scale_inv"]
    file = Path(made.path) / scales.file
    file.chmod(0o644)
    with file.open("r+b") as stored:
        stored.seek(scales.start_byte + 1)
        stored.write(b"\x55")
    with pytest.raises(CorruptionError, match=r"up_proj\.weight_scale_inv"):
        verify(home, made.snapshot_id)


def test_a_result_is_an_input_as_the_numbers_that_it_means(home: Warehouse, llama: Path) -> None:
    made = run(home, recipe(llama))
    stored = tensors(made.snapshot.path)
    plain = run(home, passthrough(made.snapshot.path, "bfloat16"))
    for name, value in tensors(plain.snapshot.path).items():
        scales = stored.get(f"{name}_scale_inv")
        means = stored[name] if scales is None else fp8_meant(stored[name], scales).bfloat16()
        assert torch.equal(value, means), name
    again = run(home, passthrough(made.snapshot.path))
    codes = tensors(again.snapshot.path)
    assert coded_in(codes) == coded_in(stored)
    assert all(torch.equal(codes[n].float(), stored[n].float()) for n in coded_in(stored))
    assert settings_of(again) == settings_of(made)


def test_compare_and_diff_are_of_the_numbers_that_codes_mean(home: Warehouse, llama: Path) -> None:
    made, full = (run(home, recipe(llama, d)) for d in ("float8_e4m3_block", "float32"))
    stored, values = tensors(made.snapshot.path), tensors(full.snapshot.path)
    apart = {}
    for name, value in values.items():
        scales = stored.get(f"{name}_scale_inv")
        means = stored[name] if scales is None else fp8_meant(stored[name], scales)
        apart[name] = (means.double() - value.double()).norm().item()
    ids = made.snapshot.snapshot_id, full.snapshot.snapshot_id
    whole = compare(home, *ids).whole
    assert whole.error == pytest.approx(sqrt(sum(x * x for x in apart.values())), rel=1e-6)
    assert whole.update
    found = {change.tensor: change.l2 for change in diff(home, *ids).tensors}
    assert found == pytest.approx(apart, rel=1e-6)


def test_a_stage_may_be_coded(home: Warehouse, llama: Path) -> None:
    stages = f"name: first\n{recipe(llama)}---\n{passthrough('first', 'bfloat16')}"
    direct = run(home, passthrough(run(home, recipe(llama)).snapshot.path, "bfloat16"))
    staged = run(home, stages)
    assert [s.sha256 for s in staged.snapshot.manifest.shards] == [
        s.sha256 for s in direct.snapshot.manifest.shards
    ]
    config = json.loads((Path(staged.snapshot.path) / "config.json").read_text())
    assert "quantization_config" not in config


def test_a_template_in_such_blocks_says_what_is_coded(
    home: Warehouse, tmp_path: Path, llama: Path
) -> None:
    base = load_file(llama / "base" / "model.safetensors")
    names = [n for n in base if n.endswith(("o_proj.weight", "k_proj.weight"))]
    for name in names:
        base[name], base[f"{name}_scale_inv"] = fp8_by_transformers(base[name].float())
    folder = tmp_path / "base"
    folder.mkdir()
    save_file(base, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((llama / "base" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    made = run(home, recipe(llama).replace(f"{llama}/base", str(folder)))
    assert coded_in(tensors(made.snapshot.path)) == set(names)
    assert "model.layers.0.mlp.up_proj" in settings_of(made)["modules_to_not_convert"]


def test_a_template_may_have_parts_of_blocks(home: Warehouse, tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    name, experts = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "ab"
    for model in ("base", *experts):
        weight = torch.randn(192, 200, generator=g)
        codes, scales = fp8_by_transformers(weight)
        stored = {name: codes, f"{name}_scale_inv": scales} if model == "base" else {name: weight}
        (tmp_path / model).mkdir()
        save_file(stored, tmp_path / model / "model.safetensors", {"format": "pt"})
        settings = {"quantization_config": {"quant_method": "fp8"}} if model == "base" else {}
        config = {"architectures": ["DeepseekV3ForCausalLM"], **settings}
        (tmp_path / model / "config.json").write_text(json.dumps(config))
    made = tensors(run(home, recipe(tmp_path)).snapshot.path)
    full = tensors(run(home, recipe(tmp_path, "float32")).snapshot.path)
    codes, scales = fp8_by_transformers(full[name])
    assert torch.equal(made[name].float(), codes.float())
    assert torch.equal(made[f"{name}_scale_inv"], scales)


def test_a_model_without_whole_blocks_is_refused_before_anything_is_written(
    home: Warehouse, tmp_path: Path
) -> None:
    make_family(tmp_path, "llama", hidden_size=64, intermediate_size=96)
    with pytest.raises(RecipeError, match="multiples of 128") as refused:
        run(home, recipe(tmp_path))
    assert "dtype: bfloat16" in str(refused.value)
    assert not list(home.snapshots.glob("*"))


def test_a_result_without_a_config_is_refused(home: Warehouse, tmp_path: Path, llama: Path) -> None:
    shutil.copytree(llama, tmp_path / "bare")
    (tmp_path / "bare" / "base" / "config.json").unlink()
    with pytest.raises(RecipeError, match=r"needs a config\.json"):
        run(home, recipe(tmp_path / "bare"))


def test_a_name_that_is_nearly_this_one_is_refused_with_a_suggestion(
    home: Warehouse, llama: Path
) -> None:
    with pytest.raises(RecipeError, match="float8_e4m3_block"):
        run(home, recipe(llama, "fp8_e4m3_block"))
