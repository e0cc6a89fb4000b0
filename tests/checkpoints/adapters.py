"""Adapters that lie nowhere, and what a view's values are by its definition."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from mergepipe_pipeline.domain.checkpoint import Checkpoint, FileEntry, TensorEntry
from mergepipe_pipeline.domain.view import LowRank, TensorView

Shapes = dict[str, tuple[int, ...]]


Q = "model.layers.0.self_attn.q_proj"


BASE: Shapes = {f"{Q}.weight": (8, 6), "model.embed_tokens.weight": (11, 6)}


PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}


def entries(tensors: Mapping[str, tuple[int, ...]], dtype: str = "F32") -> tuple[TensorEntry, ...]:
    return tuple(
        TensorEntry(n, dtype, s, "adapter_model.safetensors", 8) for n, s in tensors.items()
    )


def adapter(
    tensors: Mapping[str, tuple[int, ...]], dtype: str = "F32", **config: Any
) -> Checkpoint:
    """An adapter of these tensors that lies nowhere."""
    file = FileEntry("adapter_model.safetensors", 1, 1, "0" * 64, "1" * 64)
    text = json.dumps(PLAIN | config)
    return Checkpoint("a", "/a", (file,), entries(tensors, dtype), None, "adapter", text)


def pair(
    module: str, n_out: int = 8, n_in: int = 6, r: int = 2, name: str = ""
) -> dict[str, tuple[int, ...]]:
    """Shapes of the factors of a linear module."""
    return {
        f"{module}.lora_A{name}.weight": (r, n_in),
        f"{module}.lora_B{name}.weight": (n_out, r),
    }


def used(view: TensorView) -> list[str]:
    """Names of the stored tensors that a view needs."""
    low = view.low_rank
    assert low is None or isinstance(low, LowRank)
    factors = [low.a, low.b] if low else []
    return [part.entry.name for part in [*view.stored, *factors]]


def value(view: TensorView, factors: Mapping[str, np.ndarray], base: np.ndarray) -> np.ndarray:
    """The tensor by the definition of a view, in float64."""
    out = (factors[view.stored[0].entry.name] if view.stored else base).astype(np.float64)
    if view.is_delta:
        out = base + out
    if low := view.low_rank:
        assert isinstance(low, LowRank)
        update = factors[low.b.entry.name] @ factors[low.a.entry.name].astype(np.float64)
        out = out + low.scale * (update.T if low.transposed else update)
    return out
