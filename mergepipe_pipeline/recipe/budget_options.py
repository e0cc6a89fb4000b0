"""What a recipe says about its budget beside the amount: pins, exclusions, keeps and shares.

Reads the text alone; `patterns` compares its names with those of models and tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeGuard, TypeVar

from mergepipe_pipeline.domain.recipe import Budget, Selection, Share
from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.recipe.budget import parse_amount, parse_budget, parse_error
from mergepipe_pipeline.recipe.problems import KeyPath, Problems, shown

BUDGET_KEYS = ("limit", "error", "pin", "exclude", "keep", "shares")
_SELECTION_KEYS = ("experts", "tensors")
_Read = TypeVar("_Read")


def read_budget(value: object, problems: Problems) -> Budget:
    """The `budget:` of a recipe, an amount or a mapping with `limit:` or `error:` and options.

    Adds every problem at its place; what is wrong is left out of the result.
    """
    path: KeyPath = ("budget",)
    if not isinstance(value, dict):
        return _read(parse_budget, value, path, problems) or Budget()
    if not value:
        problems.add(path, f"expected at least one of {', '.join(BUDGET_KEYS)}, found none")
    problems.add_unknown(value, BUDGET_KEYS, path)
    limit, error = value.get("limit"), value.get("error")
    amount = _read(parse_amount, limit, (*path, "limit"), problems) or Budget()
    if limit is not None and error is not None:
        problems.add((*path, "error"), "give either `limit:` or `error:`, not both")
    elif error is not None:
        amount = Budget(error=_read(parse_error, error, (*path, "error"), problems))
    pin = _selections(value.get("pin"), (*path, "pin"), problems)
    exclude = _selections(value.get("exclude"), (*path, "exclude"), problems)
    for i, selection in enumerate(pin):
        if selection in exclude:
            problems.add(
                (*path, "pin", i), "the same blocks are under `exclude:`; give one of both"
            )
    return replace(
        amount,
        pin=pin,
        exclude=exclude,
        keep=_patterns(value.get("keep"), (*path, "keep"), problems),
        shares=_shares(value.get("shares"), (*path, "shares"), problems),
    )


def _read(
    parse: Callable[[object, str], _Read], value: object, path: KeyPath, problems: Problems
) -> _Read | None:
    try:
        return parse(value, "budget")
    except BudgetError as error:
        text = f"expected {error.expected}, found {error.found}; {error.next_step}"
        problems.add(path, text)
        return None


def _selections(value: object, path: KeyPath, problems: Problems) -> tuple[Selection, ...]:
    selections = (_selection(v, p, problems) for v, p in _items(value, path, problems))
    return tuple(selection for selection in selections if selection is not None)


def _selection(value: object, path: KeyPath, problems: Problems) -> Selection | None:
    if isinstance(value, str):
        return Selection((value,)) if _is_pattern(value, path, problems) else None
    if not isinstance(value, dict):
        problems.add(
            path,
            f"expected an expert's name or `{{experts: […], tensors: […]}}`, found {shown(value)}",
        )
        return None
    n_before = len(problems)
    problems.add_unknown(value, _SELECTION_KEYS, path)
    experts, tensors = (
        _patterns(value.get(key), (*path, key), problems) for key in _SELECTION_KEYS
    )
    if len(problems) == n_before and not (experts or tensors):
        problems.add(path, "expected `experts:` or `tensors:`, found neither")
    return Selection(experts, tensors) if len(problems) == n_before else None


def _shares(value: object, path: KeyPath, problems: Problems) -> tuple[Share, ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        problems.add(path, f"expected a mapping like `{{math: 50%}}`, found {shown(value)}")
        return ()
    shares = []
    for pattern, share in value.items():
        share_path = (*path, pattern)
        if not _is_pattern(pattern, share_path, problems):
            continue
        amount = _read(parse_amount, share, share_path, problems)
        if amount == Budget():
            problems.add(
                share_path, "expected a share of the budget like 50%, or a size, found no limit"
            )
        elif amount is not None:
            shares.append(Share(pattern, amount.nbytes, amount.fraction))
    return tuple(shares)


def _patterns(value: object, path: KeyPath, problems: Problems) -> tuple[str, ...]:
    items = _items(value, path, problems)
    return tuple(v for v, p in items if _is_pattern(v, p, problems))


def _items(value: object, path: KeyPath, problems: Problems) -> Sequence[tuple[object, KeyPath]]:
    if value is None:
        return ()
    if isinstance(value, list):
        if not value:
            problems.add(path, "expected at least one entry, found none")
        return [(item, (*path, i)) for i, item in enumerate(value)]
    hint = f"; write [{value}]" if isinstance(value, str) else ""
    problems.add(path, f"expected a list, found {shown(value)}{hint}")
    return ()


def _is_pattern(value: object, path: KeyPath, problems: Problems) -> TypeGuard[str]:
    if isinstance(value, str) and value.strip():
        return True
    problems.add(path, f"expected a name or a pattern like `math*`, found {shown(value)}")
    return False
