"""The command `replay`: execute a merge again and compare bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from mergepipe_pipeline.cli.common import Console, verb
from mergepipe_pipeline.text import size

_COUNT = click.IntRange(min=1)


def _inputs(ctx: click.Context, option: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    pairs = [value.partition("=") for value in values]
    for name, _, path in pairs:
        if not name or not path:
            raise click.BadParameter(f"expected NAME=PATH, found {name!r}.", ctx, option)
    return {name: path for name, _, path in pairs}


@click.command()
@click.argument("snapshot")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="NAME=PATH",
    callback=_inputs,
    help="Where the input of this name is now; may be given several times.",
)
@click.option("--keep", type=click.Path(), help="Keep what is made: the folder of a new warehouse.")
@click.option("--threads", type=_COUNT, help="Threads for arithmetic and reading.")
@verb
def replay(
    console: Console, snapshot: str, inputs: dict[str, str], keep: str | None, threads: int | None
) -> None:
    """Merge a snapshot again from its own record, without any cache, and compare every bit.

    SNAPSHOT is an id, a prefix, a ref, REF@VERSION, or the folder of a snapshot. Its inputs are
    found by name or where they were, and must have the content that was merged. Needs room for the
    result once more: in the warehouse, or in the folder that TMPDIR names (else /tmp) where the
    warehouse cannot be written.
    """
    from mergepipe_pipeline.engine.options import EngineOptions
    from mergepipe_pipeline.verbs.replay import replay as run

    done = run(
        console.existing,
        snapshot,
        inputs=inputs,
        keep=Path(keep) if keep else None,
        options=EngineOptions.from_settings(threads=threads),
        progress=console.progress,
    )
    console.show(
        {"same_bits": True, **asdict(done), "inputs": dict(done.inputs)},
        f"same bits: {done.layers} layers, {done.tensors} tensors, {size(done.nbytes)}, and the "
        f"same snapshot {done.snapshot_id}",
    )
