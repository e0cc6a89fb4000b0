"""The command `ls`: tables of what a warehouse holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click

from mergepipe_pipeline.cli.common import Console, table, verb
from mergepipe_pipeline.cli.evaluation import metrics_text
from mergepipe_pipeline.text import percent, size

_CHECKPOINTS = (
    "checkpoint",
    "version",
    "base",
    "tags",
    "tensors",
    "size",
    "analysed",
    "pack",
    "path",
)
_SNAPSHOTS = (
    "snapshot",
    "created",
    "recipe",
    "method",
    "size",
    "read of experts",
    "inputs",
    "metrics",
    "gate",
)
#: Inputs that a line of the table has room for.
_MOST_NAMES = 6


@click.command()
@verb
def ls(console: Console) -> None:
    """List checkpoints, snapshots and refs."""
    from mergepipe_pipeline.verbs.ls import ls as run

    listing = run(console.existing)
    refs = [(r["ref"], r["version"], r["snapshot_id"][:16], r["reason"]) for r in listing.refs]
    console.show(
        asdict(listing),
        *table(_CHECKPOINTS, list(map(_checkpoint, listing.checkpoints))),
        "",
        *table(_SNAPSHOTS, list(map(_snapshot, listing.snapshots))),
        "",
        *table(("ref", "version", "snapshot", "reason"), refs),
        *_quarantined_lines(listing.quarantined),
        *_damaged_lines(listing.damaged),
    )


def _checkpoint(c: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        c["name"],
        c["version"],
        c["base"] or "-",
        ", ".join(c["tags"]) or "-",
        c["tensors"],
        size(c["nbytes"]),
        "yes" if c["analysed"] else "no",
        "-" if c["pack_nbytes"] is None else size(c["pack_nbytes"]),
        f"{c['root']} (moved to {c['moved_to']})" if c["moved_to"] else c["root"],
    )


def _snapshot(s: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        s["snapshot_id"][:16],
        s["created"],
        s["recipe"] or "-",
        s["method"],
        size(s["nbytes"]),
        _read_text(s["expert_bytes_planned"], s["expert_bytes_total"]),
        _few(s["inputs"]),
        "; ".join(metrics_text(e["metrics"]) for e in s["evaluations"]) or "-",
        "refused" if s["refused"] else "-",
    )


def _read_text(nbytes: int | None, of_nbytes: int | None) -> str:
    if nbytes is None:
        return "-"
    return f"{size(nbytes)}, {percent(nbytes / of_nbytes)}" if of_nbytes else size(nbytes)


def _few(names: Sequence[str]) -> str:
    """Names as far as there is room; the last is the base's, and stays."""
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    shown = names[: _MOST_NAMES - 2]
    return f"{', '.join(shown)} and {len(names) - len(shown) - 1} more, {names[-1]}"


def _quarantined_lines(quarantined: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        (q["name"], c["content"][:16], "yes" if q["is_now"] else "no", *_decision(c))
        for q in quarantined
        for c in q["contents"]
    ]
    headers = ("quarantined", "content", "kept out now", "since", "by", "reason")
    return ["", *table(headers, rows)] if rows else []


def _decision(content: Mapping[str, Any]) -> tuple[str, str, str]:
    return content["decided"], content["by"] or "-", content["reason"]


def _damaged_lines(damaged: Sequence[Mapping[str, Any]]) -> list[str]:
    if not damaged:
        return []
    rows = [(d["kind"], d["name"], d["reason"]) for d in damaged]
    return ["", *table(("damaged", "name", "reason"), rows)]
