"""Codes and factors are copied, and never computed with, in every verb that computes.

Each form is written from its definition; where a merge is right, its numbers are torch's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mergepipe_pipeline.errors import IncompatibleCheckpointsError, MergePipeError
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import resolve
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.verbs.conflicts import conflicts
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.tools import extract_lora, moe, transplant_tokenizer
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run, tensors
from tests.support.family import tensors_of, write_adapter, write_model

Tensors = dict[str, torch.Tensor]
FP8 = {"quant_method": "fp8", "weight_block_size": [64, 64]}


def fp8(scale: str) -> Callable[[str, torch.Tensor], Tensors]:
    """Codes of e4m3 with one float32 scale, which is called so."""

    def codes(module: str, w: torch.Tensor) -> Tensors:
        factor = w.float().abs().max() / 448
        return {
            f"{module}.weight": (w.float() / factor).to(torch.float8_e4m3fn),
            f"{module}.{scale}": factor.reshape(1, 1),
        }

    return codes


def integers(names: dict[str, torch.dtype]) -> Callable[[str, torch.Tensor], Tensors]:
    """Tensors of these names and types behind a module, as packers leave them."""

    def codes(module: str, w: torch.Tensor) -> Tensors:
        g = torch.Generator().manual_seed(w.numel())
        return {
            f"{module}.{name}": torch.randint(1, 100, (4, 8), generator=g).to(dtype)
            for name, dtype in names.items()
        }

    return codes


I32, U8, F16 = torch.int32, torch.uint8, torch.float16
FORMS: dict[str, tuple[str, Callable[[str, torch.Tensor], Tensors], dict[str, Any]]] = {
    "fp8 block": ("fp8 in blocks", fp8("weight_scale_inv"), {"quantization_config": FP8}),
    "fp8 silent": ("fp8 with scales", fp8("weight_scale"), {}),
    "fp8 scale_weight": ("fp8 with scales", fp8("scale_weight"), {}),
    "fp8 scale": ("fp8 with scales", fp8("scale"), {}),
    "gptq": (
        "GPTQ",
        integers({"qweight": I32, "qzeros": I32, "scales": F16, "g_idx": I32}),
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    ),
    "awq": (
        "AWQ",
        integers({"qweight": I32, "qzeros": I32, "scales": F16}),
        {"quantization_config": {"quant_method": "awq"}},
    ),
    "bitsandbytes 4 bit": (
        "bitsandbytes",
        integers(
            {
                "weight": U8,
                "weight.absmax": torch.float32,
                "weight.quant_map": torch.float32,
                "weight.quant_state.bitsandbytes__nf4": U8,
            }
        ),
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    ),
    "bitsandbytes 8 bit": (
        "bitsandbytes",
        integers({"weight": torch.int8, "SCB": torch.float32, "weight_format": U8}),
        {},
    ),
    "compressed-tensors": (
        "compressed-tensors (pack-quantized)",
        integers({"weight_packed": I32, "weight_scale": F16, "weight_shape": torch.int64}),
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
    ),
    "nvfp4": (
        "NVFP4",
        integers(
            {
                "weight": U8,
                "weight_scale": torch.float8_e4m3fn,
                "weight_scale_2": torch.float32,
                "input_scale": torch.float32,
            }
        ),
        {},
    ),
    "mlx": (
        "MLX's quantisation",
        integers({"weight": torch.uint32, "scales": F16, "biases": F16}),
        {"quantization": {"group_size": 64, "bits": 4}},
    ),
    "rounded in place": (
        "compressed-tensors (int-quantized)",
        lambda module, w: {
            f"{module}.weight": w,
            f"{module}.weight_scale": torch.ones(1, dtype=w.dtype),
        },
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "int-quantized"}},
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, an expert `plain`, an adapter on q_proj, and base and expert in every form."""
    folder = tmp_path_factory.mktemp("forms")
    write_model(folder / "base", tensors_of(0, None))
    write_model(folder / "plain", tensors_of(0, 0))
    write_adapter(folder / "adapter", 1)
    for form in FORMS:
        for number, which in enumerate(("base", "expert")):
            write_form(folder / form / which, form, tensors_of(0, number or None))
    return folder


def write_form(folder: Path, form: str, values: Tensors) -> None:
    _, codes, settings = FORMS[form]
    stored: Tensors = {}
    for name, value in values.items():
        is_linear = name.endswith("_proj.weight")
        stored |= codes(name.removesuffix(".weight"), value) if is_linear else {name: value}
    write_model(folder, stored)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def merged(method: str, *models: Path, base: Path | None = None, extra: str = "") -> str:
    lines = [f"merge_method: {method}", *([f"base_model: {base}"] if base else []), "models:"]
    lines += [f"- {{model: {m}, parameters: {{weight: 0.5}}}}" for m in models]
    return "\n".join([*lines, extra, ""])


#: The others are decoded: `test_decoded`.
REFUSED = [form for form in FORMS if form != "fp8 block"]


@pytest.mark.parametrize("form", REFUSED)
def test_arithmetic_on_codes_is_refused_with_the_name_of_their_form(
    home: Warehouse, models: Path, form: str
) -> None:
    base, plain, coded = models / "base", models / "plain", models / form / "expert"
    coded_base, adapter = models / form / "base", models / "adapter"
    recipes = [
        merged("task_arithmetic", coded, plain, base=base),
        merged("task_arithmetic", coded, base=coded_base),
        merged("ties", plain, base=coded_base),
        merged("linear", coded, plain),
        merged("linear", coded, coded_base, extra="dtype: bfloat16"),
        merged("linear", coded),
        merged("task_arithmetic", adapter, base=coded_base),
        f"merge_method: passthrough\nmodels: [{{model: {coded_base}+{adapter}}}]\n",
        merged("linear", Path(f"{coded_base}+{adapter}"), plain),
        f"merge_method: passthrough\nmodels: [{{model: {coded}, parameters: {{scale: 0.5}}}}]\n",
    ]
    for text in recipes:
        said = re.escape(f"stored as {FORMS[form][0]}, which a merge only copies")
        with pytest.raises(IncompatibleCheckpointsError, match=said) as error:
            resolve(home, parse(text, name="t", where="t"))
        assert "merge the model that it was made from" in (error.value.next_step or "")


@pytest.mark.parametrize("form", FORMS)
def test_plain_copies_of_codes_pass_byte_for_byte(home: Warehouse, models: Path, form: str) -> None:
    coded = models / form / "expert"
    text = (
        "merge_method: passthrough\nslices:\n"
        f"- sources: [{{model: {coded}, layer_range: [0, 1]}}]\n"
        f"- sources: [{{model: {coded}, layer_range: [1, 2]}}]\n"
    )
    copy = run(home, text).snapshot.path
    ours, theirs = tensors(copy), tensors(coded)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert torch.equal(ours[name].view(U8), value.view(U8)), name
    config = json.loads((Path(copy) / "config.json").read_text())
    settings = FORMS[form][2]
    assert config | settings == config


@pytest.mark.parametrize("form", ["gptq", "bitsandbytes 4 bit", "mlx"])
def test_no_verb_that_computes_takes_codes(
    home: Warehouse, models: Path, tmp_path: Path, form: str
) -> None:
    base, coded = models / form / "base", models / form / "expert"
    assert register(home, base, "coded-base").checkpoint.form is not None
    register(home, coded, "coded", base="coded-base")
    register(home, models / "base", "base")
    mixture = tmp_path / "moe.yml"
    mixture.write_text(
        f"base_model: {models / 'base'}\ngate_mode: random\nexperts:\n"
        f"- {{source_model: {coded}}}\n- {{source_model: {models / 'plain'}}}\n"
    )
    text = merged("task_arithmetic", coded, models / "plain", base=models / "base")
    calls: list[Callable[[], object]] = [
        lambda: analyze(home, ["coded"]),
        lambda: analyze(home, ["coded"], base="base"),
        lambda: pack(home, ["coded"]),
        lambda: extract_lora(home, str(coded), str(models / "base"), tmp_path / "lora"),
        lambda: extract_lora(home, str(models / "plain"), str(base), tmp_path / "lora"),
        lambda: moe(home, mixture, tmp_path / "moe"),
        lambda: conflicts(home, parse(text, name="t", where="t")),
    ]
    for call in calls:
        with pytest.raises(MergePipeError, match=re.escape(f"stored as {FORMS[form][0]}")):
            call()
    assert not (tmp_path / "lora").exists()
    assert not (tmp_path / "moe").exists()


def test_a_tokenizer_is_transplanted_onto_a_model_whose_embedding_is_no_code(
    home: Warehouse, models: Path, tmp_path: Path
) -> None:
    coded = models / "fp8 block" / "expert"
    transplant_tokenizer(home, str(coded), str(models / "plain"), tmp_path / "out")
    ours, theirs = tensors(tmp_path / "out"), tensors(coded)
    assert all(torch.equal(ours[n].view(U8), v.view(U8)) for n, v in theirs.items())


def test_codes_are_never_rounded_to_the_type_of_a_recipe(home: Warehouse, models: Path) -> None:
    text = f"merge_method: passthrough\nmodels: [{{model: {models / 'gptq' / 'base'}}}]\n"
    run(home, text)
    with pytest.raises(IncompatibleCheckpointsError, match=r"`dtype` would round.*GPTQ.*leave"):
        run(home, text + "dtype: bfloat16\n")


def test_layers_in_codes_beside_plain_ones_are_refused_as_no_config_states_both(
    home: Warehouse, models: Path
) -> None:
    text = (
        "merge_method: passthrough\nslices:\n"
        f"- sources: [{{model: {models / 'base'}, layer_range: [0, 1]}}]\n"
        f"- sources: [{{model: {models / 'fp8 silent' / 'expert'}, layer_range: [1, 2]}}]\n"
    )
    with pytest.raises(IncompatibleCheckpointsError, match=r"several forms.*plain numbers"):
        run(home, text)


def test_an_adapter_on_the_plain_part_of_a_coded_model_is_merged_as_in_torch(
    home: Warehouse, tmp_path: Path
) -> None:
    values = tensors_of(0, None)
    mlp = "model.layers.0.mlp.up_proj.weight"
    stored = {n: v for n, v in values.items() if n != mlp} | fp8("weight_scale_inv")(
        mlp.removesuffix(".weight"), values[mlp]
    )
    write_model(tmp_path / "base", stored)
    write_adapter(tmp_path / "adapter", 3)
    factors = tensors(tmp_path / "adapter")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    update = 8 / 4 * factors[name.format("B")].double() @ factors[name.format("A")].double()
    q_proj = "model.layers.0.self_attn.q_proj.weight"
    right = (values[q_proj].double() + update).to(torch.bfloat16)
    for text in (
        f"merge_method: passthrough\nmodels: [{{model: {tmp_path}/base+{tmp_path}/adapter}}]\n",
        f"merge_method: task_arithmetic\nbase_model: {tmp_path}/base\n"
        f"models: [{{model: {tmp_path}/adapter, parameters: {{weight: 1.0}}}}]\n",
    ):
        ours = tensors(run(home, text).snapshot.path)
        assert torch.equal(ours[q_proj], right)
        for other in stored.keys() - {q_proj}:
            assert torch.equal(ours[other].view(U8), stored[other].view(U8)), other


@pytest.mark.parametrize(
    "names",
    [
        ("lora_unet_down_blocks_0_to_q.lora_down.weight", "lora_unet_down_blocks_0_to_q.alpha"),
        ("unet.down_blocks.0.to_q.lora.up.weight", "unet.down_blocks.0.to_q.lora.down.weight"),
        ("transformer.blocks.0.to_q.lora_A.weight", "transformer.blocks.0.to_q.lora_B.weight"),
        ("base_model.model.model.layers.0.q_proj.lora_A.default.weight", "model.norm.weight"),
        ("lycoris_blocks_0_to_q.hada_w1_a", "lycoris_blocks_0_to_q.hada_w1_b"),
    ],
)
def test_loose_factors_are_not_averaged_one_by_one(
    home: Warehouse, tmp_path: Path, names: tuple[str, str]
) -> None:
    for seed, folder in enumerate("ab"):
        torch.manual_seed(seed)
        (tmp_path / folder).mkdir()
        save_file({n: torch.randn(4, 4) for n in names}, tmp_path / folder / "x.safetensors")
    for text in (
        merged("linear", tmp_path / "a", tmp_path / "b"),
        merged("task_arithmetic", tmp_path / "b", base=tmp_path / "a"),
    ):
        with pytest.raises(IncompatibleCheckpointsError, match=r"factors of an adapter.*PEFT"):
            resolve(home, parse(text, name="t", where="t"))


def test_a_config_that_says_quantised_of_plain_weights_loses_that_and_it_is_said(
    home: Warehouse, models: Path, tmp_path: Path
) -> None:
    for name in ("base", "plain"):
        write_model(tmp_path / name, tensors(models / name))
        config = json.loads((tmp_path / name / "config.json").read_text())
        config |= {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    text = merged("task_arithmetic", tmp_path / "plain", base=tmp_path / "base")
    resolved = resolve(home, parse(text, name="t", where="t"))
    assert any("quantization_config leaves config.json" in w for w in resolved.recipe.warnings)
    outcome = run(home, text)
    config = json.loads((Path(outcome.snapshot.path) / "config.json").read_text())
    assert "quantization_config" not in config
    transplant_tokenizer(home, str(tmp_path / "plain"), str(tmp_path / "base"), tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    base, plain = tensors(models / "base"), tensors(models / "plain")
    ours = tensors(outcome.snapshot.path)
    for name, value in base.items():
        right = value.double() + 0.5 * (plain[name].double() - value.double())
        assert torch.equal(ours[name], right.to(torch.bfloat16)), name
