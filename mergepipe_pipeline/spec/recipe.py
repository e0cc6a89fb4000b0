"""What is wanted: a recipe after every precedence, default, filter and gradient was applied.

Made by `recipe`, read by the verbs. One `TensorRecipe` per output tensor holds plain numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

Params = tuple[tuple[str, float | int | bool | str], ...]


@dataclass(frozen=True, slots=True)
class Budget:
    """How many bytes of expert weights a merge may read: at most one of the two is set.

    Neither set means no limit. `fraction` is of the experts' bytes that the recipe could read.
    """

    nbytes: int | None = None
    fraction: float | None = None

    def resolve(self, expert_bytes_total: int) -> int | None:
        """The limit in bytes (rounded down), or None for no limit."""
        if self.fraction is not None:
            return int(self.fraction * expert_bytes_total)
        return self.nbytes


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model as a recipe names it: a catalog name or a path."""

    text: str


@dataclass(frozen=True, slots=True)
class TensorRecipe:
    """How one output tensor is made: method parameters, and parameters per contributing model.

    `models` are indices into `Recipe.models` in recipe order, without the base.
    """

    name: str
    params: Params
    models: tuple[int, ...]
    model_params: tuple[Params, ...]


@dataclass(frozen=True)
class Recipe:
    """A resolved recipe. `models` are all non-base models in recipe order; `base` may be None."""

    name: str
    text: str
    method: str
    base: ModelRef | None
    models: tuple[ModelRef, ...]
    tensors: tuple[TensorRecipe, ...]
    dtype: str | None  # safetensors code, None: as stored
    out_dtype: str | None
    budget: Budget
    strategy: str
    seed: int
    ref: str
    warnings: tuple[str, ...] = ()
