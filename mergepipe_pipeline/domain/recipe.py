"""A recipe after every precedence, default, filter and gradient was applied.

Made by `recipe`, read by the verbs. One `TensorRecipe` per output tensor holds plain numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

Params = tuple[tuple[str, float | int | bool | str], ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """Blocks by shell patterns of experts' and of output tensors' names; none: all of them."""

    experts: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Share:
    """At most `nbytes`, or `fraction` of the budget, go to each expert that fits the pattern."""

    experts: str
    nbytes: int | None = None
    fraction: float | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """How many bytes of expert weights a merge may read, and for what.

    At most one of `nbytes`, `fraction` and `error` is set; none means no limit. `fraction` is of
    the experts' bytes that the recipe could read; `error` asks for the fewest bytes with which the
    error bound is at most that share of the full update's norm. Blocks in `pin` are bought first,
    those in `exclude` never unless pinned; output tensors in `keep` (patterns) stay the base's.
    """

    nbytes: int | None = None
    fraction: float | None = None
    error: float | None = None
    pin: tuple[Selection, ...] = ()
    exclude: tuple[Selection, ...] = ()
    keep: tuple[str, ...] = ()
    shares: tuple[Share, ...] = ()

    def resolve(self, expert_bytes_total: int) -> int | None:
        """The limit in bytes (rounded down), or None for no limit."""
        if self.fraction is not None:
            return int(self.fraction * expert_bytes_total)
        return self.nbytes


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model as a recipe names it.

    `text` as written; `model` the catalog name or path in it, with `lora` the adapter on it;
    revisions of either as given. A model that is an adapter or a delta checkpoint by itself has no
    `lora`.
    """

    text: str
    model: str
    revision: str | None = None
    lora: str | None = None
    lora_revision: str | None = None

    @property
    def names(self) -> tuple[str, str]:
        """The names that patterns fit: the text, and the name without path and revision."""
        last = PurePosixPath(self.model).name
        adapter = f"{last}+{PurePosixPath(self.lora).name}" if self.lora else last
        return (self.text, adapter)


@dataclass(frozen=True, slots=True)
class BaseTensor:
    """The tensor that an output tensor is merged on: model number and the tensor's name there."""

    model: int
    tensor: str


@dataclass(frozen=True, slots=True)
class TensorInput:
    """One model's part in an output tensor.

    `model` indexes `Recipe.models`; `tensor` is the name in that model, another than the output's
    where layers are numbered anew or embeddings are tied. `position` is the entry's place among the
    recipe's (or slice's) entries besides the base; it addresses random numbers.
    """

    model: int
    tensor: str
    position: int
    params: Params


@dataclass(frozen=True, slots=True)
class TensorRecipe:
    """How one output tensor is made: method parameters, base, and inputs in recipe order.

    Without inputs the tensor is a copy of `base`.
    """

    name: str
    params: Params
    base: BaseTensor | None
    inputs: tuple[TensorInput, ...]

    @property
    def sources(self) -> tuple[tuple[int, str], ...]:
        """(model, tensor) of all that it is made of, the base's last."""
        inputs = tuple((i.model, i.tensor) for i in self.inputs)
        return (*inputs, (self.base.model, self.base.tensor)) if self.base else inputs


def pairs_of(tensors: Iterable[TensorRecipe]) -> dict[tuple[int, int], list[tuple[str, str]]]:
    """By numbers of models, (expert's, base's): the pairs of their tensors that are merged."""
    pairs: dict[tuple[int, int], dict[tuple[str, str], None]] = {}
    for t in tensors:
        if t.base is not None:
            for i in t.inputs:
                pairs.setdefault((i.model, t.base.model), {})[i.tensor, t.base.tensor] = None
    return {numbers: list(of) for numbers, of in pairs.items()}


@dataclass(frozen=True, slots=True)
class TokenRule:
    """Where the embedding of one output token comes from.

    `kind` "model": that model's row of the token; "model_token": row of `of_token` or `of_id` in
    that model; "zero": zeros; "default": as without a rule. `force` replaces rows of models that
    have the token, too.
    """

    token: str
    kind: Literal["model", "model_token", "zero", "default"]
    model: int | None = None
    of_token: str | None = None
    of_id: int | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class TokenizerRecipe:
    """The output's tokenizer: the union of all, or the one of model number `source`."""

    source: int | Literal["union"]
    tokens: tuple[TokenRule, ...] = ()
    pad_to_multiple_of: int | None = None


@dataclass(frozen=True)
class Recipe:
    """A resolved recipe.

    `models` are all models, each once, the base at `base` among them. `sliced` are the
    stacks that slices make, with their numbers of layers. `chat_template` is a template's text, or
    "auto". The tensors in `coded` are written as fp8 with scales.
    """

    name: str
    text: str
    method: str
    models: tuple[ModelRef, ...]
    base: int | None
    tensors: tuple[TensorRecipe, ...]
    dtype: str | None  # safetensors code or FP8_BLOCKS, None: as stored
    out_dtype: str | None
    budget: Budget
    strategy: str | None
    seed: int
    ref: str
    sliced: tuple[tuple[str, int], ...] = ()
    tokenizer: TokenizerRecipe | None = None
    chat_template: str | None = None
    warnings: tuple[str, ...] = ()
    coded: frozenset[str] = frozenset()

    @property
    def contributing(self) -> frozenset[int]:
        """The numbers of the models that some tensor has as an input."""
        return frozenset(i.model for t in self.tensors for i in t.inputs)

    @property
    def used(self) -> frozenset[int]:
        """The numbers of the models that some tensor is made of."""
        return frozenset(model for t in self.tensors for model, _ in t.sources)
