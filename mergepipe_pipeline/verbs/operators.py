"""The verb `ops`: the merge methods there are, as declared by their operators."""

from __future__ import annotations

from difflib import get_close_matches

from mergepipe_pipeline.domain.operator import OperatorSchema
from mergepipe_pipeline.errors import NotFoundError
from mergepipe_pipeline.operators import OPERATORS


def operators(name: str | None = None) -> tuple[OperatorSchema, ...]:
    """All methods by name, or the one called `name`. Raises NotFoundError with the nearest."""
    if name is None:
        return tuple(OPERATORS[n].schema for n in sorted(OPERATORS))
    if name not in OPERATORS:
        near = get_close_matches(name, OPERATORS, n=1)
        raise NotFoundError(
            "No such merge method",
            where="ops",
            found=repr(name),
            expected="one of " + ", ".join(sorted(OPERATORS)),
            next_step=f"did you mean {near[0]!r}?" if near else "see `mergepipe ops`",
        )
    return (OPERATORS[name].schema,)
