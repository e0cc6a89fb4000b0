"""The tensors of a recipe's models as headers list them, and the misfits among them.

Misfits are collected per model, so that a wrong model is one problem and not one per tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.domain.layers import (
    beside_rows,
    is_head,
    layer_index,
    layer_stack,
    part_that_needs,
    stack_counts,
    tied_partner,
    with_layer_index,
)
from mergepipe_pipeline.domain.recipe import ModelRef
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.recipe.problems import KeyPath, Problems
from mergepipe_pipeline.recipe.structure import Entry

#: Name to what headers state of a tensor: its dtype and shape.
Table = Mapping[str, TensorEntry | TensorView]
#: Whether a tensor is of a module, by its name.
Belongs = Callable[[str], bool]


#: What may be particular: a model lacks a tensor that it needs; it has one that the output does
#: not; it is the lead, and no other has it; it has no head, nor ties one, and counts as the base.
Note = Literal["missing", "extra", "alone", "headless"]
#: What keeps tensors that only another model than the base has.
_KEEP = "make it the base model to keep them"


@dataclass
class Tables:
    """The models' tensors by name; `partial[i]` says that model i has changed tensors only.

    `depths[i]` is the number of layers that its config states, None where it states none; `ties[i]`
    whether its head is its embedding.
    """

    refs: Sequence[ModelRef]
    tables: Sequence[Table]
    partial: Sequence[bool]
    depths: Sequence[int | None] = ()
    ties: Sequence[bool] = ()
    _by_layer: dict[int, dict[int | None, list[str]]] = field(default_factory=dict)
    _noted: dict[Note, dict[int, dict[str, None]]] = field(default_factory=dict)
    _shapes: dict[int, list[str]] = field(default_factory=dict)
    _stacks: dict[tuple[int, Belongs], dict[str, int]] = field(default_factory=dict)
    _in_any_layer: dict[int, frozenset[str]] = field(default_factory=dict)
    _shallow: dict[int, tuple[int, int]] = field(default_factory=dict)
    _broken: set[int] = field(default_factory=set)

    def __getitem__(self, model: int) -> Table:
        """Name to entry of one model's tensors, in file order."""
        return self.tables[model]

    def in_layer(self, model: int, layer: int | None) -> Sequence[str]:
        """The names of one layer of a model, or of what is outside the layers."""
        if model not in self._by_layer:
            layers: dict[int | None, list[str]] = {}
            for name in self.tables[model]:
                layers.setdefault(layer_index(name), []).append(name)
            self._by_layer[model] = layers
        return self._by_layer[model].get(layer, ())

    def stacks(self, model: int, belongs: Belongs) -> dict[str, int]:
        """Number of layers of each stack of a model, among tensors that `belongs` accepts."""
        if (model, belongs) not in self._stacks:
            counts = stack_counts(name for name in self.tables[model] if belongs(name))
            self._stacks[model, belongs] = counts
        return self._stacks[model, belongs]

    def depth(self, model: int, belongs: Belongs, like: int | None = None) -> dict[str, int]:
        """Number of layers of each stack, without those that the config does not count.

        Such a layer predicts further tokens (MTP), and some copies of a model lack it. Weights
        without a config count as many as the model that they must be `like`.
        """
        stacks = self.stacks(model, belongs)
        config_depth = self.depths[model] if self.depths else None
        if config_depth is None and self.depths and like is not None:
            config_depth = self.depths[like]
        if config_depth is None or len(stacks) != 1 or len(self.stacks(model, _any)) != 1:
            return stacks
        ((stack, n),) = stacks.items()
        if n < config_depth:
            self._shallow[model] = (n, config_depth)
        return {stack: min(n, config_depth)}

    def find(self, model: int, name: str) -> str | None:
        """The name of a tensor in a model, or of the one it is tied to, or None."""
        table = self.tables[model]
        if name in table:
            return name
        return None if self.partial[model] else self.partner(model, name)

    def partner(self, model: int, name: str) -> str | None:
        """The stored tensor that is a vocabulary matrix of a whole model under another name."""
        return tied_partner(name, self.tables[model], ties=self.ties[model])

    def check_stacks(self, entry: Entry, lead: int, belongs: Belongs, problems: Problems) -> None:
        """Add a problem if a model has another number of layers than the `lead`."""
        if self.partial[entry.model]:
            return
        all_counts, all_lead_counts = self.stacks(entry.model, belongs), self.stacks(lead, belongs)
        counts, lead_counts = self.depth(entry.model, belongs, lead), self.depth(lead, belongs)
        for stack, n in lead_counts.items():
            if counts.get(stack, n) != n and all_counts[stack] != all_lead_counts[stack]:
                self._broken.add(entry.model)
                problems.add(
                    (*entry.level.path, "model"),
                    f"{self.refs[entry.model].text!r} has {counts[stack]} layers at {stack}, "
                    f"{self.refs[lead].text!r} has {n}; use `slices:` to choose layers",
                )

    def needs(self, model: int, lacked: str) -> bool:
        """Whether a model is broken without a tensor that it lacks.

        Layers need what other models' layers have, except scales of quantised caches; a part of a
        model needs its embedding and its last norm.
        """
        layer = layer_index(lacked)
        if layer is None:
            part = part_that_needs(lacked)
            return part is not None and any(name.startswith(part) for name in self.tables[model])
        n_layers = self.stacks(model, _any).get(layer_stack(lacked) or "", 0)
        return layer < n_layers and not lacked.endswith("_scale")

    def has_in_another_layer(self, model: int, lacked: str) -> bool:
        """Whether a tensor that a model lacks in a layer is in another of its layers."""
        if layer_index(lacked) is None:
            return True
        if model not in self._in_any_layer:
            kinds = frozenset(with_layer_index(name, 0) for name in self.tables[model])
            self._in_any_layer[model] = kinds
        return with_layer_index(lacked, 0) in self._in_any_layer[model]

    def note(self, what: Note, model: int, name: str) -> None:
        """Remember what is particular about a tensor of a model."""
        self._noted.setdefault(what, {}).setdefault(model, {})[name] = None

    def check_entry(
        self, model: int, tensor: str, like: TensorEntry | TensorView, owner: int
    ) -> None:
        """Remember a misfit of a tensor with the one of model `owner` that it is merged with.

        Rows of a vocabulary may be more or fewer: tokens are matched where embeddings are read.
        """
        entry = self.tables[model].get(tensor)
        if entry is None:
            return
        self.check_kind(model, tensor, like, owner)
        if entry.shape == like.shape:
            return
        if beside_rows(tensor, entry.shape) == beside_rows(tensor, like.shape) is not None:
            return
        text = (
            f"first {tensor} with {list(entry.shape)} where {self.refs[owner].text!r} has "
            f"{list(like.shape)}"
        )
        self._shapes.setdefault(model, []).append(text)

    def check_kind(
        self, model: int, tensor: str, like: TensorEntry | TensorView, owner: int
    ) -> None:
        """Remember a misfit if one of a tensor and its like has numbers to merge, the other not."""
        entry = self.tables[model].get(tensor)
        if entry is not None and (entry.dtype in FLOATING) != (like.dtype in FLOATING):
            text = (
                f"first {tensor} in {entry.dtype} where {self.refs[owner].text!r} has {like.dtype}"
            )
            self._shapes.setdefault(model, []).append(text)

    def add_misfits(self, places: Mapping[int, KeyPath], problems: Problems) -> None:
        """Add one problem per model and kind of misfit; `places` are the models' key paths."""
        for model, names in self._noted.get("missing", {}).items():
            if model not in self._broken:
                first = next(iter(names))
                hint = (
                    ", and by its config nothing of it stands for that; give `base_model:`, whose "
                    "head stays"
                )
                problems.add(
                    places.get(model, ()),
                    f"{self.refs[model].text!r} lacks {len(names)} of the tensors to merge, "
                    f"first {first}{hint if all(map(is_head, names)) else ''}",
                )
        for model, texts in self._shapes.items():
            problems.add(
                places.get(model, ()),
                f"{self.refs[model].text!r} has {len(texts)} tensors that do not fit, {texts[0]}",
            )

    def own_parts(self) -> list[str]:
        """One warning per model with tensors that others lack: they are left out, or copied.

        And one per model with fewer layers than its config states, or without a head.
        """
        shallow = [
            f"{self.refs[model].text!r} has {n} layers, and its config.json says {config_depth}: "
            "are files missing?"
            for model, (n, config_depth) in self._shallow.items()
        ]
        headless = [
            f"{self.refs[model].text!r} has no {' and no '.join(names)}, and by its config nothing "
            "of it stands for that: it counts as the base there"
            for model, names in self._noted.get("headless", {}).items()
            if model not in self._broken
        ]
        particular: tuple[tuple[Note, str, str], ...] = (
            ("extra", "the result has not", f"left out ({_KEEP})"),
            ("alone", "no other model has", "copied"),
        )
        return [*shallow, *headless] + [
            f"{self.refs[model].text!r} has {len(names)} tensors that {which}, "
            f"first {next(iter(names))}: they are {done}"
            for what, which, done in particular
            for model, names in self._noted.get(what, {}).items()
            if model not in self._broken
        ]


def _any(name: str) -> bool:
    return True
