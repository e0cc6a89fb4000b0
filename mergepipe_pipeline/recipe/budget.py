"""What a budget's amount may look like in a recipe or on a command line.

Bytes, a share of all bytes, or the error that is allowed; `budget_options` reads what a recipe says
beside the amount. Only the text is read here; the code that reads bytes decides which of them
count.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from fractions import Fraction

from mergepipe_pipeline.domain.recipe import Budget
from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.recipe.problems import shown

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
    """What to write in place of a text that has none of the forms."""
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
