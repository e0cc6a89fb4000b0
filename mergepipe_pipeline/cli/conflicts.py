"""The command `conflicts`: tables for people, JSON and CSV for machines, and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mergepipe_pipeline.cli.common import Console, recipe_folder, table, verb, write_csv, write_file

if TYPE_CHECKING:
    from mergepipe_pipeline.analysis.conflict_report import ConflictReport

#: Pairs listed as the most conflicting and as the most redundant, unless `--most` says otherwise.
_MOST = 10


@click.command()
@click.argument("recipe", type=click.Path())
@click.option(
    "--by",
    type=click.Choice(["layer", "tensor"]),
    default="layer",
    show_default=True,
    help="Places to compare in.",
)
@click.option("--most", default=_MOST, show_default=True, help="Pairs listed as the worst.")
@click.option("--csv", "csv_file", type=click.Path(), help="Write every pair in every place here.")
@click.option("--picture", "png_file", type=click.Path(), help="Write heat maps (PNG) here.")
@verb
def conflicts(
    console: Console, recipe: str, by: str, most: int, csv_file: str | None, png_file: str | None
) -> None:
    """Show how a recipe's experts agree and differ, from statistics alone.

    Experts that were not analysed yet are read once; then no weight is read. Figures are of deltas
    as they are, without the recipe's weights; errors are standard errors.
    """
    from mergepipe_pipeline.report.conflict_tables import pair_records, record
    from mergepipe_pipeline.resolution.recipe_text import load_recipe
    from mergepipe_pipeline.verbs.conflicts import conflicts as run

    reports = run(
        console.warehouse,
        load_recipe(recipe, console.warehouse),
        relative_to=recipe_folder(recipe),
        progress=console.progress,
    )
    if csv_file:
        write_csv(
            csv_file,
            [row for stage, report in reports.items() for row in pair_records(stage, report, by)],
        )
    if png_file:
        _write_pictures(Path(png_file), reports, by)
    lines = [line for stage, report in reports.items() for line in _lines(stage, report, by, most)]
    console.show(
        {"stages": [record(stage, report, by, most) for stage, report in reports.items()]},
        *(lines or ["nothing to compare: no model is merged into a checkpoint as its base"]),
    )


def _lines(stage: str, report: ConflictReport, by: str, most: int) -> list[str]:
    from mergepipe_pipeline.report import conflict_tables as tables

    whole, experts = report.whole, report.experts
    cosine_error = tables.largest_error(report, "cosine_error")
    sign_error = tables.largest_error(report, "sign_error")
    interference = tables.percent(whole.interference, whole.interference_error)
    lines = [
        f"{stage}: {len(experts)} experts, {len(report.tensors)} tensors in "
        f"{len(report.layers)} layers",
        f"  interference {interference} of Σ‖δ‖² is lost in the plain sum (below 0: gained)",
        "",
        f"cosine of deltas, standard errors up to {cosine_error:.2g}",
        *table(("expert", *experts), tables.matrix_rows(report, "cosine")),
        "",
        f"share of elements moved the same way, standard errors up to {sign_error:.2g}",
        *table(("expert", *experts), tables.matrix_rows(report, "sign_agreement")),
        "",
        *table(tables.place_headers(by), tables.place_rows(report, by)),
    ]
    for title, pairs in (
        ("most conflicting", report.conflicting(by)),
        ("most redundant", report.redundant("all")),
    ):
        rows = tables.pair_rows(pairs[:most])
        lines += ["", *([title, *table(tables.PAIR_HEADERS, rows)] if rows else [f"{title}: none"])]
    return [*lines, ""]


def _write_pictures(target: Path, reports: Mapping[str, ConflictReport], by: str) -> None:
    """One file; of several stages one each, with the stage before the suffix."""
    from mergepipe_pipeline.report.conflict_tables import picture

    for stage, report in reports.items():
        file = (
            target if len(reports) == 1 else target.with_stem(f"{target.stem}-{Path(stage).name}")
        )
        write_file(file, picture(report, by, stage))
