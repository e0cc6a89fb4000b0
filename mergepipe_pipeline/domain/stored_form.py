"""Whether a checkpoint's numbers mean something only together: codes with scales, or factors.

Both what config.json says and what the tensors are decide. Codes and factors may be copied;
computed with are codes of known schemes alone, once they are decoded. Sources: the quantisers of
transformers 5 and the formats of compressed-tensors, GPTQ, AWQ, bitsandbytes, MLX and modelopt;
LoRA files of kohya, diffusers and LyCORIS.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from mergepipe_pipeline.domain.code_schemes import Scheme, schemes_of
from mergepipe_pipeline.domain.layers import is_buffer
from mergepipe_pipeline.domain.model_config import quantisation_of


@dataclass(frozen=True, slots=True)
class StoredForm:
    """How weights are stored that are no plain numbers; `step` says how to get plain ones.

    `settings` is what config.json says of it, {} where it says nothing. `coded` are the tensors
    whose numbers mean something only together; they are decoded if there are `schemes` of them.
    """

    name: str
    step: str
    settings: Mapping[str, Any] = field(compare=False)
    coded: frozenset[str] = field(repr=False)
    schemes: tuple[Scheme, ...] = ()

    @property
    def example(self) -> str:
        """The first name of a tensor that is stored so."""
        return min(self.coded)


_STEP = "merge the model that it was made from, the one in bfloat16, float16 or float32"
_NAMES = {
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fbgemm_fp8": "fp8 with a scale per row",
    "fp8": "fp8 in blocks",
    "gptq": "GPTQ",
    "modelopt": "modelopt",
    "mxfp4": "MXFP4",
}
_CODE_DTYPES = re.compile(r"[IU]\d|F8_")
#: Last parts of names of what belongs to codes, in the spellings of their writers.
_COMPANION = re.compile(
    r"(?:(?:_?q?weight|input|output|activation|\w+_proj|w\d)_)?(?:global_)?"
    r"(?:q?scales?(?:_inv|_2|_weight)?|scale_weight|zero_points?|zeros?)"
    r"|weight\.(?:absmax|quant_map|nested_\w+|quant_state\..+|_\w+|.*scale.*)"
    r"|\w+_proj_(?:weight_scale(?:_2)?|input_scale)|scale_packed"
    r"|weight_(?:packed|shape|g_idx|format)|qweight|qzeros|g_idx|SCB|absmax|biases|codebooks?"
    r"|centroids|W_q|meta|\w+_(?:blocks|scales)"
)
#: Of these the codes are named so, whatever companions they have.
_CODES = re.compile(r"weight|qweight|weight_packed|_weight_qdata|W_q|\w+_blocks")
#: Integers that count or point, and code nothing.
_COUNTS = re.compile(r"num_batches_tracked|\w*_(?:index|ids|positions)")
_LEAF = re.compile(r"(?:^|\.)(weight\.(?!.*\bweight\b).+|[^.]+)$")
_FACTOR = re.compile(
    r"(?:^|[._])(?:lora[._](?:[ABab]|up|down|mid)|lora_embedding_[AB]|lora_magnitude_vector"
    r"|lora_linear_layer|hada_(?:w[12]_[ab]|t[12])|lokr_(?:w[12](?:_[ab])?|t2)|oft_(?:blocks|diag)"
    r"|dora_scale|ia3_l|vera_lambda_[bd])(?:[._]|$)"
)


def stored_form(dtypes: Mapping[str, str], config: Mapping[str, Any]) -> StoredForm | None:
    """The form of a whole checkpoint; None for plain numbers.

    `dtypes` are the safetensors codes of its tensors by name, `config` what its config.json says.
    """
    factors = [name for name in dtypes if _FACTOR.search(name)]
    if factors:
        return StoredForm(
            f"{_writer(factors[0])} factors of an adapter",
            "give the base with the adapter merged into it by the library that wrote it (PEFT: "
            "`merge_and_unload()`, then `save_pretrained`), or the adapter as a PEFT folder with "
            "adapter_config.json",
            {},
            frozenset(dtypes),
        )
    settings = quantisation_of(config)
    coded = frozenset(_coded(dtypes, is_said=bool(settings)))
    if not coded:
        return None
    name = _form_name(settings, coded, dtypes)
    return StoredForm(name, _STEP, settings, coded, schemes_of(settings))


@lru_cache(maxsize=1 << 14)  # the models of a plan have the same names
def _place_of(name: str) -> tuple[str, str] | None:
    """A tensor's module and its name there; None of what is no weight."""
    leaf = _LEAF.search(name)
    if leaf is None or is_buffer(name) or _COUNTS.fullmatch(leaf[1]):
        return None
    return name[: leaf.start(1)], leaf[1]


def _coded(dtypes: Mapping[str, str], *, is_said: bool) -> Iterator[str]:
    """The names of codes and of what belongs to them; `is_said`: the config says that there are."""
    modules: dict[str, dict[str, str]] = {}
    for name in dtypes:
        if (place := _place_of(name)) is not None:
            module, leaf = place
            modules.setdefault(module, {})[leaf] = name
    for members in modules.values():
        codes = [leaf for leaf, name in members.items() if _CODE_DTYPES.match(dtypes[name])]
        companions = [leaf for leaf in members if _COMPANION.fullmatch(leaf)]
        if is_said and companions and not codes and "weight" in members:
            codes = ["weight"]  # rounded to codes, and stored in a wider type
        integers = [c for c in codes if not dtypes[members[c]].startswith("F8_")]
        if codes and (companions or is_said or any(map(_CODES.fullmatch, integers))):
            yield from (members[leaf] for leaf in {*codes, *companions})


def _writer(name: str) -> str:
    if "lora_down" in name or "lora_up" in name:
        return "kohya's"
    return "LyCORIS'" if "hada_" in name or "lokr_" in name else "the"


def _form_name(settings: Mapping[str, Any], coded: Iterable[str], dtypes: Mapping[str, str]) -> str:
    """The form by what the config says, else by how its tensors are named."""
    method = settings.get("quant_method")
    if method == "compressed-tensors" or (method is None and "config_groups" in settings):
        return f"compressed-tensors ({settings.get('format', 'codes')})"
    if method is not None:
        return _NAMES.get(str(method), str(method))
    names, kinds = " ".join(coded), {dtypes[name] for name in coded}
    if "weight_packed" in names:
        return "compressed-tensors"
    if "qzeros" in names:
        return "GPTQ or AWQ"
    if "quant_state" in names or "absmax" in names or ".SCB" in names:
        return "bitsandbytes"
    if "_blocks" in names:
        return "MXFP4"
    if ".biases" in names:
        return "MLX's quantisation"
    if any(kind.startswith("F8_") for kind in kinds):
        return "NVFP4" if "weight_scale_2" in names else "fp8 with scales"
    return "integer codes"
