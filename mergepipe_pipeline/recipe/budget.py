"""A budget in a recipe or on a command line: its amount, pins, exclusions, keeps and shares.

An amount is bytes, a share of all bytes, or the error that is allowed. Only texts and names are
read here; the code that reads bytes decides which of them count.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, WrapValidator

from mergepipe_pipeline.domain.recipe import Budget, ModelRef, Selection, Share, TensorRecipe
from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.recipe.keys import Keys, expecting
from mergepipe_pipeline.recipe.problems import KeyPath, Problems, shown, suggest
from mergepipe_pipeline.text import listed

UNIT_NBYTES: dict[str, int] = {"b": 1} | {
    prefix + suffix: factor**power
    for power, prefix in enumerate("kmgtp", 1)
    for suffix, factor in (("b", 1000), ("ib", 1024))
}
MAX_NBYTES = 1 << 63

_FORM = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-z%]{0,3})", re.ASCII)
_NUMBER = re.compile(r"([0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})(e-?[0-9]{1,2})?", re.ASCII)
_FORMS = "a share like 25%, a size like 8GiB or 500MB, bytes like 1024, 0"
_EXPECTED = f"{_FORMS}, or none"
_ERROR_EXPECTED = "a share of the full update from 0 to below 1, like 0.02 or 2%"
_ANY_FORM = "write one of these"
_AT_LEAST, _AT_MOST = "write at least 0", "write at most 100%"
_NO_LIMIT = "write `none` for no limit"


def parse_budget(value: object, where: str) -> Budget:
    """An amount as `parse_amount` reads it, or `error=0.02` as `parse_error` reads it.

    `where` names the key or option in messages. Raises BudgetError for anything else.
    """
    if not isinstance(value, str) or "=" not in value:
        try:
            return parse_amount(value, where)
        except BudgetError as refused:
            refused.expected = f"{_FORMS}, none, or an error like error=2%"
            raise
    key, _, error = value.partition("=")
    if key.strip().lower() != "error":
        raise _error(value, where, "write error=0.02 for the fewest bytes within that error")
    return Budget(error=parse_error(error, where))


def parse_amount(value: object, where: str) -> Budget:
    """The bytes written as `25%`, `8GiB`, `500MB`, `1024`, `0`, `none`/`full`, or None.

    Units are read in either case; kB, MB, GB count by 1000, KiB, MiB, GiB by 1024; parts of a byte
    are dropped. `none`, `full` and None are no limit. Raises BudgetError for anything else, also
    for 1 to 100 without a unit, by which percents may be meant.
    """
    if value is None:
        return Budget()
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _error(value, where, _ANY_FORM)
    if not isinstance(value, str) and value < 0:
        raise _error(value, where, _AT_LEAST)
    if isinstance(value, float):
        if not value.is_integer():
            hint = f"write {value * 100:g}% for a share" if 0 < value < 1 else "write whole bytes"
            raise _error(value, where, hint)
        value = int(value)
    if isinstance(value, int):
        if value >= MAX_NBYTES:
            raise _error(value, where, _NO_LIMIT)
        if 0 < value <= 100:
            raise _error(value, where, f"write {value}% for a share, {value}B for bytes")
        return Budget(nbytes=value)
    return _parse_text(value, where)


def parse_error(value: object, where: str) -> float:
    """The error written as 0.02, `2%` or `2e-2`: a share of the full update's norm in [0, 1).

    Raises BudgetError for anything else.
    """
    number, hint = math.nan, "write the largest error you can accept"
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = value
        if 1 < number < 100:
            hint = f"write {number:g}% for a share"
    elif isinstance(value, str):
        text = value.strip().lower()
        digits = text.removesuffix("%").rstrip()
        if _NUMBER.fullmatch(digits):
            number = float(digits) / (1 if digits == text else 100)
    if 0 <= number < 1:
        return float(number)
    raise _error(value, where, hint, _ERROR_EXPECTED)


def with_amount(budget: Budget, amount: Budget) -> Budget:
    """`budget` with the bytes, share or error of `amount`; pins and all other options stay."""
    return replace(budget, nbytes=amount.nbytes, fraction=amount.fraction, error=amount.error)


def _parse_text(value: str, where: str) -> Budget:
    text = value.strip().lower()
    if text in {"none", "full"}:
        return Budget()
    form = _FORM.fullmatch(text)
    if form is None:
        raise _error(value, where, _hint(text))
    if not form[2]:  # YAML reads it as a number
        return parse_amount(float(text) if "." in text else int(text), where)
    number, unit = Fraction(form[1]), form[2]
    if unit == "%":
        if number > 100:
            raise _error(value, where, _AT_MOST)
        return Budget(fraction=float(number / 100))
    if unit not in UNIT_NBYTES:
        raise _error(value, where, "use B, kB, MB, GB, TB, KiB, MiB, GiB, TiB or %")
    nbytes = int(number * UNIT_NBYTES[unit])
    if nbytes >= MAX_NBYTES:
        raise _error(value, where, _NO_LIMIT)
    return Budget(nbytes=nbytes)


def _hint(text: str) -> str:
    """Say what to write in place of a text that has none of the forms."""
    if re.match(r"-\s*[0-9.]", text):
        return _AT_LEAST
    digits = text.removesuffix("%").rstrip()
    is_share = digits != text and _NUMBER.fullmatch(digits)
    return _AT_MOST if is_share and float(digits) > 100 else _ANY_FORM


def _error(value: object, where: str, next_step: str, expected: str = _EXPECTED) -> BudgetError:
    return BudgetError(
        "A budget cannot be understood",
        where=where,
        expected=expected,
        found=shown(value),
        next_step=next_step,
    )


_Item = TypeVar("_Item")


def _read_by(parse: Callable[[object, str], object]) -> BeforeValidator:
    """For `Annotated[…]`: what `parse` reads; a problem says what that expected and found."""

    def read(value: object) -> object:
        try:
            return parse(value, "budget")
        except BudgetError as error:
            text = f"expected {error.expected}, found {error.found}; {error.next_step}"
            raise ValueError(text) from None

    return BeforeValidator(read)


def _part(value: object, where: str) -> Budget:
    amount = parse_amount(value, where)
    if amount == Budget():
        raise ValueError("expected a share of the budget like 50%, or a size, found no limit")
    return amount


def _entries(value: object) -> tuple[object, ...]:
    if not isinstance(value, list):
        hint = f"; write [{value}]" if isinstance(value, str) else ""
        raise ValueError(f"expected a list, found {shown(value)}{hint}")
    if not value:
        raise ValueError("expected at least one entry, found none")
    return tuple(value)


def _shares(value: object) -> object:
    if not isinstance(value, dict):
        raise ValueError(f"expected a mapping like `{{math: 50%}}`, found {shown(value)}")
    return value


def _is_pattern(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _blocks(value: object, read: Callable[[object], _Blocks]) -> _Blocks:
    if _is_pattern(value):
        return read({"experts": [value]})
    if not isinstance(value, dict):
        how = "an expert's name or `{experts: […], tensors: […]}`"
        raise ValueError(f"expected {how}, found {shown(value)}")
    blocks = read(value)
    if not (blocks.experts or blocks.tensors):
        raise ValueError("expected `experts:` or `tensors:`, found neither")
    return blocks


_Entries = Annotated[tuple[_Item, ...], BeforeValidator(_entries)]
_Part = Annotated[Budget, _read_by(_part)]
_Pattern = Annotated[Any, expecting("a name or a pattern like `math*`", _is_pattern)]


class _Blocks(Keys):
    experts: _Entries[_Pattern] = ()
    tensors: _Entries[_Pattern] = ()


_Selections = _Entries[Annotated[_Blocks, WrapValidator(_blocks)]]


class _Amount(Keys):
    budget: Annotated[Budget, _read_by(parse_budget)] = Budget()


class BudgetYaml(Keys):
    """The key `budget:` where it is a mapping."""

    limit: Annotated[Budget, _read_by(parse_amount)] = Budget()
    error: Annotated[float | None, _read_by(parse_error)] = None
    pin: _Selections = ()
    exclude: _Selections = ()
    keep: _Entries[_Pattern] = ()
    shares: Annotated[dict[_Pattern, _Part], BeforeValidator(_shares)] = Field(default={})


def read_budget(value: object, problems: Problems) -> Budget:
    """The `budget:` of a recipe, an amount or a mapping with `limit:` or `error:` and options.

    Adds every problem at its place, and knows no limit then.
    """
    path: KeyPath = ("budget",)
    if not isinstance(value, dict):
        return (_Amount.read({"budget": value}, (), problems) or _Amount()).budget
    if not value:
        names = ", ".join(BudgetYaml.names())
        problems.add(path, f"expected at least one of {names}, found none")
    if value.get("limit") is not None and value.get("error") is not None:
        problems.add((*path, "error"), "give either `limit:` or `error:`, not both")
        value = value | {"error": None}
    keys = BudgetYaml.read(value, path, problems) or BudgetYaml()
    for i, blocks in enumerate(keys.pin):
        if blocks in keys.exclude:
            text = "the same blocks are under `exclude:`; give one of both"
            problems.add((*path, "pin", i), text)
    return replace(
        keys.limit,
        error=keys.error,
        pin=tuple(Selection(b.experts, b.tensors) for b in keys.pin),
        exclude=tuple(Selection(b.experts, b.tensors) for b in keys.exclude),
        keep=keys.keep,
        shares=tuple(Share(p, part.nbytes, part.fraction) for p, part in keys.shares.items()),
    )


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
