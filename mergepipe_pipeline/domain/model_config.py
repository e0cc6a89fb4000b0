"""Facts of a config.json about its model, in itself and in its text part, which may repeat it.

Names of tensors do not tell whether a head is the embedding: a model without one may be an encoder,
a reward model or a classifier. Sources: `tie_word_embeddings` and the model classes of
transformers 5; the keys of its quantisers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mergepipe_pipeline.errors import CheckpointError

#: The keys of a config under which quantisers write.
QUANTISATION_KEYS = ("quantization_config", "compression_config", "quantization")

#: Architectures that predict tokens (config.json, `architectures`).
_PREDICTS = re.compile(
    r"For(?:CausalLM|ConditionalGeneration|MaskedLM|PreTraining)$|LMHead(?:Model)?$|^BertGeneration"
)
_KEY = "tie_word_embeddings"
_UNTIED = (
    "afmoe apertus arcee aria aria_text axk1 axk2 bailing_hybrid bamba beam bitnet blt chameleon "
    "codegen cohere_compass cosmos3_edge cosmos3_omni cwm dbrx deepseek_ocr2 deepseek_v2 "
    "deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1 dots3_note dots3_note_text emu3 "
    "esmc eurobert evolla exaone4 exaone4_5 exaone_moe falcon_h1 fast_vlm flex_olmo flint fsmt "
    "fuyu git glm glm4 glm46v glm4_moe glm4_moe_lite glm4v glm4v_moe glm5_next glm_moe_dsa "
    "glm_ocr glmga gpt_neox gpt_oss gptj granite granite4_vision granitemoe granitemoe_swa "
    "granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 "
    "hy_v4 hyperclovax idefics idefics2 idefics3 internlm3 iquestcoder jais2 jamba kimi_linear "
    "kolibri1 kyutai_speech_to_text laguna llama llama4 llama4_text llava llava_next "
    "llava_next_video llava_onevision longcat_flash mamba2 mellum mimo_v2_flash minicpmv4_6 "
    "minicpmv4_7 minimax minimax_m2 minimax_m3_vl minimax_m3_vl_text ministral ministral3 mistral "
    "mistral4 mistral_large4 mixtral modernvbert molmo2 moshi nanochat nemotron nemotron_h olmo "
    "olmo2 olmo3 olmo_hybrid olmoe perception_lm persimmon phi phi3 phi4_multimodal phimoe "
    "pix2struct qianfan_ocr qwen2 qwen2_5_omni_thinker qwen2_5_vl qwen2_moe qwen2_vl qwen3 "
    "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next "
    "qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen4_exp qwen4_exp_text reformer rembert rwkv "
    "seed_oss shieldgemma2 smolvlm solar_open stablelm ultrabert ultravbert unlimited_ocr "
    "video_llama_3 video_llava vipllava xlstm "
)
#: Model types that predict tokens by a head of their own unless their config ties it.
UNTIED_BY_DEFAULT = frozenset(_UNTIED.split())


def config_places(config: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """The dotted places at which a config has the keys, those in its text part last."""
    part = config.get("text_config")
    inner = [f"text_config.{k}" for k in keys if isinstance(part, dict) and k in part]
    return [k for k in keys if k in config] + inner


def at_place(config: Mapping[str, Any], place: str) -> Any:
    """The value at a dotted place of a config, None if there is none."""
    *above, last = place.split(".")
    for key in above:
        config = config[key]
    return config.get(last)


def quantisation_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config about how the weights were quantised; {} where it says nothing."""
    stated = (at_place(config, place) for place in config_places(config, QUANTISATION_KEYS))
    return next((dict(value) for value in stated if isinstance(value, dict) and value), {})


#: Where modelopt said how weights are quantised before it wrote that into config.json.
_APART = "hf_quant_config.json"


def refuse_stated_apart(files: Collection[str], config: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError if a file beside a config says how weights are quantised, not it."""
    if _APART in files and not quantisation_of(config):
        raise CheckpointError(
            "How the weights are quantised is said beside config.json, which a result would lack",
            where=f"{where}, {_APART}",
            expected="quantization_config in config.json",
            found="none there",
            next_step='write {"quant_method": "modelopt", "quant_algo": …} there as '
            f"quantization_config, with the quant_algo of {_APART}",
        )


def predicts_tokens(config: Mapping[str, Any]) -> bool | None:
    """Whether a config is of a model with a head over tokens; None where it does not say."""
    kinds = config.get("architectures")
    if not isinstance(kinds, list) or not kinds:
        return None
    return _PREDICTS.search(str(kinds[0])) is not None


def ties_head(config: Mapping[str, Any]) -> bool:
    """Whether the head of the model of a config is its embedding.

    A config without architectures says so only where it states the tie.
    """
    stated = (at_place(config, place) for place in config_places(config, (_KEY,)))
    is_tied = next((value for value in stated if isinstance(value, bool)), None)
    if is_tied is not None:
        return is_tied and predicts_tokens(config) is not False
    return predicts_tokens(config) is True and config.get("model_type") not in UNTIED_BY_DEFAULT
