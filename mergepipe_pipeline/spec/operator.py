"""What an operator declares about itself: parameters, what it needs, how its error is bounded.

The schema is derived from the operator's signature in `operators`; `recipe` validates against it
and `planner` bounds with it, so that neither needs the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: "delta": experts enter as δ = T − B, unread means δ = 0. "value": as T, unread means T = B.
Space = Literal["delta", "value"]
#: Tensor-scope facts an operator asks the catalog for: a trim threshold, a drop rescale factor.
Fact = Literal["none", "trim", "drop"]
#: "additive": merged = B + Σ cᵢδᵢ with coefficients that do not depend on data in other blocks.
#: "vote": an elementwise sign vote decides which experts count.
Response = Literal["additive", "vote"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One recipe parameter: `scope` "model" is given per expert, "method" once per tensor.

    `default` None means required.
    """

    name: str
    scope: Literal["model", "method"]
    kind: Literal["float", "bool", "int"]
    default: float | bool | int | None
    help: str


@dataclass(frozen=True, slots=True)
class OperatorSchema:
    """The declaration of one merge method; `formula` in plain text, `reference` a URL."""

    name: str
    parameters: tuple[Parameter, ...]
    space: Space
    needs_base: bool
    fact: Fact
    response: Response
    formula: str
    reference: str
