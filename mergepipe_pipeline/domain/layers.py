"""The part that a tensor plays: the one place that reads structure from tensor names.

Layers are the unit of execution: `embed`, `layer.00 … layer.NN`, `head`. A model may have several
stacks of layers (text and vision, encoder and decoder). A tensor outside them counts as head if it
stands after the layers (final norm, lm_head), else as embed. Names are those of transformers; no
configuration is read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import lru_cache

# The first number counts: experts and sub-layers inside a layer have numbers of their own.
_NUMBERED = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block|resblocks)\.([0-9]{1,9})(?=\.)")
_HEAD = re.compile(
    r"(?:^|\.)(?:lm_head|norm|final_layernorm|ln_f|final_norm|classifier|score|pooler|cls|"
    r"final_layer_norm|norm_f|embed_out|output_layer|output|post_layernorm|layernorm_post|ln_post|"
    r"proj_out|pre_classifier|qa_outputs|vocab_projector|vocab_transform|vocab_layer_norm)\b"
    r"|(?:^|\.)(?:encoder|decoder)\.layer_norm\.|(?:^|\.)merger\."
)
#: Last parts of names whose rows (dimension 0) are the vocabulary: on the input side …
_EMBEDDINGS = re.compile(
    r"(?:^|\.)(?:embed_tokens|wte|embed_in|word_embeddings|tok_embeddings|shared)\.weight$"
    r"|^(?:backbone\.)?embeddings\.weight$"
)
#: … and on the output side.
_OUTPUTS = re.compile(
    r"(?:^|\.)(?:lm_head|embed_out|vocab_projector)\.(?:weight|bias)$"
    r"|^(?:model\.)?output\.weight$|(?:^|\.)(?:transformer\.output_layer|proj_out)\.weight$"
    r"|(?:^|\.)(?:cls\.predictions|lm_head)\.decoder\.(?:weight|bias)$|^cls\.predictions\.bias$"
)
#: Heads of other tasks than predicting tokens.
_TASKS = re.compile(
    r"(?:^|\.)(?:score|pooler|cls|classifier|pre_classifier|qa_outputs|classification_head|"
    r"vocab_transform)\b"
)
#: The one embedding of a model that encodes and decodes, by all its names.
_SHARED = re.compile(r"(?:^|\.)(?:shared|(?:en|de)coder\.embed_tokens)\.weight$")
#: Other tables of the vocabulary, which stand for neither: those that feed layers, heads of further
#: predictions, and names that few architectures have.
_TABLES = re.compile(
    r"(?:^|\.)embed_tokens_per_layer\.weight$|(?:^|\.)shared_head\.head\.weight$"
    r"|(?:^|\.)(?:token_embedding|word_embedding|tokens_embed)\.weight$"
    r"|(?:^|\.)(?:generator_lm_head|lm_loss|pred_layer\.proj)\.(?:weight|bias)$"
    r"|^predictions\.(?:bias|decoder\.(?:weight|bias))$|^decoder\.(?:weight|bias)$"
)
#: A table in one row, with an element per token.
_ROW = re.compile(r"(?:^|\.)final_logits_bias$")
#: The norm after the layers, which every model has that has any.
_LAST_NORM = re.compile(
    r"(?:^|\.)(?:norm|ln_f|norm_f|final_norm|final_layernorm|final_layer_norm)\.weight$"
)
#: Stored buffers that follow from the configuration.
_BUFFER = re.compile(
    r"(?:\.|^)(?:inv_freq|position_ids|masked_bias|causal_mask|h\.\d+\.attn\.(?:attention\.)?bias"
    r"|layers\.\d+\.attention\.bias)$"
)


#: Parts of the projector between a Qwen's two towers, which mergekit counts as layers of their own:
#: one by one, or the last two of the one after its norm.
_PROJECTORS = re.compile(r"(?:^|\.)visual\.deepstack_merger_list\.([0-9]{1,9})\.")
_PROJECTION = re.compile(r"(?:^|\.)visual\.merger\.mlp\.\d+\.")
#: Plans ask the same of each name for each of their models.
_of_names = lru_cache(maxsize=1 << 14)


@_of_names
def layer_index(tensor_name: str) -> int | None:
    """The number in `…layers.<n>.…`, or None for embeddings, final norm and head."""
    match = _NUMBERED.search(tensor_name)
    return int(match[1]) if match else None


@_of_names
def layer_stack(tensor_name: str) -> str | None:
    """The text before the layer's number (`model.layers.`), or None outside the layers."""
    match = _NUMBERED.search(tensor_name)
    return tensor_name[: match.start(1)] if match else None


def with_layer_index(tensor_name: str, index: int) -> str:
    """The name with another layer number; a name without one as it is."""
    match = _NUMBERED.search(tensor_name)
    if match is None:
        return tensor_name
    return f"{tensor_name[: match.start(1)]}{index}{tensor_name[match.end(1) :]}"


def stack_counts(tensor_names: Iterable[str]) -> dict[str, int]:
    """Number of layers (highest number plus one) of every stack, in order of appearance."""
    counts: dict[str, int] = {}
    for name in tensor_names:
        stack, index = layer_stack(name), layer_index(name)
        if stack is not None and index is not None:
            counts[stack] = max(counts.get(stack, 0), index + 1)
    return counts


def projector_position(tensor_name: str, names: Iterable[str]) -> float:
    """Where a part of the projector between two towers stands in a gradient: [0, 1], else 0.

    `names` are all names of the model.
    """
    if _PROJECTION.search(tensor_name):
        return 1.0
    match = _PROJECTORS.search(tensor_name)
    if match is None:
        return 0.0
    last = max(int(m[1]) for m in map(_PROJECTORS.search, names) if m)
    return int(match[1]) / last if last else 1.0


def layer_count(tensor_names: Iterable[str]) -> int:
    """One more than the highest layer number of any stack, 0 if no tensor is numbered."""
    return max(stack_counts(tensor_names).values(), default=0)


def is_post(tensor_name: str) -> bool:
    """Whether a tensor stands after the layers: final norm, lm_head, classifier."""
    return layer_index(tensor_name) is None and _HEAD.search(tensor_name) is not None


def layer_name(tensor_name: str, n_layers: int) -> str:
    """`embed`, `head` or `layer.<n>` padded so that names sort in order (two digits at least)."""
    index = layer_index(tensor_name)
    if index is not None:
        return f"layer.{index:0{max(2, len(str(n_layers - 1)))}d}"
    return "head" if is_post(tensor_name) else "embed"


def layer_order(name: str) -> tuple[int, str]:
    """Sort key that puts `embed` first and `head` last."""
    return ({"embed": 0, "head": 2}.get(name, 1), name)


@_of_names
def embedding_like(tensor_name: str) -> bool:
    """Whether dimension 0 is the vocabulary: input embeddings and heads that predict tokens."""
    return bool(_EMBEDDINGS.search(tensor_name) or _OUTPUTS.search(tensor_name))


def is_embedding(tensor_name: str) -> bool:
    """Whether a tensor is what a model looks its input tokens up in."""
    return _EMBEDDINGS.search(tensor_name) is not None


def vocabulary_axis(tensor_name: str) -> int | None:
    """The dimension that is the vocabulary, None of a tensor that has none.

    What stands before it has one element, so that elements of one token follow each other.
    """
    if _ROW.search(tensor_name):
        return 1
    return 0 if embedding_like(tensor_name) or _TABLES.search(tensor_name) else None


def beside_rows(tensor_name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape without the vocabulary's dimension; None of a tensor that has none."""
    axis = vocabulary_axis(tensor_name)
    if axis is None or len(shape) <= axis:
        return None
    return shape[:axis] + shape[axis + 1 :]


def tied_partner(tensor_name: str, names: Collection[str], *, ties: bool = True) -> str | None:
    """The tensor in `names` that stands for a missing vocabulary matrix, or None.

    A model that `ties` stores one of the two only: `lm_head.weight` is its
    `model.embed_tokens.weight`, and the other way round. Encoder and decoder of one model share
    one embedding, whatever the head is.
    """
    if not tensor_name.endswith(".weight") or not embedding_like(tensor_name):
        return None
    inputs = [n for n in names if _EMBEDDINGS.search(n) and n != tensor_name]
    shared = [n for n in inputs if _SHARED.search(n)]
    if _SHARED.search(tensor_name) and shared:
        return shared[0]
    if not ties:
        return None
    if not _OUTPUTS.search(tensor_name):
        inputs = [n for n in names if n.endswith(".weight") and _OUTPUTS.search(n)]
    # Of several embeddings nobody knows which is the head.
    return inputs[0] if len(inputs) == 1 or (inputs and inputs == shared) else None


@_of_names
def is_optional(tensor_name: str) -> bool:
    """True for what a model may lack without being broken: biases, a tied head, buffers."""
    return (
        tensor_name.endswith(".bias")
        or (_OUTPUTS.search(tensor_name) is not None)
        or is_buffer(tensor_name)
    )


def is_head(tensor_name: str) -> bool:
    """Whether a tensor turns hidden states into answers, so that no other can stand for it.

    A model of another task has none, or one of its own.
    """
    if layer_index(tensor_name) is not None or not tensor_name.endswith(".weight"):
        return False
    return bool(_OUTPUTS.search(tensor_name) or _TASKS.search(tensor_name))


def part_that_needs(tensor_name: str) -> str | None:
    """The part of a model (`model.`, or "" for all) that cannot do without a tensor outside layers.

    None where a model may lack it: heads and parts of their own, which few have.
    """
    match = _LAST_NORM.search(tensor_name) or _EMBEDDINGS.search(tensor_name)
    if match is None or layer_index(tensor_name) is not None:
        return None
    return tensor_name[: match.start()] + ("." if match.start() else "")


@_of_names
def is_buffer(tensor_name: str) -> bool:
    """Whether a stored tensor follows from the configuration, so that nobody misses it."""
    return _BUFFER.search(tensor_name) is not None
