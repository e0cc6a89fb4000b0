"""The declaration of an operator: parameters, what it needs, how its error is bounded.

The schema is derived from the operator's signature in `operators`; `recipe` validates against it
and `planner` bounds with it, so that neither needs the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mergepipe_pipeline.domain.recipe import Params

#: "delta": experts enter as δ = T − B, unread means δ = 0. "value": as T, unread means T = B.
#: "delta_if_base": as δ where the recipe has a base, else as T.
Space = Literal["delta", "value", "delta_if_base"]
#: "none": a base, if given, takes part like any other model.
BaseUse = Literal["required", "optional", "none"]
#: What sparsifies each expert before the mix, and so which fact per expert the catalog gives: a
#: trim threshold, a band without outliers, a random drop, a random drop by rank within rows.
Fact = Literal["none", "trim", "band", "drop", "ranked"]
#: What a window must hold: any run of elements, or whole rows (of the last dimension).
Scope = Literal["element", "row"]
#: "additive": merged = B + Σ cᵢδᵢ with coefficients that do not depend on data in other blocks.
#: "vote": the update is elementwise a weighted sum of some of the experts' deltas, or their mean
#: where the method normalises. "mean": always a mean.
#: "unbounded": what is read in one place changes the result in others; no bound is known.
Response = Literal["additive", "vote", "mean", "unbounded"]
Kind = Literal["float", "bool", "int", "choice"]
Value = float | bool | int | str


@dataclass(frozen=True, slots=True)
class Parameter:
    """One recipe parameter: `scope` "model" is given per expert, "method" once per tensor.

    `default` None means required. `choices` are the texts that one of kind "choice" may have,
    `least` is the smallest number there is a meaning for (None: any).
    """

    name: str
    scope: Literal["model", "method"]
    kind: Kind
    default: Value | None
    help: str
    choices: tuple[str, ...] = ()
    least: float | None = None


@dataclass(frozen=True, slots=True)
class OperatorSchema:
    """The declaration of one merge method; `formula` in plain text, `reference` a URL.

    `experts` are the fewest and the most models besides the base that one tensor may have.
    `approximates_by_request`: deltas are approximated only where a recipe asks for packs by name,
    because more bytes of such deltas do not bring the result nearer to the full merge.
    """

    name: str
    parameters: tuple[Parameter, ...]
    formula: str
    reference: str
    space: Space = "delta"
    base: BaseUse = "required"
    experts: tuple[int, int | None] = (1, None)
    fact: Fact = "none"
    scope: Scope = "element"
    response: Response = "additive"
    approximates_by_request: bool = False

    @property
    def needs_base(self) -> bool:
        """Whether the method cannot do without a base model."""
        return self.base == "required"

    @property
    def may_lack_experts(self) -> bool:
        """Whether the base alone may be listed, which is then the result, as in mergekit."""
        return self.needs_base and self.experts == (1, None)


@dataclass(frozen=True, slots=True)
class Choosing:
    """The choice of a method that chooses an operator per tensor, with parameters and the reason.

    Operator "copy" keeps the base's tensor.
    """

    operator: str
    params: Params
    model_params: tuple[Params, ...]
    reason: str
