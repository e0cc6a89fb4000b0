"""What an output tensor is: computed or copied, and of which type by default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.domain.recipe import TensorRecipe
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.dtypes import FLOATING, promoted


def is_computed(method: str, t: TensorRecipe) -> bool:
    """Whether there is arithmetic in a tensor, and so a rounding; passthrough only scales."""
    if method != "passthrough":
        return bool(t.inputs)
    return any(dict(i.params).get("scale", 1) != 1 for i in t.inputs)


def promoted_dtype(
    t: TensorRecipe, tables: Sequence[Mapping[str, TensorEntry | TensorView]]
) -> str:
    """The narrowest dtype that holds what the base and all inputs of a tensor store.

    `tables[i]` are the tensors of model number i by name. A tensor without floating-point numbers
    has the dtype of what it copies. Factors of a low-rank update do not count: the update is of
    the tensor it is added to, and has that one's dtype in PEFT and mergekit.
    """
    first = t.base or t.inputs[0]
    like = tables[first.model][first.tensor]
    entries = [tables[i.model].get(i.tensor) for i in t.inputs]
    stored = [e.dtype for e in entries if e and (isinstance(e, TensorEntry) or e.stored)]
    if t.base or not stored:
        stored.append(like.dtype)
    return promoted(stored) if like.dtype in FLOATING else like.dtype
