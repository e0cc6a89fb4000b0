"""The command `conflicts`: tables for people, JSON and CSV for machines, and a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mergepipe_pipeline.cli.common import Answer, Console, answer, recipe_folder, table

if TYPE_CHECKING:
    from mergepipe_pipeline.analysis.conflict_report import ConflictReport


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
@answer(
    csv="Write every pair in every place here.", picture="Write heat maps of all stages (PNG) here."
)
def conflicts(console: Console, recipe: str, by: str, most: int) -> Answer:
    """Show how a recipe's experts agree and differ, from statistics alone.

    Experts that were not analysed yet are read once; then no weight is read. Figures are of deltas
    as they are, without the recipe's weights; errors are standard errors.
    """
    from mergepipe_pipeline.resolution.recipe_text import load_recipe
    from mergepipe_pipeline.verbs.conflicts import conflicts as run
    from mergepipe_pipeline.verbs.conflicts import pair_records, picture, record

    reports = run(
        console.warehouse,
        load_recipe(recipe, console.warehouse),
        relative_to=recipe_folder(recipe),
        progress=console.progress,
    )
    lines = [line for stage, report in reports.items() for line in _lines(stage, report, by, most)]
    nothing = ["nothing to compare: no model is merged into a checkpoint as its base"]
    return Answer(
        {"stages": [record(stage, report, by, most) for stage, report in reports.items()]},
        lines or nothing,
        pair_records(reports, by),
        (lambda: picture(reports, by)) if reports else None,
    )


def _lines(stage: str, report: ConflictReport, by: str, most: int) -> list[str]:
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
