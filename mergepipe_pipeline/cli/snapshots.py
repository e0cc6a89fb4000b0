"""Commands about results: `publish`, `history`, `rollback`, `gc`."""

from __future__ import annotations

import math
from dataclasses import asdict

import click

from mergepipe_pipeline.cli.common import Console, table, verb
from mergepipe_pipeline.text import size


@click.command()
@click.argument("snapshot")
@click.option("--ref", required=True, help="Name to publish under.")
@click.option("--reason", default="published", show_default=True)
@click.option("--expect", "expected", type=int, help="Refuse unless this is the current version.")
@verb
def publish(console: Console, snapshot: str, ref: str, reason: str, expected: int | None) -> None:
    """Make a ref name a snapshot, after checking every byte of it.

    SNAPSHOT is an id, a unique prefix of one, a ref, or REF@VERSION.
    """
    from mergepipe_pipeline.verbs.publish import publish as run

    warehouse, progress = console.existing, console.progress
    done = run(warehouse, snapshot, ref, reason=reason, expected=expected, progress=progress)
    _warn_of_kept_out(console, done.snapshot_id)
    console.show(asdict(done), f"{done.name} is version {done.number}: {done.snapshot_id}")


@click.command()
@click.argument("ref")
@verb
def history(console: Console, ref: str) -> None:
    """Show every version of a ref."""
    from mergepipe_pipeline.verbs.publish import history as run
    from mergepipe_pipeline.verbs.publish import is_collected

    refs = run(console.existing, ref)
    gone = [is_collected(console.existing, r) for r in refs]
    rows = [
        (r.number, r.snapshot_id, "collected" if g else "kept", r.reason)
        for r, g in zip(refs, gone, strict=True)
    ]
    console.show(
        [{**asdict(r), "collected": g} for r, g in zip(refs, gone, strict=True)],
        *table(("version", "snapshot", "files", "reason"), rows),
    )


@click.command()
@click.argument("ref")
@click.option("--to", type=int, help="Version to go back to (default: the last different one).")
@click.option("--reason", default="rollback", show_default=True)
@verb
def rollback(console: Console, ref: str, to: int | None, reason: str) -> None:
    """Publish an older version of a ref again."""
    from mergepipe_pipeline.verbs.publish import rollback as run

    done = run(console.existing, ref, to, reason)
    _warn_of_kept_out(console, done.snapshot_id)
    console.show(asdict(done), f"{done.name} is version {done.number}: {done.snapshot_id}")


def _warn_of_kept_out(console: Console, snapshot_id: str) -> None:
    from mergepipe_pipeline.snapshots.find import load_snapshot
    from mergepipe_pipeline.verbs.guard import kept_out_in

    snapshot = load_snapshot(console.existing.snapshots, snapshot_id)
    console.warn(*(str(decision) for decision in kept_out_in(console.existing, snapshot)))


def _finite(ctx: click.Context, parameter: click.Parameter, seconds: float | None) -> float | None:
    if seconds is not None and not math.isfinite(seconds):
        raise click.BadParameter(f"{seconds} is not a number of seconds.", ctx, parameter)
    return seconds


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would be removed, and write nothing.")
@click.option(
    "--older-than",
    "older_than_s",
    type=click.FloatRange(min=0),
    callback=_finite,
    show_default="3600; of a bucket 604800",
    help="Keep what nobody needs for this many seconds after its last use, so that a merge that is "
    "run again finds it. Merges that run now keep what they need, at any age.",
)
@click.option(
    "--keep-versions",
    type=click.IntRange(min=1),
    help="Remove results, too, that only versions of refs name which are not among the newest so "
    "many of any ref. Refs keep their history.",
)
@click.option(
    "--unpublished", is_flag=True, help="Remove results, too, that no ref has ever named."
)
@click.option(
    "--bucket",
    is_flag=True,
    help="Collect the bucket of MERGEPIPE_BUCKET instead: what no version of a ref there names.",
)
@verb
def gc(
    console: Console,
    dry_run: bool,
    older_than_s: float | None,
    keep_versions: int | None,
    unpublished: bool,
    bucket: bool,
) -> None:
    """Remove what nobody needs: old staging, stages, unreferenced objects and actions."""
    from mergepipe_pipeline.verbs.gc import AGE_S, BUCKET_AGE_S, collect, collect_bucket

    if bucket and (keep_versions or unpublished):
        raise click.UsageError("--bucket goes alone: all that a ref has ever named stays there.")
    home, is_default = console.existing, older_than_s is None and not bucket
    if bucket:
        age_s = BUCKET_AGE_S if older_than_s is None else older_than_s
        done = collect_bucket(home, older_than_s=age_s, dry_run=dry_run)
    else:
        age_s = AGE_S if older_than_s is None else older_than_s
        done = collect(
            home,
            older_than_s=age_s,
            keep_versions=keep_versions,
            unpublished=unpublished,
            dry_run=dry_run,
        )
    console.warn(*done.notes)
    verb_done = "would remove" if dry_run else "removed"
    console.show(
        asdict(done),
        f"{verb_done} {done.files} files, {size(done.nbytes)}",
        *(f"  snapshot {snapshot_id}" for snapshot_id in done.snapshots),
        *(["what was used in the last hour stays; --older-than 0 takes it, too"] * is_default),
    )
