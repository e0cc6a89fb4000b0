"""What a budget may look like in a recipe or on a command line, and what it means in bytes.

Only the reading of it: what counts against it is decided where bytes are read.
"""

from __future__ import annotations

import re
from fractions import Fraction

from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.recipe.problems import shown
from mergepipe_pipeline.spec.recipe import Budget

UNIT_NBYTES: dict[str, int] = {"": 1, "b": 1} | {
    prefix + suffix: factor**power
    for power, prefix in enumerate("kmgtp", 1)
    for suffix, factor in (("b", 1000), ("ib", 1024))
}
MAX_NBYTES = 1 << 63

_FORM = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-z%]{0,3})", re.ASCII)
_EXPECTED = "a share like 25%, a size like 8GiB or 500MB, bytes like 1024, 0, or none"


def parse_budget(value: object, where: str) -> Budget:
    """The budget written as `25%`, `8GiB`, `500MB`, `1024` (bytes), `0`, `none`/`full`, or None.

    Units are read in either case; kB, MB, GB count by 1000, KiB, MiB, GiB by 1024; parts of a byte
    are dropped. `none`, `full` and None are no limit. `where` names the key or option in messages.

    Raises BudgetError for anything else.
    """
    if value is None:
        return Budget()
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _error(value, where, f"write {_EXPECTED}")
    if isinstance(value, float):
        if not value.is_integer():
            hint = f"write {value * 100:g}% for a share" if 0 < value < 1 else "write whole bytes"
            raise _error(value, where, hint)
        value = int(value)
    if isinstance(value, int):
        if not 0 <= value < MAX_NBYTES:
            raise _error(value, where, "write a number of bytes from 0 up")
        return Budget(nbytes=value)
    return _parse_text(value, where)


def _parse_text(value: str, where: str) -> Budget:
    text = value.strip().lower()
    if text in {"none", "full"}:
        return Budget()
    form = _FORM.fullmatch(text)
    if form is None:
        raise _error(value, where, f"write {_EXPECTED}")
    number, unit = Fraction(form[1]), form[2]
    if unit == "%":
        if number > 100:
            raise _error(value, where, "write at most 100%")
        return Budget(fraction=float(number / 100))
    if unit not in UNIT_NBYTES:
        raise _error(value, where, "use B, kB, MB, GB, TB, KiB, MiB, GiB, TiB or %")
    nbytes = int(number * UNIT_NBYTES[unit])
    if nbytes >= MAX_NBYTES:
        raise _error(value, where, "write `none` for no limit")
    return Budget(nbytes=nbytes)


def _error(value: object, where: str, next_step: str) -> BudgetError:
    return BudgetError(
        "A budget cannot be understood",
        where=where,
        expected=_EXPECTED,
        found=shown(value),
        next_step=next_step,
    )
