"""The command `demo`: the whole mission on a family trained on the spot."""

from __future__ import annotations

import click

from mergepipe_pipeline.cli.common import Console, verb


@click.command()
@verb
def demo(console: Console) -> None:
    """Train a small family, land it expert by expert, merge under budgets, score the results."""
    from mergepipe_pipeline.demo.run import run_demo

    run_demo(console)
