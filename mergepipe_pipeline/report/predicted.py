"""Why a plan has no predicted error, in words."""

from __future__ import annotations

from mergepipe_pipeline.domain.plan import Estimates
from mergepipe_pipeline.planner.budget_curve import BudgetCurve

_NOT_FINITE = "unknown: an expert holds NaN or infinity"


def why_no_error(e: Estimates) -> str:
    """Why the error of a plan is not predicted; "" where it is.

    Only an expert that is not finite leaves the norm of the update open while there is a base, and
    no note says why.
    """
    if e.update_norm is not None or e.update_note:
        return "" if e.predicted_error is not None else f"not predicted: {e.bound_note}"
    has_base = e.predicted_error is not None or e.error_bound is None
    return _NOT_FINITE if has_base else "not predicted: there is no base to differ from"


def why_no_curve(curve: BudgetCurve) -> str:
    """Why no budget of a curve has an error; "" where budgets have one."""
    return "" if curve.is_known else _NOT_FINITE
