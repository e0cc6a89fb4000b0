"""The command `curve`: what every budget would lose."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from mergepipe_pipeline.cli.common import Answer, Console, answer, table
from mergepipe_pipeline.cli.merging import egress_lines, of_recipe, planning_options
from mergepipe_pipeline.text import size

if TYPE_CHECKING:
    from mergepipe_pipeline.verbs.curve import RecipeCurve


def _shares(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, ...]:
    """`1,2.5,50` as shares. Raises BadParameter."""
    if value is None:
        return ()
    try:
        shares = tuple(float(part.strip().removesuffix("%")) / 100 for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of percents like 1,5,25") from None
    if not all(0 <= share <= 1 for share in shares):
        raise click.BadParameter("percents go from 0 to 100")
    return shares


@click.command()
@click.argument("recipe", type=click.Path())
@planning_options
@click.option("--at", "shares", callback=_shares, help="Budgets in percent, such as 1,5,25.")
@answer(csv="Write every point here.", picture="Write the curves (PNG) here.")
def curve(console: Console, recipe: str, shares: tuple[float, ...], **planning: Any) -> Answer:
    """Predict what every budget would lose, for all strategies, from statistics alone.

    Experts that were not analysed yet are read once; then no weight is read. The knee is where the
    curve of the recipe's strategy hangs farthest below the straight line between its ends: bytes
    before it save more than the average, bytes after it less.
    """
    from mergepipe_pipeline.planner.budget_curve import SHARES
    from mergepipe_pipeline.verbs.curve import curve as run
    from mergepipe_pipeline.verbs.curve import picture, records

    given = {"progress": console.progress, "shares": shares or SHARES}
    recipe_curve = of_recipe(console, recipe, planning, run, **given)
    console.warn(*recipe_curve.warnings)
    rows = records(recipe_curve.curve)
    *points, chosen = rows
    return Answer(
        {
            "recipe": recipe_curve.recipe,
            "expert_bytes_total": recipe_curve.curve.nbytes_total,
            "update_norm": recipe_curve.curve.update_norm,
            "analysed": list(recipe_curve.read),
            "knee": next((p for p in points if p["is_knee"]), None),
            "chosen": {**chosen, "bound_note": recipe_curve.bound_note},
            "points": points,
            "egress": [asdict(e) for e in recipe_curve.egress],
        },
        [*_lines(recipe_curve), *egress_lines(recipe_curve.egress, "download  ")],
        rows,
        lambda: picture(recipe_curve),
    )


def _lines(recipe_curve: RecipeCurve) -> list[str]:
    from mergepipe_pipeline.verbs.curve import bound_percent, percent, rows_of

    curve = recipe_curve.curve
    own, knee = curve.chosen, curve.knee
    analysed = [f"analysed first: {', '.join(recipe_curve.read)}"] if recipe_curve.read else []
    if recipe_curve.unknown:
        return [
            *analysed,
            f"{recipe_curve.recipe}: predicted error of a budget: {recipe_curve.unknown}",
        ]
    headers, rows = rows_of(curve)
    allowed = "" if own.budget_bytes is None else f" of {size(own.budget_bytes)} allowed"
    return [
        *analysed,
        f"{recipe_curve.recipe}: predicted error of a budget, in percent of the full update "
        f"({curve.update_norm:.4g} in L2, {size(curve.nbytes_total)} of expert bytes)",
        "",
        *table(headers, rows),
        "",
        f"knee    {size(knee.nbytes)} read, {percent(curve, knee)}"
        if knee
        else "knee    none: the curve is nearly straight",
        f"chosen  {own.strategy}, {size(own.nbytes)} read{allowed}, "
        f"{percent(curve, own)}, bound {bound_percent(curve, own)} ({recipe_curve.bound_note})",
    ]
