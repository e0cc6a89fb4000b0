"""The command `quarantine`."""

from __future__ import annotations

from dataclasses import asdict

import click

from mergepipe_pipeline.cli.common import Console, verb


@click.command()
@click.argument("name")
@click.option("--reason", default="by hand", show_default=True, help="What to tell who asks why.")
@click.option("--release", is_flag=True, help="Let this content in again.")
@verb
def quarantine(console: Console, name: str, reason: str, release: bool) -> None:
    """Keep an expert's present content out of standing recipes until it changes.

    Recipes that name it wait, and what their refs name stays live.
    """
    from mergepipe_pipeline.verbs.quarantine import quarantine as run

    done = run(console.warehouse, name, reason=reason, release=release, progress=console.progress)
    state = "kept out" if done.is_kept_out else "let in"
    console.show(asdict(done), f"{done.name}, content {done.content[:16]}: {state}, {done.reason}")
