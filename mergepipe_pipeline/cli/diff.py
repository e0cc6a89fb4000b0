"""The command `diff`: what changed from one snapshot to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from mergepipe_pipeline.cli.common import Answer, Console, answer, column_table
from mergepipe_pipeline.text import four_digits, percent

if TYPE_CHECKING:
    from mergepipe_pipeline.verbs.diff import Change, Changed, Difference

_COLUMNS: dict[str, Callable[[Change], str]] = {
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
@click.argument("before")
@click.argument("after")
@click.option("--by", type=click.Choice(["layer", "tensor"]), default="layer", show_default=True)
@answer(csv="Write every tensor that differs here.")
def diff(console: Console, before: str, after: str, by: str) -> Answer:
    """Show what changed from snapshot BEFORE to AFTER: inputs, settings, files, weights.

    Each is an id, a prefix, a ref, REF@VERSION, or the folder of a snapshot. Layers that both share
    are not read.
    """
    from mergepipe_pipeline.verbs.diff import diff as run

    difference = run(console.existing, before, after, console.progress)
    tensors = [t.record for t in difference.tensors]
    shown = {
        **asdict(difference),
        **{
            kind: [{**asdict(c), "state": c.state} for c in getattr(difference, kind)]
            for kind in ("inputs", "settings", "files")
        },
        "layers": [x.record for x in difference.layers],
        "tensors": tensors,
        "whole": difference.whole.record,
    }
    return Answer(shown, _lines(difference, by), tensors)


def _lines(difference: Difference, by: str) -> list[str]:
    tensors = [t for t in difference.tensors if t.state != "same"]
    rows = tensors if by == "tensor" else difference.layers
    same = sum(x.state == "same" for x in difference.layers)
    return [
        f"{difference.before[:16]} -> {difference.after[:16]}: {same} of "
        f"{len(difference.layers)} layers are the same bytes",
        *_changed(difference.inputs, 16),
        *_changed(difference.settings, 40),
        *_changed(difference.files, 16),
        *(f"  {line}" for line in difference.recipe),
        "",
        *column_table(
            [*rows, *[difference.whole] * bool(difference.tensors)],
            {by: lambda x: x.tensor or x.layer, **_COLUMNS},
        ),
    ]


def _changed(rows: Sequence[Changed], width: int) -> list[str]:
    return [
        f"  {r.kind:8} {r.state:8} {r.name}: {(r.before or '-')[:width]} -> "
        f"{(r.after or '-')[:width]}"
        for r in rows
    ]
