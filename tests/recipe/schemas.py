"""Operator schemas by hand: what the recipe reader knows of methods, free of the operators."""

from __future__ import annotations

from collections.abc import Sequence

from mergepipe_pipeline.recipe.load import RawRecipe, parse_recipe, resolve_recipe
from mergepipe_pipeline.spec.checkpoint import TensorEntry
from mergepipe_pipeline.spec.operator import OperatorSchema, Parameter
from mergepipe_pipeline.spec.recipe import Recipe

WEIGHT = Parameter("weight", "model", "float", None, "factor")
DENSITY = Parameter("density", "model", "float", 1.0, "share kept")
LAMBDA = Parameter("lambda", "method", "float", 1.0, "factor of the update")
INT8 = Parameter("int8_mask", "method", "bool", False, "no effect")


def _normalize(default: bool) -> Parameter:
    return Parameter("normalize", "method", "bool", default, "divide by the weights")


LINEAR = OperatorSchema(
    "linear", (WEIGHT, _normalize(True)), "value", False, "none", "additive", "Σ", "https://x"
)
TIES = OperatorSchema(
    "ties",
    (WEIGHT, DENSITY, _normalize(True), LAMBDA, INT8),
    "delta",
    True,
    "trim",
    "vote",
    "Σ",
    "https://x",
)
TASK = OperatorSchema(
    "task_arithmetic",
    (WEIGHT, _normalize(False), LAMBDA, Parameter("rounds", "method", "int", 3, "how often")),
    "delta",
    True,
    "none",
    "additive",
    "Σ",
    "https://x",
)
METHODS = {s.name: s for s in (LINEAR, TIES, TASK)}

#: A model of three layers, as its names.
NAMES = (
    "model.embed_tokens.weight",
    *(f"model.layers.{k}.{part}.weight" for k in range(3) for part in ("self_attn.q", "mlp.up")),
    "model.norm.weight",
    "lm_head.weight",
)


def entries(names: Sequence[str] = NAMES, dtype: str = "F32") -> tuple[TensorEntry, ...]:
    """Tensor entries of two elements each."""
    return tuple(TensorEntry(n, dtype, (2,), "model.safetensors", 0) for n in names)


def parse(text: str) -> RawRecipe:
    """Parse with the methods of this file."""
    return parse_recipe(text, name="demo", where="demo.yml", methods=METHODS)


def resolve(
    text: str, tensors: Sequence[TensorEntry] | None = None, lacks: Sequence[set[str]] = ()
) -> Recipe:
    """Parse and resolve; every model has all tensors but those in `lacks[i]`."""
    raw = parse(text)
    tensors = entries() if tensors is None else tensors
    names = frozenset(t.name for t in tensors)
    gone = [*lacks, *[set[str]()] * (len(raw.models) - len(lacks))]
    return resolve_recipe(raw, tensors, [names - g for g in gone], METHODS)


def values(recipe: Recipe, parameter: str, model: int | None = None) -> dict[str, object]:
    """Tensor name to the value of a parameter, of the method or of one model."""
    out: dict[str, object] = {}
    for t in recipe.tensors:
        row = t.params if model is None else t.model_params[t.models.index(model)]
        out[t.name] = dict(row)[parameter]
    return out
