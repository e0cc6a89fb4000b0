"""The verb `curve`: what every budget would lose, known before any expert is read for a merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import nan
from typing import TYPE_CHECKING, Any, Unpack

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.plan import NOT_FINITE, MergePlan, Source
from mergepipe_pipeline.domain.request import RequestedModel
from mergepipe_pipeline.errors import NotFoundError
from mergepipe_pipeline.execution.egress import egress_of_recipe
from mergepipe_pipeline.execution.gather import gather
from mergepipe_pipeline.execution.stages import merge_stages
from mergepipe_pipeline.facts.offline import present_root
from mergepipe_pipeline.pictures import Panel, Series, panels_picture
from mergepipe_pipeline.planner.budget_curve import SHARES, BudgetCurve, Point, budget_curve
from mergepipe_pipeline.planner.plan_builder import PlanBuilder
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.resolution.recipe_text import parse_plan
from mergepipe_pipeline.resolution.resolve import Planning, resolve_stage
from mergepipe_pipeline.text import byte_unit, size
from mergepipe_pipeline.warehouse import Warehouse

if TYPE_CHECKING:
    from mergepipe_pipeline.remote.egress import Egress


@dataclass(frozen=True)
class RecipeCurve:
    """A curve; `read` names the experts that had to be analysed for it first.

    `egress` is what a merge under the recipe's budget fetches from addresses, `warnings` are those
    of the recipe.
    """

    recipe: str
    curve: BudgetCurve
    bound_note: str
    read: tuple[str, ...]
    egress: tuple[Egress, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def unknown(self) -> str:
        """Why no budget has an error; "" where budgets have one."""
        return "" if self.curve.is_known else NOT_FINITE


def curve(
    warehouse: Warehouse,
    parsed: ParsedRecipe,
    *,
    shares: Sequence[float] = SHARES,
    progress: Progress | None = None,
    **planning: Unpack[Planning],
) -> RecipeCurve:
    """Draw the curve of a recipe; as for a plan, stages are merged and unknown experts analysed.

    Raises what planning raises, and BudgetError without a base.
    """
    stages = merge_stages(warehouse, parsed, progress=progress, **planning)
    resolved = stages.before(resolve_stage(warehouse, parsed, stages.checkpoints, **planning))
    gathered = gather(warehouse, resolved, progress, unnamed=stages.checkpoints, for_parts=True)
    return replace(_curve(*gathered, shares), egress=egress_of_recipe(warehouse, resolved))


def curve_of_plan(warehouse: Warehouse, plan: MergePlan) -> RecipeCurve | None:
    """Draw the curve on which a plan stands, from the catalog; its checkpoints may be gone.

    None where a tensor has no base, so that nothing can be left out. Reads weights only if the
    catalog lost what it knew. Raises what checking its recipe raises, and NotFoundError for a plan
    that nobody could make any more.
    """
    e = plan.estimates
    if e.predicted_error is None and e.update_norm is None:
        return None
    rows = str(warehouse.token_rows)  # made again, for the tokenizer of the result
    sources = {s.name: s for s in plan.sources if not s.root.startswith(rows)}
    texts = sources | {m.text: m for m in plan.request.models}
    known = {text: _checkpoint(warehouse, source) for text, source in texts.items()}
    resolved = resolve_stage(warehouse, parse_plan(plan), known, request=plan.request)
    found = _curve(*gather(warehouse, resolved, unnamed=known), SHARES)
    own = found.curve.chosen
    if (own.strategy, own.nbytes) != (e.strategy, e.expert_bytes_planned):
        raise NotFoundError(
            "What a plan was made from is gone, or known in another way",
            where=f"plan {plan.plan_id[:16]}",
            expected=f"{e.strategy}, {e.expert_bytes_planned} bytes, from packs "
            f"{', '.join(p.pack_id[:16] for p in plan.packs) or '(none)'}",
            found=f"{own.strategy}, {own.nbytes} bytes",
            next_step="pack the experts again, or plan the recipe anew",
        )
    return found


def _checkpoint(warehouse: Warehouse, source: Source | RequestedModel) -> Checkpoint:
    root = present_root(warehouse, source.checkpoint_id, source.root)
    recorded = warehouse.catalog.checkpoint(source.checkpoint_id, source.name, root)
    return recorded or open_checkpoint(root, source.name)


def _curve(builder: PlanBuilder, read: tuple[str, ...], shares: Sequence[float]) -> RecipeCurve:
    recipe, selection = builder.recipe, builder.selection()
    problems = builder.problems(selection)
    curve = budget_curve(problems, recipe.budget, selection, shares)
    asked = [f"{100 * s:g} %" for s in curve.left_out if s in shares and shares is not SHARES]
    pinned = f"the recipe pins more than {', '.join(asked)} of the bytes: no budget is that small"
    warnings = (*recipe.warnings, *([pinned] if asked else []))
    bound = selection.problem.bound(selection.levels)
    return RecipeCurve(recipe.name, curve, bound.note, read, warnings=warnings)


def records(curve: BudgetCurve) -> list[dict[str, Any]]:
    """One flat record per point; the point that was asked for comes last."""
    return [_record(curve, p) for p in (*curve.points, curve.chosen)]


def _record(curve: BudgetCurve, p: Point) -> dict[str, Any]:
    total = max(1, curve.nbytes_total)
    return {
        **asdict(p),
        "share": p.nbytes / total,
        "error_relative": curve.relative(p.error),
        "bound_relative": curve.relative(p.bound),
        "is_knee": p == curve.knee,
        "is_chosen": p is curve.chosen,
    }


def rows_of(curve: BudgetCurve) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headers and rows of a table with a row per budget: every strategy's error in percent.

    One that cannot read all that is pinned has `-` there: whole blocks cost more than packs.
    """
    by_budget: dict[int, dict[str, Point]] = {}
    for p in curve.points:
        by_budget.setdefault(p.budget_bytes or 0, {})[p.strategy] = p
    names = list(dict.fromkeys(p.strategy for p in curve.points))
    rows = []
    for nbytes, points in sorted(by_budget.items()):
        best = points.get(curve.best)
        rows.append(
            (
                f"{round(100 * nbytes / max(1, curve.nbytes_total), 2):g} %",
                *(percent(curve, points[name]) if name in points else "-" for name in names),
                bound_percent(curve, best) if best else "-",
                "knee" if best and best == curve.knee else "",
            )
        )
    return ("budget", *names, f"bound of {curve.best}", ""), rows


def percent(curve: BudgetCurve, p: Point) -> str:
    """A point's error, give or take its margin, in percent of the update."""
    error, margin = curve.relative(p.error), curve.relative(p.margin)
    if error is None:
        return "0 %"
    return f"{100 * error:.1f} %" if not margin else f"{100 * error:.1f} ± {100 * margin:.1f} %"


def bound_percent(curve: BudgetCurve, p: Point) -> str:
    """A point's bound in percent of the update."""
    bound = curve.relative(p.bound)
    return "none" if bound is None else f"{100 * bound:.1f} %"


def sentence(plan: MergePlan) -> str:
    """Say what a plan reads of its experts, and what that is predicted to lose."""
    e = plan.estimates
    unit, nbytes = byte_unit(e.expert_bytes_total)
    read, total = (f"{n / nbytes:.3g}" for n in (e.expert_bytes_planned, e.expert_bytes_total))
    is_all = e.expert_bytes_planned == e.expert_bytes_total
    reads = f"reads {'all' if is_all else read} of {total} {unit}"
    if e.no_error_note or e.predicted_error is None:
        return f"{reads}; its loss is {e.no_error_note}" if e.no_error_note else reads
    if not e.predicted_error or not e.update_norm:
        return f"{reads}, predicted to lose nothing"
    lost = 100 * e.predicted_error / e.update_norm
    figure = f"{lost:.0f}" if lost >= 10 else f"{lost:.2g}"
    return f"{reads}, predicted to lose {figure} %"


def picture(recipe_curve: RecipeCurve) -> bytes:
    """Draw predicted loss over bytes for all strategies, the knee and the plan's own point: PNG."""
    curve, own, knee = recipe_curve.curve, recipe_curve.curve.chosen, recipe_curve.curve.knee
    unit, unit_nbytes = byte_unit(curve.nbytes_total)

    def series(label: str, points: Sequence[Point], **style: Any) -> Series:
        errors = [100 * (curve.relative(p.error) or 0.0) for p in points]
        known = [nan if recipe_curve.unknown else error for error in errors]
        return Series(label, [p.nbytes / unit_nbytes for p in points], known, **style)

    names = dict.fromkeys(p.strategy for p in curve.points)
    drawn = [series(name, curve.of(name)) for name in names]
    label = f"this plan: {own.strategy}, {size(own.nbytes)}, {percent(curve, own)}"
    drawn.append(series(label, [own], marker="o", color="red", line=""))
    if knee:
        label = f"knee: {size(knee.nbytes)}"
        drawn.append(series(label, [knee], marker="D", color="black", line=""))
    unknown = f", {recipe_curve.unknown}" if recipe_curve.unknown else ""
    axes = f"read of the experts, {unit}", "predicted loss, % of the update"
    title = f"{recipe_curve.recipe}: what a budget loses{unknown}"
    return panels_picture([[Panel(*axes, drawn, is_from_zero=True)]], title)
