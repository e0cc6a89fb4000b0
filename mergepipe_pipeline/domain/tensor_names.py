"""The names that one tensor has in training and in versions of transformers: what they share.

FSDP, activation checkpointing, torch.compile, DDP and PEFT wrap modules and put parts into names.
transformers 4.52 moved the language side of models that see or hear from `language_model.model.` or
`model.` to `model.language_model.`, the head out of `language_model.` and the other sides into
`model.`; 5 took `vision_model.` out of towers. Its conversion mapping says so model by model; the
rule behind is one: what a name begins with, up to the first part with a meaning, says nothing.
"""

from __future__ import annotations

import re

_WRAPPER = re.compile(
    r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\."
)
_AROUND_ALL = re.compile(r"^(?:base_model\.model\.|module\.)+")
#: What is called otherwise in another version, and one word for both, in the order of use.
_VERSIONS = (
    (re.compile(r"^(?:(?:model|language_model|text_model|thinker|vlm)\.)+"), ""),
    (re.compile(r"^((?:vision|image|video)_tower|encoder)\.(?:vision|text)_model\."), r"\1."),
    (re.compile(r"^(?:mlp_AR|vision_projector)\."), "projector."),
    (re.compile(r"^embed_out\."), "lm_head."),
    (re.compile(r"\.mlp\.moe_statics\."), ".mlp.gate.moe_statics."),
    (
        re.compile(r"\.block_sparse_moe\.input_linear\.weight$"),
        ".block_sparse_moe.experts.gate_up_proj",
    ),
    (
        re.compile(r"\.block_sparse_moe\.output_linear\.weight$"),
        ".block_sparse_moe.experts.down_proj",
    ),
    (re.compile(r"\.block_sparse_moe\.router\.layer\."), ".block_sparse_moe.router."),
    (re.compile(r"\.gamma$"), ".weight"),  # TensorFlow's words, as old BERTs have them
    (re.compile(r"\.beta$"), ".bias"),
)


def plain_name(name: str) -> str:
    """The name without the parts of what wraps modules in training."""
    return _AROUND_ALL.sub("", _WRAPPER.sub("", name))


def any_version(name: str) -> str:
    """The form of a plain name in every version: two names of one tensor give the same."""
    for pattern, common in _VERSIONS:
        name = pattern.sub(common, name)
    return name
