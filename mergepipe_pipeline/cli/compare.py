"""The command `compare`: how near a merge under a budget came to the full one."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from mergepipe_pipeline.cli.common import Answer, Console, answer, column_table
from mergepipe_pipeline.text import four_digits, percent

if TYPE_CHECKING:
    from mergepipe_pipeline.verbs.compare import Comparison


@click.command()
@click.argument("snapshot")
@click.argument("full", required=False)
@answer(csv="Write every layer here.")
def compare(console: Console, snapshot: str, full: str | None) -> Answer:
    """Measure how far a snapshot is from the full merge, or from another snapshot FULL.

    Both are read once; the result is remembered and stands in `explain` from then on. Without FULL
    the snapshot of the same recipe without a budget is looked for.
    """
    from mergepipe_pipeline.verbs.compare import compare as run

    comparison = run(console.existing, snapshot, full, console.progress)
    *layers, whole = comparison.records
    del whole["layer"]
    data = {**asdict(comparison), "layers": layers, **whole}
    return Answer(data, comparison_lines(comparison), comparison.records)


def comparison_lines(comparison: Comparison) -> list[str]:
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
