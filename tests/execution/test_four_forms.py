"""One family as bfloat16, fp8 by blocks, MXFP4 and GGUF: merged as its weights, and run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mergepipe_pipeline.verbs.tools import convert
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run, tensors

pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

Tensors = dict[str, torch.Tensor]
BLOCK = 128
#: Whole blocks: of others transformers takes a block for as many rows as are there.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(seed: int) -> Any:
    return tuned(transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES), seed)


def mixture(seed: int) -> Any:
    own: dict[str, Any] = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 32,
        "sliding_window": 16,
    }
    own |= {"intermediate_size": 128, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.GptOssConfig(**SIZES | own)
    return tuned(transformers.GptOssForCausalLM, config, seed)


def tuned(kind: Any, config: Any, seed: int) -> Any:
    """A random model in bfloat16; those of other seeds than 0 are near to that one."""
    torch.manual_seed(0)
    model = kind(config).to(torch.bfloat16).eval()
    torch.manual_seed(seed)
    for parameter in model.parameters() if seed else ():
        noise = 0.004 * torch.randn(parameter.shape)
        parameter.data.copy_((parameter.data.float() + noise).to(torch.bfloat16))
    return model


def as_fp8(state: Tensors) -> Tensors:
    """Linear layers as codes of e4m3 with a scale for each block."""
    out: Tensors = {}
    for name, value in state.items():
        if not name.endswith("_proj.weight"):
            out[name] = value
            continue
        rows, cols = value.shape
        grid = -(-rows // BLOCK), -(-cols // BLOCK)
        padded = torch.zeros(grid[0] * BLOCK, grid[1] * BLOCK)
        padded[:rows, :cols] = value.float()
        blocks = padded.view(grid[0], BLOCK, grid[1], BLOCK)
        scales = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scales[:, None, :, None]).view(padded.shape)[:rows, :cols]
        out[name] = codes.to(torch.float8_e4m3fn).contiguous()
        out[f"{name}_scale_inv"] = scales
    return out


def as_mxfp4(state: Tensors) -> Tensors:
    """Experts as codes of E2M1, turned, with an exponent for each 32."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat([numbers, -numbers])
    out: Tensors = {}
    for name, value in state.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            out[name] = value
            continue
        turned = value.float().transpose(1, 2)
        groups = turned.reshape(*turned.shape[:2], -1, 32)
        exponents = torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=1e-20))) - 2
        codes = ((groups / exponents.exp2()[..., None])[..., None] - numbers).abs().argmin(-1)
        out[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        out[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
    return out


def write(folder: Path, state: Tensors, config: dict[str, Any], said: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    save_file({n: t.contiguous() for n, t in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, **said}))
    return folder


def stated(model: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return {**config, "architectures": [type(model).__name__], "dtype": "bfloat16"}


def coded(folder: Path, form: str, seed: int, home: Warehouse) -> tuple[Path, dict[str, Any]]:
    """A model in a form; the folder that is merged, and how transformers loads what it means."""
    if form == "GGUF Q8_0":
        from tests.tools.ggufs import pieces
        from tests.tools.ggufs import write as write_gguf

        vocabulary, model = pieces(), llama(seed)
        n_tokens = len(vocabulary.tokens)
        model.resize_token_embeddings(n_tokens, mean_resizing=False)
        projections = (
            "attn_q",
            "attn_k",
            "attn_v",
            "attn_output",
            "ffn_gate",
            "ffn_up",
            "ffn_down",
        )
        kinds = {f"blk.{i}.{p}.weight": "Q8_0" for i in range(2) for p in projections}
        folder.mkdir(parents=True)
        write_gguf(folder / "m.gguf", "llama", model.float(), vocabulary, kinds=kinds)
        convert(home, str(folder / "m.gguf"), folder.parent / f"{folder.name}-out", dtype="F32")
        return folder.parent / f"{folder.name}-out", {"folder": folder, "gguf_file": "m.gguf"}
    if form == "MXFP4":
        model = mixture(seed)
        said = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}}
        write(folder, as_mxfp4(model.state_dict()), stated(model), said)
        return folder, {"quantization_config": transformers.Mxfp4Config(dequantize=True)}
    model = llama(seed)
    if form == "bfloat16":
        return write(folder, model.state_dict(), stated(model), {}), {}
    fp8: dict[str, Any] = {
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
        "fmt": "e4m3",
    }
    said = {"quantization_config": {**fp8, "activation_scheme": "dynamic"}}
    padded = write(folder, as_fp8(model.state_dict()), stated(model), said)
    return padded, {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True)}


@pytest.mark.parametrize("form", ["bfloat16", "fp8 by blocks", "MXFP4", "GGUF Q8_0"])
def test_a_form_is_merged_as_transformers_reads_it_and_the_result_runs(
    home: Warehouse, tmp_path: Path, form: str, recwarn: pytest.WarningsRecorder
) -> None:
    for seed, name in enumerate(("base", "a", "b")):
        folder, loading = coded(tmp_path / name, form, seed, home)
        source = loading.pop("folder", folder)
        meant = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, **loading
        )
        write(tmp_path / f"{name}-plain", meant.state_dict(), stated(meant), {})
        if folder != tmp_path / name:
            (tmp_path / name).rename(tmp_path / f"{name}-file")
            folder.rename(tmp_path / name)
    for method in ("ties", "task_arithmetic"):
        for budget in ("100%", "25%", "10%"):
            merged = [merge(home, tmp_path, method, kind, budget) for kind in ("", "-plain")]
            ours, theirs = (tensors(m.snapshot.path) for m in merged)
            summary = merged[0].summary()
            assert summary["expert_bytes_read"] <= summary["budget_bytes"]
            if budget == "100%":
                assert {n for n in theirs if not torch.equal(ours[n], theirs[n])} == set()
            result = transformers.AutoModelForCausalLM.from_pretrained(merged[0].snapshot.path)
            prompt = torch.arange(3, 20)[None]
            said = result.generate(prompt, max_new_tokens=4, do_sample=False)
            assert said.shape[1] > prompt.shape[1]
            assert torch.isfinite(result(prompt).logits).all()


def merge(home: Warehouse, folder: Path, method: str, kind: str, budget: str) -> Any:
    experts = "".join(
        f"- {{model: {folder}/{n}{kind}, parameters: {{weight: 0.5, density: 0.6}}}}\n"
        for n in "ab"
    )
    text = f"merge_method: {method}\nbase_model: {folder}/base{kind}\nmodels:\n{experts}"
    return run(home, f"{text}dtype: bfloat16\nbudget: {budget}\n", block_elems=4096)
