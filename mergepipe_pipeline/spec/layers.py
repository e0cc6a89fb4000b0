"""Which layer a tensor belongs to: the one place that reads structure from tensor names.

Layers are the unit of execution: `embed`, `layer.00 … layer.NN`, `head`. A tensor outside the
numbered layers counts as head if it is stored for the output side (final norm, lm_head), else as
embed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBERED = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.")
_HEAD = re.compile(
    r"(?:^|\.)(?:lm_head|norm|final_layernorm|ln_f|final_norm|classifier|score|pooler|cls)\b"
)


def layer_index(tensor_name: str) -> int | None:
    """The number in `…layers.<n>.…`, or None for embeddings, final norm and head."""
    match = _NUMBERED.search(tensor_name)
    return int(match.group(1)) if match else None


def layer_count(tensor_names: Iterable[str]) -> int:
    """One more than the highest layer number, 0 if no tensor is numbered."""
    return 1 + max((i for n in tensor_names if (i := layer_index(n)) is not None), default=-1)


def layer_name(tensor_name: str, n_layers: int) -> str:
    """`embed`, `head` or `layer.<n>` padded so that names sort in order (two digits at least)."""
    index = layer_index(tensor_name)
    if index is not None:
        return f"layer.{index:0{max(2, len(str(n_layers - 1)))}d}"
    return "head" if _HEAD.search(tensor_name) else "embed"


def layer_order(name: str) -> tuple[int, str]:
    """Sort key that puts `embed` first and `head` last."""
    return ({"embed": 0, "head": 2}.get(name, 1), name)


def is_optional(tensor_name: str) -> bool:
    """True for weights a model may lack without being broken: biases and a tied lm_head."""
    return tensor_name.endswith(".bias") or tensor_name == "lm_head.weight"
