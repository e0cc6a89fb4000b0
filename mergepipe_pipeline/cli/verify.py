"""The commands `verify` and `repair`: what is wrong with a snapshot or a warehouse, and mending."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from mergepipe_pipeline.cli.common import Console, counted, verb
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.text import size

if TYPE_CHECKING:
    from mergepipe_pipeline.integrity.auditor import Finding, Scope
    from mergepipe_pipeline.verbs.verify import Report

_SCOPES: tuple[Scope, ...] = ("structure", "digests", "lineage", "inputs")
_INPUTS: tuple[Scope, ...] = ("inputs",)


@click.command()
@click.argument("what", required=False)
@click.option("--all", "everything", is_flag=True, help="Verify the whole warehouse.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(_SCOPES),
    help="With --all: only this (several times: only these). structure: every record; digests: "
    "every byte of every result; lineage: records against each other; inputs: every byte of every "
    "registered checkpoint.",
)
@click.option("--fresh", is_flag=True, help="With --all: do not go on where a killed run was.")
@click.option("--inputs", is_flag=True, help="Also hash what the snapshot was merged from.")
@verb
def verify(
    console: Console,
    what: str | None,
    everything: bool,
    scopes: Sequence[Scope],
    fresh: bool,
    inputs: bool,
) -> None:
    """Re-hash every byte of a snapshot (id, prefix, ref, REF@VERSION, a folder of --out), or with
    --all of all.

    Exit 0, or name what is wrong and exit 19.
    """
    if everything == (what is not None) or (everything and inputs):
        raise click.UsageError("Give a snapshot (with --inputs or not), or --all.")
    if (scopes or fresh) and not everything:
        raise click.UsageError("--scope and --fresh go with --all.")
    if what is not None:
        _verify_snapshot(console, what, inputs=inputs)
        return
    from mergepipe_pipeline.verbs.verify import verify_all

    report = verify_all(console.existing, scopes or _SCOPES, fresh=fresh, progress=console.progress)
    _show(console, report)


def _verify_snapshot(console: Console, what: str, *, inputs: bool) -> None:
    from mergepipe_pipeline.verbs.verify import verify as run

    done = run(console.existing, what, console.progress)
    sentence = f"ok: {done.files} files, {size(done.nbytes)} checked"
    if not inputs:
        console.show({"ok": True, **asdict(done)}, sentence)
        return
    from mergepipe_pipeline.execution.lookup import snapshot_named
    from mergepipe_pipeline.verbs.verify import verify_all

    snapshot = snapshot_named(console.existing, what)
    report = verify_all(console.existing, _INPUTS, inputs_of=snapshot, progress=console.progress)
    _show(console, report, asdict(done), sentence)


def _show(
    console: Console, report: Report, snapshot: dict[str, Any] | None = None, *lines: str
) -> None:
    console.warn(*report.notes)
    resumed = f", {report.resumed_files} known from before" if report.resumed_files else ""
    verdict = "ok" if report.ok else counted(len(report.findings), "finding")
    summary = (
        f"{verdict}: {', '.join(report.scopes)}; "
        f"{report.files} checks, {size(report.nbytes)} hashed{resumed}"
    )
    shown = {"ok": report.ok, **(snapshot or {}), **asdict(report)}
    console.show(shown, *lines, *map(finding_line, report.findings), summary)
    if not report.ok:
        sys.exit(CorruptionError.exit_code)


def finding_line(finding: Finding) -> str:
    """A finding for people."""
    return f"{finding.scope}: {finding}"


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would be taken away.")
@verb
def repair(console: Console, dry_run: bool) -> None:
    """Take away what is wrong and can be found again, and learn it again where inputs are there.

    Catalog, plans, actions and objects go to the warehouse's quarantine folder. Damaged versions of
    names and refs are set aside: the newest good one counts. Snapshots are never touched; what is
    wrong with them is listed, with exit 19. Inputs are not read: `mergepipe verify --all` does.
    """
    from mergepipe_pipeline.verbs.repair import repair as run

    done = run(console.existing, dry_run=dry_run, progress=console.progress)
    console.warn(*done.not_made)
    verb_done = "would take away" if dry_run else "took away"
    where = f", to {done.quarantine}" if done.quarantine else ""
    console.show(
        {"ok": not done.left, **asdict(done)},
        f"{verb_done} {counted(len(done.taken), 'item')}{where}",
        *(f"  {path}" for path in done.taken),
        *(f"made again: {label}" for label in done.made),
        *done.aside,
        *(f"left for you: {finding_line(f)}" for f in done.left),
        f"looked at {', '.join(done.scopes)}; not at inputs, which `mergepipe verify --all --scope "
        "inputs` reads",
    )
    if done.left:
        sys.exit(CorruptionError.exit_code)
