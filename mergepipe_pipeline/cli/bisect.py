"""The command `bisect`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from mergepipe_pipeline.cli.common import Console, table, verb
from mergepipe_pipeline.text import visible

if TYPE_CHECKING:
    from mergepipe_pipeline.quality.bisection import Bisection


@click.command()
@click.argument("what", metavar="REF|RECIPE")
@click.option("--metric", help="The metric of the gate that counts (default: all of it).")
@click.option(
    "--most",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Candidates that are evaluated at most.",
)
@click.option("--yes", is_flag=True, help="Begin without asking whether the cost is right.")
@verb
def bisect(console: Console, what: str, metric: str | None, most: int, yes: bool) -> None:
    """Find the expert, and its layers, that made a recipe's result fail its gate.

    What changed since the live snapshot is undone in parts, by an expert's previous version where
    its bytes can be had, else without it; each candidate is merged and measured, and none is
    published. The cost is told first. Run again after an interruption, it goes on where it was.
    """
    from mergepipe_pipeline.verbs.bisect import bisect as run
    from mergepipe_pipeline.verbs.bisect import prepare

    prepared = prepare(console.warehouse, what, metric=metric, most=most)
    changes, cost = prepared.regression.changes, prepared.cost

    def tell(line: str) -> None:
        if not console.as_json:
            click.echo(visible(line), err=True)

    tell(f"{changes.summary}\nat most {cost.summary}")
    if not yes:
        click.confirm("Begin?", abort=True, err=True)
    done = run(console.warehouse, prepared, progress=console.progress, tell=tell)
    console.show(
        {**done.to_json(), "changes": asdict(changes), "cost": asdict(cost)}, *_lines(done)
    )


def _lines(done: Bisection) -> Sequence[str]:
    rows = [
        (
            ", ".join(c.undone),
            "all" if c.layers is None else ", ".join(c.layers),
            "yes" if c.passed else "no",
            (c.snapshot_id or "-")[:16],
            ", ".join(f"{name} {value:.10g}" for name, value in c.metrics.items()) or c.summary,
        )
        for c in done.candidates
    ]
    conclusion = [done.summary]
    if done.suspect is not None:
        conclusion.append(f"keep it out until it changes: mergepipe quarantine {done.suspect}")
    return [*table(("undone", "in layers", "passes", "snapshot", "metrics"), rows), "", *conclusion]
