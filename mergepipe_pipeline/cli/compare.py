"""The command `compare`: how near a merge under a budget came to the full one."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from mergepipe_pipeline.cli.common import Console, table, verb, write_csv
from mergepipe_pipeline.text import percent

if TYPE_CHECKING:
    from mergepipe_pipeline.report.comparison import Comparison


@click.command()
@click.argument("snapshot")
@click.argument("full", required=False)
@click.option("--csv", "csv_file", type=click.Path(), help="Write every layer here.")
@verb
def compare(console: Console, snapshot: str, full: str | None, csv_file: str | None) -> None:
    """Measure how far a snapshot is from the full merge, or from another snapshot FULL.

    Both are read once; the result is remembered and stands in `explain snapshot` from then on.
    Without FULL the snapshot of the same recipe without a budget is looked for.
    """
    from mergepipe_pipeline.report.explain_tables import layer_records
    from mergepipe_pipeline.verbs.compare import compare as run

    comparison = run(console.existing, snapshot, full, console.progress)
    records = layer_records(comparison)
    if csv_file:
        write_csv(csv_file, records)
    *layers, whole = records
    console.show(
        {
            **asdict(comparison),
            "layers": layers,
            **{k: v for k, v in whole.items() if k != "layer"},
        },
        *comparison_lines(comparison),
    )


def comparison_lines(comparison: Comparison) -> list[str]:
    """A table with a row per layer, and one for all."""
    rows = [
        (
            x.layer,
            f"{x.error:.4g}",
            "-" if x.update is None else f"{x.update:.4g}",
            percent(x.relative),
        )
        for x in (*comparison.layers, comparison.whole)
    ]
    return [
        "distance (L2) from the full merge, as written",
        *table(("layer", "error", "update", "error of the update"), rows),
    ]
