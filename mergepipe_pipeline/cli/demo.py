"""The command `demo`: the whole mission on a family trained on the spot."""

from __future__ import annotations

from dataclasses import asdict, replace

import click

from mergepipe_pipeline.cli.common import Console, table, verb
from mergepipe_pipeline.errors import MergePipeError


@click.command()
@verb
def demo(console: Console) -> None:
    """Train a small family, land it expert by expert, merge under budgets, score the results."""
    name = "demo-warehouse" if console.home_dir is None else console.home_dir
    chosen = replace(console, home_dir=name)
    warehouse = chosen.place  # refused before the libraries of the demo load, for seconds
    try:
        from mergepipe_pipeline.demo.demo_run import run_demo
    except ModuleNotFoundError as error:
        raise MergePipeError(
            "The demo needs a package that is not installed",
            found=f"no module {error.name}",
            next_step="pip install 'mergepipe-pipeline[demo]' (in a clone: '.[demo]')",
        ) from error

    result = run_demo(warehouse.ensure(), lambda line: click.echo(line, err=chosen.as_json))
    skills = list(result.rows[0].accuracy)
    rows = [
        (
            r.name,
            *(f"{100 * r.accuracy[s]:.0f} %" for s in skills),
            f"{100 * sum(r.accuracy.values()) / len(skills):.0f} %",
            "" if r.expert_bytes_read is None else f"{r.expert_bytes_read / 1e6:.2f} MB",
            "" if r.relative_error is None else f"{r.relative_error:.3f}",
        )
        for r in result.rows
    ]
    headers = ("model", *skills, "mean", "expert bytes", "error to full")
    chosen.show(
        asdict(result),
        "",
        *table(headers, rows),
        "",
        f"when the last expert landed: {result.layers_reused} layers reused, "
        f"{result.layers_executed} merged anew",
        f"done in {result.seconds:.0f} s; everything is in {result.warehouse}",
        f"see the runs and the lineage in Dagster: mergepipe ui --home {result.warehouse}",
    )
