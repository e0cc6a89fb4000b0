"""The command `diff`: what changed from one snapshot to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from mergepipe_pipeline.cli.common import Answer, Console, answer, table
from mergepipe_pipeline.text import percent

if TYPE_CHECKING:
    from mergepipe_pipeline.verbs.diff import Changed, Difference, LayerChange, TensorChange

_COLUMNS = ("state", "tensors", "elements changed", "distance (L2)", "of before", "largest")


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
    tensors = [_record(t) for t in difference.tensors]
    shown = {
        **asdict(difference),
        **{
            kind: [{**asdict(c), "state": c.state} for c in getattr(difference, kind)]
            for kind in ("inputs", "settings", "files")
        },
        "layers": [_record(x) for x in difference.layers],
        "tensors": tensors,
        "whole": _record(difference.whole),
    }
    return Answer(shown, _lines(difference, by), tensors)


def _record(row: LayerChange | TensorChange) -> dict[str, Any]:
    return {**asdict(row), "relative": row.relative}


def _lines(difference: Difference, by: str) -> list[str]:
    rows: list[Any] = list(difference.layers)
    if by == "tensor":
        rows = [t for t in difference.tensors if t.state != "same"]
    same = sum(x.state == "same" for x in difference.layers)
    return [
        f"{difference.before[:16]} -> {difference.after[:16]}: {same} of "
        f"{len(difference.layers)} layers are the same bytes",
        *_changed(difference.inputs, 16),
        *_changed(difference.settings, 40),
        *_changed(difference.files, 16),
        *(f"  {line}" for line in difference.recipe),
        "",
        *table(
            (by, *_COLUMNS),
            [_row(x) for x in (*rows, *[difference.whole] * bool(difference.tensors))],
        ),
    ]


def _changed(rows: Sequence[Changed], width: int) -> list[str]:
    return [
        f"  {r.kind:8} {r.state:8} {r.name}: {(r.before or '-')[:width]} -> "
        f"{(r.after or '-')[:width]}"
        for r in rows
    ]


def _row(x: Any) -> tuple[str, ...]:
    """A layer or a tensor as cells."""
    is_layer = hasattr(x, "tensors")
    share = x.changed_elems / x.numel if x.numel else 0.0
    return (
        x.layer if is_layer else x.tensor,
        x.state,
        f"{x.tensors_changed} of {x.tensors}" if is_layer else "1",
        f"{x.changed_elems} ({percent(share)})",
        _number(x.l2),
        percent(x.relative),
        _number(x.max_abs),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
