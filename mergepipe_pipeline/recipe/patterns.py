"""Which experts and tensors the patterns of a budget mean, and a problem for each that means none.

Works on names alone: those of the recipe's models, and those of the tensors of its result.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from mergepipe_pipeline.domain.recipe import Budget, ModelRef, Selection, TensorRecipe
from mergepipe_pipeline.recipe.problems import KeyPath, Problems, shown, suggest
from mergepipe_pipeline.text import listed

_LISTED = 8


def fits(pattern: str, ref: ModelRef) -> bool:
    """Whether a shell pattern fits a model as written, or its name without path and revision."""
    return any(fnmatchcase(name, pattern) for name in ref.names)


def selects(selection: Selection, ref: ModelRef, tensor: str) -> bool:
    """Whether a model's blocks of an output tensor are among those selected."""
    return (not selection.experts or any(fits(p, ref) for p in selection.experts)) and (
        not selection.tensors or any(fnmatchcase(tensor, p) for p in selection.tensors)
    )


def check_budget_options(
    budget: Budget,
    refs: Sequence[ModelRef],
    tensors: Sequence[TensorRecipe],
    problems: Problems,
) -> None:
    """Add a problem per pattern that fits no expert or no tensor, and per `exclude` or `keep`
    without a base.

    `tensors` are the output's; an expert is a model that goes into one of them.
    """
    if not (budget.pin or budget.exclude or budget.keep or budget.shares):
        return
    _Names(refs, tensors, problems).check(budget)


class _Names:
    """The names that patterns are compared with."""

    def __init__(
        self, refs: Sequence[ModelRef], tensors: Sequence[TensorRecipe], problems: Problems
    ) -> None:
        self._refs, self._problems = refs, problems
        self._tensors = {t.name: t for t in tensors}
        numbers = dict.fromkeys(i.model for t in tensors for i in t.inputs)
        self._experts = [refs[n] for n in sorted(numbers)]

    def check(self, budget: Budget) -> None:
        for key, selections in (("pin", budget.pin), ("exclude", budget.exclude)):
            for i, selection in enumerate(selections):
                path: KeyPath = ("budget", key, i)
                matched = [self._is_expert(p, path) for p in selection.experts]
                matched += [self._is_tensor(p, path) for p in selection.tensors]
                if all(matched):
                    self._check_pairs(selection, path, needs_base=key == "exclude")
        for i, pattern in enumerate(budget.keep):
            path = ("budget", "keep", i)
            if self._is_tensor(pattern, path):
                tensors = (t for name, t in self._tensors.items() if fnmatchcase(name, pattern))
                self._check_base(tensors, path)
        for share in budget.shares:
            self._is_expert(share.experts, ("budget", "shares", share.experts))

    def _is_expert(self, pattern: str, path: KeyPath) -> bool:
        if any(fits(pattern, ref) for ref in self._experts):
            return True
        names = [name for ref in self._experts for name in ref.names]
        near = suggest(pattern, names)
        experts = listed([ref.text for ref in self._experts], _LISTED) or "none"
        self._problems.add(path, f"no expert fits {shown(pattern)}{near}; experts are {experts}")
        return False

    def _is_tensor(self, pattern: str, path: KeyPath) -> bool:
        if any(fnmatchcase(name, pattern) for name in self._tensors):
            return True
        near = difflib.get_close_matches(pattern, self._tensors, n=1, cutoff=0.3)
        hint = f"; the nearest is {near[0]}" if near else ""
        self._problems.add(path, f"no tensor of the result fits {shown(pattern)}{hint}")
        return False

    def _check_pairs(self, selection: Selection, path: KeyPath, *, needs_base: bool) -> None:
        selected = [
            t
            for name, t in self._tensors.items()
            if any(selects(selection, self._refs[i.model], name) for i in t.inputs)
        ]
        if not selected:
            self._problems.add(path, "these experts take no part in these tensors")
        elif needs_base:
            self._check_base(selected, path)

    def _check_base(self, tensors: Iterable[TensorRecipe], path: KeyPath) -> None:
        bare = next((t for t in tensors if t.base is None), None)
        if bare is not None:
            self._problems.add(path, f"{bare.name} has no base to stay at; add `base_model:`")
