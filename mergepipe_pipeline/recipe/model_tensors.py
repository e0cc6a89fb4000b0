"""The tensors of a recipe's models as headers list them, and the misfits among them.

Misfits are collected per model, so that a wrong model is one problem and not one per tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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

#: Name to what headers state of a tensor: its dtype and shape.
Table = Mapping[str, TensorEntry | TensorView]
#: Whether a tensor is of a module, by its name.
Belongs = Callable[[str], bool]

#: What may be particular: a model lacks a tensor that it needs; it has one that the output does
#: not; it is the lead, and no other has it; it has no head, nor ties one, and counts as the base.
Note = Literal["missing", "extra", "alone", "headless"]
#: Of tensors that a model has alone: which these are, and what is done with them.
_PARTICULAR: dict[Note, tuple[str, str]] = {
    "extra": ("the result has not", "left out (make it the base model to keep them)"),
    "alone": ("no other model has", "copied"),
}


@dataclass(eq=False)
class ModelTable:
    """A model's tensors by name, in file order, and what else of it matters.

    `is_partial`: it is an adapter or a delta alone, with the base's names that it changes. `depth`
    is the number of layers that its config states, None where it states none: a layer beyond is a
    part of its own. `ties`: its head is its embedding.
    """

    ref: ModelRef
    tensors: Table
    is_partial: bool = False
    depth: int | None = None
    ties: bool = True
    _noted: dict[Note, dict[str, None]] = field(default_factory=dict, init=False)
    _misfits: list[str] = field(default_factory=list, init=False)
    _stacks: dict[Belongs, dict[str, int]] = field(default_factory=dict, init=False)
    _is_shallow: bool = field(default=False, init=False)
    _is_broken: bool = field(default=False, init=False)

    @property
    def text(self) -> str:
        """The model as the recipe names it, quoted."""
        return repr(self.ref.text)

    @cached_property
    def layers(self) -> Mapping[int | None, Sequence[str]]:
        """The names by layer; those outside the layers are under None."""
        layers: dict[int | None, list[str]] = {}
        for name in self.tensors:
            layers.setdefault(layer_index(name), []).append(name)
        return layers

    @cached_property
    def _kinds(self) -> frozenset[str]:
        return frozenset(with_layer_index(name, 0) for name in self.tensors)

    def stacks(self, belongs: Belongs) -> dict[str, int]:
        """Number of layers of each stack, among tensors that `belongs` accepts."""
        if belongs not in self._stacks:
            self._stacks[belongs] = stack_counts(n for n in self.tensors if belongs(n))
        return self._stacks[belongs]

    def depths(self, belongs: Belongs, like: ModelTable | None = None) -> dict[str, int]:
        """Number of layers of each stack, without those that the config does not count.

        Such a layer predicts further tokens (MTP), and some copies of a model lack it. Weights
        without a config count as many as the model that they must be `like`.
        """
        stacks = self.stacks(belongs)
        stated = self.depth if self.depth is not None or like is None else like.depth
        if stated is None or len(stacks) != 1 or len(self.stacks(_any)) != 1:
            return stacks
        ((stack, n),) = stacks.items()
        self._is_shallow |= self.depth is not None and n < self.depth
        return {stack: min(n, stated)}

    def find(self, name: str) -> str | None:
        """The name of a tensor, or of the one it is tied to, or None."""
        if name in self.tensors:
            return name
        return None if self.is_partial else self.partner(name)

    def partner(self, name: str) -> str | None:
        """The stored tensor that is a vocabulary matrix of a whole model under another name."""
        return tied_partner(name, self.tensors, ties=self.ties)

    def check_stacks(
        self, lead: ModelTable, belongs: Belongs, path: KeyPath, problems: Problems
    ) -> None:
        """Add a problem at `path` if the model has another number of layers than the `lead`."""
        if self.is_partial:
            return
        stored, lead_stored = self.stacks(belongs), lead.stacks(belongs)
        counts, lead_counts = self.depths(belongs, lead), lead.depths(belongs)
        for stack, n in lead_counts.items():
            if counts.get(stack, n) != n and stored[stack] != lead_stored[stack]:
                self._is_broken = True
                problems.add(
                    path,
                    f"{self.text} has {counts[stack]} layers at {stack}, {lead.text} has {n}; use "
                    "`slices:` to choose layers",
                )

    def needs(self, lacked: str) -> bool:
        """Whether the model is broken without a tensor that it lacks.

        Layers need what other models' layers have, except scales of quantised caches; a part of a
        model needs its embedding and its last norm.
        """
        layer = layer_index(lacked)
        if layer is None:
            part = part_that_needs(lacked)
            return part is not None and any(name.startswith(part) for name in self.tensors)
        n_layers = self.stacks(_any).get(layer_stack(lacked) or "", 0)
        return layer < n_layers and not lacked.endswith("_scale")

    def has_in_another_layer(self, lacked: str) -> bool:
        """Whether a tensor that the model lacks in a layer is in another of its layers."""
        return layer_index(lacked) is None or with_layer_index(lacked, 0) in self._kinds

    def note(self, what: Note, name: str) -> None:
        """Remember what is particular about a tensor."""
        self._noted.setdefault(what, {})[name] = None

    def check_entry(self, tensor: str, like: TensorEntry | TensorView, owner: ModelTable) -> None:
        """Remember a misfit of a tensor with the one of model `owner` that it is merged with.

        Rows of a vocabulary may be more or fewer: tokens are matched where embeddings are read.
        """
        entry = self.tensors.get(tensor)
        if entry is None:
            return
        self.check_kind(tensor, like, owner)
        if entry.shape == like.shape:
            return
        if beside_rows(tensor, entry.shape) == beside_rows(tensor, like.shape) is not None:
            return
        self._misfits.append(
            f"first {tensor} with {list(entry.shape)} where {owner.text} has {list(like.shape)}"
        )

    def check_kind(self, tensor: str, like: TensorEntry | TensorView, owner: ModelTable) -> None:
        """Remember a misfit if one of a tensor and its like has numbers to merge, the other not."""
        entry = self.tensors.get(tensor)
        if entry is not None and (entry.dtype in FLOATING) != (like.dtype in FLOATING):
            self._misfits.append(
                f"first {tensor} in {entry.dtype} where {owner.text} has {like.dtype}"
            )

    def add_misfits(self, path: KeyPath, problems: Problems) -> None:
        """Add one problem per kind of misfit; `path` is the model's."""
        missing = () if self._is_broken else tuple(self._noted.get("missing", {}))
        if missing:
            hint = (
                ", and by its config nothing of it stands for that; give `base_model:`, whose "
                "head stays"
            )
            problems.add(
                path,
                f"{self.text} lacks {len(missing)} of the tensors to merge, first {missing[0]}"
                f"{hint if all(map(is_head, missing)) else ''}",
            )
        if self._misfits:
            problems.add(
                path,
                f"{self.text} has {len(self._misfits)} tensors that do not fit, {self._misfits[0]}",
            )

    def own_parts(self) -> Iterator[str]:
        """A warning for tensors that others lack: they are left out, or copied.

        And one for fewer layers than the config states, or for no head.
        """
        if self._is_shallow:
            (n,) = self.stacks(_any).values()
            yield (
                f"{self.text} has {n} layers, and its config.json says {self.depth}: are files "
                "missing?"
            )
        for what, names in () if self._is_broken else self._noted.items():
            if what == "headless":
                yield (
                    f"{self.text} has no {' and no '.join(names)}, and by its config nothing of it "
                    "stands for that: it counts as the base there"
                )
            elif what in _PARTICULAR:
                which, done = _PARTICULAR[what]
                yield (
                    f"{self.text} has {len(names)} tensors that {which}, first "
                    f"{next(iter(names))}: they are {done}"
                )


def _any(name: str) -> bool:
    return True
