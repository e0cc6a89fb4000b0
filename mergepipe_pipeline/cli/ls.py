"""The command `ls`: tables of what a warehouse holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click

from mergepipe_pipeline.cli.common import Console, cells, column_table, verb
from mergepipe_pipeline.cli.evaluation import metrics_text
from mergepipe_pipeline.text import percent, size

_Row = Mapping[str, Any]
#: What the tables show under their headers.
_CHECKPOINTS: dict[str, Callable[[_Row], Any]] = {
    "checkpoint": lambda c: c["name"],
    "version": lambda c: c["version"],
    "base": lambda c: c["base"] or "-",
    "tags": lambda c: ", ".join(c["tags"]) or "-",
    "tensors": lambda c: c["tensors"],
    "size": lambda c: size(c["nbytes"]),
    "analysed": lambda c: "yes" if c["analysed"] else "no",
    "pack": lambda c: "-" if c["pack_nbytes"] is None else size(c["pack_nbytes"]),
    "path": lambda c: f"{c['root']} (moved to {c['moved_to']})" if c["moved_to"] else c["root"],
}
_SNAPSHOTS: dict[str, Callable[[_Row], Any]] = {
    "snapshot": lambda s: s["snapshot_id"][:16],
    "created": lambda s: s["created"],
    "recipe": lambda s: s["recipe"] or "-",
    "method": lambda s: s["method"],
    "size": lambda s: size(s["nbytes"]),
    "read of experts": lambda s: _read_text(s["expert_bytes_planned"], s["expert_bytes_total"]),
    "inputs": lambda s: _few(s["inputs"]),
    "metrics": lambda s: "; ".join(metrics_text(e["metrics"]) for e in s["evaluations"]) or "-",
    "gate": lambda s: "refused" if s["refused"] else "-",
}
_REFS: dict[str, Callable[[_Row], Any]] = {
    "ref": lambda r: r["ref"],
    "version": lambda r: r["version"],
    "snapshot": lambda r: r["snapshot_id"][:16],
    "reason": lambda r: r["reason"],
}
_QUARANTINED: dict[str, Callable[[_Row], Any]] = {
    "quarantined": lambda q: q["name"],
    "content": lambda q: q["content"][:16],
    "kept out now": lambda q: "yes" if q["is_now"] else "no",
    "since": lambda q: q["decided"],
    "by": lambda q: q["by"] or "-",
    "reason": lambda q: q["reason"],
}
_DAMAGED: dict[str, Callable[[_Row], Any]] = {
    "damaged": lambda d: d["kind"],
    "name": lambda d: d["name"],
    "reason": lambda d: d["reason"],
}
#: Inputs that a line of the table has room for.
_MOST_NAMES = 6


@click.command()
@verb
def ls(console: Console) -> None:
    """List checkpoints, snapshots and refs."""
    from mergepipe_pipeline.verbs.ls import ls as run

    listing = run(console.existing)
    console.show(
        asdict(listing),
        *column_table(listing.checkpoints, _CHECKPOINTS),
        "",
        *column_table(listing.snapshots, _SNAPSHOTS),
        "",
        *column_table(listing.refs, _REFS),
        *cells([{**q, **c} for q in listing.quarantined for c in q["contents"]], _QUARANTINED),
        *cells(listing.damaged, _DAMAGED),
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
