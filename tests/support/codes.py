"""Random codes with scales in every form that is decoded, and what other libraries make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Form:
    """A form: random stored tensors of a weight, what they mean by another library, its config."""

    stored: Callable[[torch.Generator, int, int], Tensors]
    meant: Callable[[Tensors, int, int], torch.Tensor]
    settings: Mapping[str, Any]
    col_multiple: int = 1
    least_rows: int = 1


def _bytes(g: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)


def _fp8(g: torch.Generator, *shape: int) -> torch.Tensor:
    return _bytes(g, *shape).view(torch.float8_e4m3fn)


def _scales(g: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    scales = torch.exp2(torch.randn(shape, generator=g) * 8)
    scales[torch.rand(shape, generator=g) < 0.1] = 0
    return scales.to(dtype)


def _exponents(g: torch.Generator, *shape: int) -> torch.Tensor:
    """Exponents of UE8M0 whose products with codes are finite in bfloat16."""
    return torch.randint(0, 246, shape, generator=g, dtype=torch.uint8)


def _blocks(n: int, size: int) -> int:
    return -(-n // size)


BLOCK = 16


def _fp8_blocks(scale: Callable[..., torch.Tensor]) -> Callable[..., Tensors]:
    def stored(g: torch.Generator, rows: int, cols: int) -> Tensors:
        grid = _blocks(rows, BLOCK), _blocks(cols, BLOCK)
        return {"weight": _fp8(g, rows, cols), "weight_scale_inv": scale(g, *grid)}

    return stored


def _by_transformers(tensors: Tensors, rows: int, cols: int) -> torch.Tensor:
    """By transformers, which takes whole blocks alone: codes of zero fill the last ones."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    scales = tensors["weight_scale_inv"]
    if scales.dim() < 2:
        scales = scales.reshape(1, 1)
        padded = tensors["weight"]
    else:
        padded = torch.zeros(scales.shape[0] * BLOCK, scales.shape[1] * BLOCK).to(
            torch.float8_e4m3fn
        )
        padded.view(torch.uint8)[:rows, :cols] = tensors["weight"].view(torch.uint8)
    return Fp8Dequantize(None)._dequantize_one(padded, scales)[:rows, :cols]


def fp8_by_transformers(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales in blocks of 128 × 128 as transformers has them of zero-filled blocks."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize
    from transformers.utils.quantization_config import FineGrainedFP8Config

    *lead, rows, cols = values.shape
    padded = torch.zeros(*lead, _blocks(rows, 128) * 128, _blocks(cols, 128) * 128)
    padded[..., :rows, :cols] = values
    quantize = Fp8Quantize(SimpleNamespace(quantization_config=FineGrainedFP8Config()))
    coded = quantize._quantize_one("weight", padded)
    return coded["weight"][..., :rows, :cols].contiguous(), coded["weight_scale_inv"]


def fp8_meant(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What codes mean with scales of blocks of 128 × 128, in float32."""
    each = scales.repeat_interleave(128, -2).repeat_interleave(128, -1)
    return codes.float() * each[..., : codes.shape[-2], : codes.shape[-1]]


def _compressed(name: str, **weights: Any) -> Callable[[Tensors, int, int], torch.Tensor]:
    def meant(tensors: Tensors, rows: int, cols: int) -> torch.Tensor:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
        compressor = BaseCompressor.get_value_from_registry(name)
        weight: torch.Tensor = compressor.decompress(dict(tensors), scheme)["weight"]
        return weight

    return meant


def _settings(**weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


def _of_compressed_tensors(
    name: str, stored: Callable[[torch.Generator, int, int], Tensors], multiple: int, **weights: Any
) -> Form:
    return Form(stored, _compressed(name, **weights), _settings(**weights), multiple)


def _packed(g: torch.Generator, rows: int, cols: int, bits: int, group: int) -> Tensors:
    n_groups = cols // group if group else 1
    return {
        "weight_packed": _bytes(g, rows, cols * bits // 8).view(torch.int32),
        "weight_scale": _scales(g, torch.bfloat16, rows, n_groups),
        "weight_shape": torch.tensor([rows, cols]),
    }


def _with_zeros(g: torch.Generator, rows: int, cols: int) -> Tensors:
    words = _blocks(rows, 8), cols // 32
    zeros = _bytes(g, *words, 4).view(torch.int32).reshape(words)
    return {**_packed(g, rows, cols, 4, 32), "weight_zero_point": zeros}


def _nvfp4(scale: str, codes: str) -> Callable[..., Tensors]:
    def stored(g: torch.Generator, rows: int, cols: int) -> Tensors:
        scales = (torch.rand(rows, cols // 16, generator=g) * 400).to(torch.float8_e4m3fn)
        return {
            codes: _bytes(g, rows, cols // 2),
            "weight_scale": scales,
            scale: torch.rand(1, generator=g) * 100 + 0.01,
        }

    return stored


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _by_modelopt(tensors: Tensors, rows: int, cols: int) -> torch.Tensor:
    """By its definition, in float32: modelopt is no package that installs here."""
    table = torch.cat([E2M1, -E2M1])
    halves = torch.stack([tensors["weight"] & 15, tensors["weight"] >> 4], -1).reshape(rows, cols)
    scales = tensors["weight_scale"].float() * tensors["weight_scale_2"]
    values = table[halves.long()] * scales.repeat_interleave(16, 1)
    return values.to(torch.bfloat16)


_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
_INT4 = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}

FORMS: dict[str, Form] = {
    "fp8 in blocks": Form(
        _fp8_blocks(lambda g, *s: _scales(g, torch.float32, *s)),
        _by_transformers,
        {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    ),
    "fp8 in blocks, UE8M0": Form(
        _fp8_blocks(lambda g, *s: _exponents(g, *s).clamp(8, 240).view(torch.float8_e8m0fnu)),
        _by_transformers,
        {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "scale_fmt": "ue8m0"},
    ),
    "fp8, one scale": Form(
        lambda g, r, c: {"weight": _fp8(g, r, c), "weight_scale_inv": _scales(g, torch.bfloat16)},
        _by_transformers,
        {"quant_method": "fp8", "weight_block_size": None},
    ),
    "fp8, a scale per row": _of_compressed_tensors(
        "float-quantized",
        lambda g, r, c: {
            "weight": _fp8(g, r, c),
            "weight_scale": _scales(g, torch.bfloat16, r, 1),
        },
        1,
        **_FLOAT8,
        strategy="channel",
    ),
    "fp8 in blocks, compressed-tensors": _of_compressed_tensors(
        "float-quantized",
        lambda g, r, c: {
            "weight": _fp8(g, r, c),
            "weight_scale": _scales(g, torch.float32, _blocks(r, 16), _blocks(c, 16)),
        },
        1,
        **_FLOAT8,
        strategy="block",
        block_structure=[16, 16],
    ),
    "MXFP8": _of_compressed_tensors(
        "mxfp8-quantized",
        lambda g, r, c: {"weight": _fp8(g, r, c), "weight_scale": _exponents(g, r, c // 32)},
        32,
        **_FLOAT8,
        strategy="group",
        group_size=32,
    ),
    "MXFP4, compressed-tensors": _of_compressed_tensors(
        "mxfp4-pack-quantized",
        lambda g, r, c: {
            "weight_packed": _bytes(g, r, c // 2),
            "weight_scale": _exponents(g, r, c // 32),
        },
        32,
        num_bits=4,
        type="float",
        strategy="group",
        group_size=32,
    ),
    "NVFP4, compressed-tensors": _of_compressed_tensors(
        "nvfp4-pack-quantized",
        _nvfp4("weight_global_scale", "weight_packed"),
        16,
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
    ),
    "NVFP4, modelopt": Form(
        _nvfp4("weight_scale_2", "weight"),
        _by_modelopt,
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        16,
    ),
    "int4 in groups": _of_compressed_tensors(
        "pack-quantized", lambda g, r, c: _packed(g, r, c, 4, 32), 32, **_INT4
    ),
    # Words of one row are more than compressed-tensors unpacks.
    "int4 in groups, with zeros": replace(
        _of_compressed_tensors("pack-quantized", _with_zeros, 32, **_INT4, symmetric=False),
        least_rows=9,
    ),
    "int8, packed": _of_compressed_tensors(
        "pack-quantized", lambda g, r, c: _packed(g, r, c, 8, 0), 4, **_INT8
    ),
    "int8, a scale per row": _of_compressed_tensors(
        "int-quantized",
        lambda g, r, c: {
            "weight": _bytes(g, r, c).view(torch.int8),
            "weight_scale": _scales(g, torch.float16, r, 1),
        },
        1,
        **_INT8,
    ),
}


def gpt_oss(g: torch.Generator, experts: int, rows: int, groups: int) -> Tensors:
    """MXFP4 of the experts of a mixture."""
    return {
        "experts.gate_up_proj_blocks": _bytes(g, experts, rows, groups, 16),
        "experts.gate_up_proj_scales": _exponents(g, experts, rows, groups),
    }


GPT_OSS_SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
