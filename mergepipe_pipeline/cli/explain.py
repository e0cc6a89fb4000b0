"""Commands that say what merges read, lose and change, as `explain`, `diff` and `curve`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from mergepipe_pipeline.cli.common import (
    Console,
    cells,
    column_table,
    picture_option,
    recipe_folder,
    section,
    table,
    verb,
    write_file,
)
from mergepipe_pipeline.cli.evaluation import evaluation_lines, evaluation_records
from mergepipe_pipeline.cli.merging import egress_lines, of_recipe, plan_lines, planning_options
from mergepipe_pipeline.text import four_digits, percent, size

if TYPE_CHECKING:
    from mergepipe_pipeline.analysis.conflict_report import ConflictReport
    from mergepipe_pipeline.domain.snapshot import Snapshot
    from mergepipe_pipeline.verbs.compare import Change, Changed, Comparison, Difference
    from mergepipe_pipeline.verbs.curve import RecipeCurve
    from mergepipe_pipeline.verbs.explain import Explanation, Figure, LevelShare, OperatorChoice


#: What the tables of levels and of operators show under their headers.
_LEVELS: dict[str, Callable[[LevelShare], Any]] = {
    "level": lambda x: x.level,
    "blocks": lambda x: x.blocks,
    "elements": lambda x: x.elems,
    "read": lambda x: size(x.nbytes),
}
_TENSORS: dict[str, Callable[[OperatorChoice], Any]] = {
    "tensor": lambda t: t.tensor,
    "operator": lambda t: t.operator,
    "variant": lambda t: t.variant or "-",
    "reason": lambda t: t.reason or "-",
}
_CHANGES: dict[str, Callable[[Change], str]] = {
    "state": lambda x: x.state,
    "tensors": lambda x: f"{x.tensors_changed} of {x.tensors}" if x.tensor is None else "1",
    "elements changed": lambda x: (
        f"{x.changed_elems} ({percent(x.changed_elems / max(1, x.numel))})"
    ),
    "distance (L2)": lambda x: four_digits(x.l2),
    "of before": lambda x: percent(x.relative),
    "largest": lambda x: four_digits(x.max_abs),
}


@click.command()
@click.argument("what")
@click.option(
    "--by",
    type=click.Choice(["expert", "layer", "tensor"]),
    default="expert",
    show_default=True,
    help="How to group what a plan reads.",
)
@picture_option("a heat map of what is read")
@verb
def explain(console: Console, what: str, by: str, png_file: str | None) -> None:
    """Show what a plan reads of each expert, and what that loses.

    WHAT is a plan, a snapshot or a ref. By tensor also which operator makes each. Of a snapshot,
    what was expected stands beside what came, and how far it is from the full merge once `compare`
    has measured that.
    """
    from mergepipe_pipeline.verbs import explain as verbs

    explanation = verbs.explain(console.existing, what)
    console.warn(*explanation.warnings)
    plan, snapshot = explanation.plan, explanation.snapshot
    shares = verbs.read_shares(plan, by) if plan else []
    levels = verbs.level_shares(plan) if plan else []
    tensors = verbs.operator_choices(plan) if plan and by == "tensor" else []
    selected = plan.request.selected if plan else ()
    expected = verbs.figures(explanation)
    measured = evaluation_records(console.existing, snapshot.snapshot_id) if snapshot else []
    data = {
        "plan_id": plan.plan_id if plan else None,
        "snapshot_id": snapshot.snapshot_id if snapshot else None,
        "method": plan.method if plan else None,
        "made_by": explanation.provenance.get("made_by"),
        "estimates": asdict(plan.estimates) if plan else None,
        "selected": [asdict(s) for s in selected],
        "figures": [asdict(f) for f in expected],
        "shares": [asdict(s) for s in shares],
        "levels": [asdict(x) for x in levels],
        "tensors": [asdict(t) for t in tensors],
        "layers": explanation.comparison and explanation.comparison.records,
        "evaluations": measured,
    }
    lines = [
        *(_snapshot_lines(explanation, snapshot, expected) if snapshot else []),
        *(plan_lines(plan) if plan else []),
        *section(*verbs.shares_table(shares)),
        *cells(levels, _LEVELS),
        *cells(tensors, _TENSORS),
        *section(*verbs.selected_table(selected)),
        *evaluation_lines(measured),
    ]
    if png_file and plan:
        write_file(png_file, verbs.shares_picture(plan))
    console.show(data, *lines)


def _snapshot_lines(
    explanation: Explanation, snapshot: Snapshot, expected: list[Figure]
) -> list[str]:
    made = explanation.provenance
    head = f"snapshot {snapshot.snapshot_id}  "
    if made_by := made.get("made_by"):
        given = [(name, str(value)) for name, value in made_by["parameters"].items()]
        head += f"{made_by['verb']}, {made['created']}"
        return [head, "", *table(("parameter", "value"), given)]
    rows = []
    for f in expected:
        figures = (
            size(value) if "bytes" in f.figure and value is not None else four_digits(value)
            for value in (f.expected, f.realised)
        )
        rows.append((f.figure.replace("_", " "), *figures))
    distance = ["how far it is from the full merge: `mergepipe compare` measures it"]
    if explanation.is_full:
        distance = ["this is the full merge"]
    elif explanation.comparison:
        distance = _comparison_lines(explanation.comparison)
    head += f"{made['recipe_name']}, {snapshot.manifest.method}, {made['created']}"
    return [head, "", *table(("figure", "expected", "realised"), rows), "", *distance, ""]


@click.command()
@click.argument("snapshot")
@click.argument("full", required=False)
@verb
def compare(console: Console, snapshot: str, full: str | None) -> None:
    """Measure how far a snapshot is from the full merge or another.

    Both are read once; the result is remembered and stands in `explain` from then on. Without FULL
    the snapshot of the same recipe without a budget is looked for.
    """
    from mergepipe_pipeline.verbs.compare import compare as run

    comparison = run(console.existing, snapshot, full, console.progress)
    *layers, whole = comparison.records
    del whole["layer"]
    data = {**asdict(comparison), "layers": layers, **whole}
    console.show(data, *_comparison_lines(comparison))


def _comparison_lines(comparison: Comparison) -> list[str]:
    """A table with a row per layer, and one for all."""
    return [
        "distance (L2) from the full merge, as written",
        *column_table(
            (*comparison.layers, comparison.whole),
            {
                "layer": lambda x: x.layer,
                "error": lambda x: four_digits(x.error),
                "update": lambda x: four_digits(x.update),
                "error of the update": lambda x: percent(x.relative),
            },
        ),
    ]


@click.command()
@click.argument("before")
@click.argument("after")
@click.option("--by", type=click.Choice(["layer", "tensor"]), default="layer", show_default=True)
@verb
def diff(console: Console, before: str, after: str, by: str) -> None:
    """Show what changed from one snapshot to another.

    Each is an id, a prefix, a ref, REF@VERSION, or the folder of a snapshot. Layers that both share
    are not read.
    """
    from mergepipe_pipeline.verbs.compare import diff as run

    difference = run(console.existing, before, after, console.progress)
    shown = {
        **asdict(difference),
        "layers": [x.record for x in difference.layers],
        "tensors": [t.record for t in difference.tensors],
        "whole": difference.whole.record,
    }
    console.show(shown, *_diff_lines(difference, by))


def _diff_lines(difference: Difference, by: str) -> list[str]:
    tensors = [t for t in difference.tensors if t.state != "same"]
    rows = tensors if by == "tensor" else difference.layers
    same = sum(x.state == "same" for x in difference.layers)
    return [
        f"{difference.before[:16]} -> {difference.after[:16]}: {same} of "
        f"{len(difference.layers)} layers are the same bytes",
        *_changed_lines(difference.inputs, 16),
        *_changed_lines(difference.settings, 40),
        *_changed_lines(difference.files, 16),
        *(f"  {line}" for line in difference.recipe),
        "",
        *column_table(
            [*rows, *[difference.whole] * bool(difference.tensors)],
            {by: lambda x: x.tensor or x.layer, **_CHANGES},
        ),
    ]


def _changed_lines(rows: Sequence[Changed], width: int) -> list[str]:
    return [
        f"  {r.kind:8} {r.state:8} {r.name}: {(r.before or '-')[:width]} -> "
        f"{(r.after or '-')[:width]}"
        for r in rows
    ]


def _percents(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, ...]:
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
@click.option("--at", "shares", callback=_percents, help="Budgets in percent, such as 1,5,25.")
@picture_option("the curves")
@verb
def curve(
    console: Console,
    recipe: str,
    shares: tuple[float, ...],
    png_file: str | None,
    **planning: Any,
) -> None:
    """Predict what every budget would lose, from statistics alone.

    Experts that were not analysed yet are read once; then no weight is read. The knee is where the
    curve of the recipe's strategy hangs farthest below the straight line between its ends: bytes
    before it save more than the average, bytes after it less.
    """
    from mergepipe_pipeline.planner.budget_curve import SHARES
    from mergepipe_pipeline.verbs.curve import curve as run
    from mergepipe_pipeline.verbs.curve import picture, records

    given = {"progress": console.progress, "shares": shares or SHARES}
    recipe_curve = of_recipe(console.warehouse, recipe, planning, run, **given)
    console.warn(*recipe_curve.warnings)
    *points, chosen = records(recipe_curve.curve)
    if png_file:
        write_file(png_file, picture(recipe_curve))
    console.show(
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
        *_curve_lines(recipe_curve),
        *egress_lines(recipe_curve.egress, "download  "),
    )


def _curve_lines(recipe_curve: RecipeCurve) -> list[str]:
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


@click.command()
@click.argument("recipe", type=click.Path())
@click.option(
    "--by",
    type=click.Choice(["layer", "tensor"]),
    default="layer",
    show_default=True,
    help="Places to compare in.",
)
@click.option("--most", default=10, show_default=True, help="Pairs listed as the worst.")
@picture_option("heat maps of all stages")
@verb
def conflicts(console: Console, recipe: str, by: str, most: int, png_file: str | None) -> None:
    """Show how a recipe's experts agree and differ.

    Experts that were not analysed yet are read once; then no weight is read. Figures are of deltas
    as they are, without the recipe's weights; errors are standard errors.
    """
    from mergepipe_pipeline.resolution.recipe_text import load_recipe
    from mergepipe_pipeline.verbs.conflicts import conflicts as run
    from mergepipe_pipeline.verbs.conflicts import picture, record

    reports = run(
        console.warehouse,
        load_recipe(recipe, console.warehouse),
        relative_to=recipe_folder(recipe),
        progress=console.progress,
    )
    lines = [
        line
        for stage, report in reports.items()
        for line in _conflict_lines(stage, report, by, most)
    ]
    if png_file and reports:
        write_file(png_file, picture(reports, by))
    nothing = ["nothing to compare: no model is merged into a checkpoint as its base"]
    stages = [record(stage, report, by, most) for stage, report in reports.items()]
    console.show({"stages": stages}, *(lines or nothing))


def _conflict_lines(stage: str, report: ConflictReport, by: str, most: int) -> list[str]:
    from mergepipe_pipeline.verbs.conflicts import largest_error, percent, tables

    whole = report.whole
    lines = [
        f"{stage}: {len(report.experts)} experts, {len(report.tensors)} tensors in "
        f"{len(report.layers)} layers",
        f"  interference {percent(whole.interference, whole.interference_error)} of Σ‖δ‖² is lost "
        "in the plain sum (below 0: gained)",
        f"  standard errors up to {largest_error(report, 'cosine_error'):.2g} of cosines, "
        f"{largest_error(report, 'sign_error'):.2g} of the share that moved the same way",
        "",
    ]
    for title, (headers, rows) in tables(report, by, most).items():
        lines += [title, *table(headers, rows), ""] if rows else [f"{title}: none", ""]
    return lines
