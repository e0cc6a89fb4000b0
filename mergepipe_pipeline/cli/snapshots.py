"""Commands about results: publish, replay, send, fetch, collect, verify and repair them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mergepipe_pipeline.cli.common import Console, counted, table, verb
from mergepipe_pipeline.domain.pack import FACTORED
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.text import size

if TYPE_CHECKING:
    from mergepipe_pipeline.integrity.auditor import Finding, Scope
    from mergepipe_pipeline.remote.push import PushResult
    from mergepipe_pipeline.verbs.verify import Report

_COUNT = click.IntRange(min=1)
_SCOPES: tuple[Scope, ...] = ("structure", "digests", "lineage", "inputs")
_INPUTS: tuple[Scope, ...] = ("inputs",)


@click.command()
@click.argument("snapshot")
@click.option("--ref", required=True, help="Name to publish under.")
@click.option("--reason", default="published", show_default=True)
@click.option("--expect", "expected", type=int, help="Refuse unless this is the current version.")
@verb
def publish(console: Console, snapshot: str, ref: str, reason: str, expected: int | None) -> None:
    """Make a ref name a snapshot, after checking every byte.

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
    from mergepipe_pipeline.verbs.publish import kept_out_in

    snapshot = load_snapshot(console.existing.snapshots, snapshot_id)
    console.warn(*(str(decision) for decision in kept_out_in(console.existing, snapshot)))


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would be removed, and write nothing.")
@click.option(
    "--older-than",
    type=click.FloatRange(min=0),
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
    older_than: float | None,
    keep_versions: int | None,
    unpublished: bool,
    bucket: bool,
) -> None:
    """Remove what nobody needs: staging, stages, objects, actions."""
    from mergepipe_pipeline.verbs.gc import AGE_S, BUCKET_AGE_S, collect, collect_bucket

    if bucket and (keep_versions or unpublished):
        raise click.UsageError("--bucket goes alone: all that a ref has ever named stays there.")
    home, is_default = console.existing, older_than is None and not bucket
    if bucket:
        age_s = BUCKET_AGE_S if older_than is None else older_than
        done = collect_bucket(home, older_than_s=age_s, dry_run=dry_run)
    else:
        age_s = AGE_S if older_than is None else older_than
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


def _paths(ctx: click.Context, option: click.Parameter, values: Sequence[str]) -> dict[str, str]:
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
    callback=_paths,
    help="Where the input of this name is now; may be given several times.",
)
@click.option("--keep", type=click.Path(), help="Keep what is made: the folder of a new warehouse.")
@click.option("--threads", type=_COUNT, help="Threads for arithmetic and reading.")
@verb
def replay(
    console: Console, snapshot: str, inputs: dict[str, str], keep: str | None, threads: int | None
) -> None:
    """Merge a snapshot again from its record, and compare every bit.

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
        options=EngineOptions(threads=threads),
        progress=console.progress,
    )
    console.show(
        {"same_bits": True, **asdict(done), "inputs": dict(done.inputs)},
        f"same bits: {done.layers} layers, {done.tensors} tensors, {size(done.nbytes)}, and the "
        f"same snapshot {done.snapshot_id}",
    )


@click.command()
@click.argument("snapshot")
@click.argument("address")
@click.option("--public", is_flag=True, help="Let anybody read a repository that the push makes.")
@click.option(
    "--provenance/--no-provenance",
    default=None,
    help="Also send provenance and recipe, which name folders of this machine (default: unless "
    "--public).",
)
@click.option("--replace", is_flag=True, help="Let another model at the address go.")
@click.option("--dry-run", is_flag=True, help="Only say what would be sent.")
@click.option(
    "--pack",
    "is_pack",
    is_flag=True,
    help="SNAPSHOT is the name of an expert: send its pack, for `pull-pack`.",
)
@click.option(
    "--packs",
    "with_packs",
    is_flag=True,
    help="Also send the packs of the experts that the snapshot was merged from.",
)
@verb
def push(
    console: Console,
    snapshot: str,
    address: str,
    is_pack: bool,
    with_packs: bool,
    **how: Any,
) -> None:
    """Send a snapshot's model to the hub or a bucket.

    ADDRESS is hf://ORG/MODEL[@BRANCH] or s3://BUCKET/PREFIX (gs://, az://). Every byte is checked
    first. What is there already is not sent again, so that a push that was stopped goes on; readers
    see the whole model or none.
    """
    from mergepipe_pipeline.verbs.push import push as run
    from mergepipe_pipeline.verbs.push_pack import packed_experts, push_pack

    warehouse, progress = console.warehouse, console.progress
    names = [snapshot] if is_pack else []
    if with_packs and not is_pack:
        names = packed_experts(warehouse, snapshot, progress)
    done = [] if is_pack else [run(warehouse, snapshot, address, progress=progress, **how)]
    how.pop("provenance")
    done += [push_pack(warehouse, n, address, progress=progress, **how) for n in names]
    dry_run = how["dry_run"]
    first, *others = [asdict(one) for one in done]
    console.show(
        {**first, "dry_run": dry_run, **({"packs": others} if with_packs else {})},
        *(line for one in done for line in _pushed_lines(one, dry_run=dry_run)),
    )


def _pushed_lines(done: PushResult, *, dry_run: bool) -> list[str]:
    verb_done = "would send" if dry_run else "sent"
    return [
        f"{done.address}: {counted(done.files, 'file')}, {size(done.nbytes)}; "
        f"{verb_done} {counted(len(done.sent_files), 'file')}, {size(done.sent_nbytes)}",
        *(f"  removed  {name}" for name in done.removed),
        *([f"  commit   {done.commit}"] if done.commit else []),
    ]


@click.command()
@click.argument("snapshot")
@click.option(
    "--from",
    "source",
    metavar="ADDRESS",
    help="Bucket to take it from (default: $MERGEPIPE_BUCKET).",
)
@verb
def pull(console: Console, snapshot: str, source: str | None) -> None:
    """Take a snapshot from the bucket, by ref, REF@VERSION or id.

    It is a snapshot of this warehouse then; no ref here changes.
    """
    from mergepipe_pipeline.verbs.pull import pull as run

    done = run(console.warehouse, snapshot, source, console.progress)
    nbytes = sum(s.nbytes for s in done.manifest.shards)
    console.show(
        {"snapshot_id": done.snapshot_id, "path": done.path, "nbytes": nbytes},
        f"snapshot {done.snapshot_id}",
        f"  size  {size(nbytes)}",
        f"  path  {done.path}",
    )


@click.command("pull-pack")
@click.argument("address")
@click.argument("experts", nargs=-1)
@click.option("--base", help="Name of their base here (default: as where they were packed).")
@click.option(
    "--rung",
    type=click.Choice(FACTORED),
    help="Only the directions up to there, for about 0.1, 0.5 or 2 % of the bytes: of them another "
    "expert is made, NAME-RUNG, which is near to NAME.",
)
@verb
def pull_pack(console: Console, address: str, experts: tuple[str, ...], **how: Any) -> None:
    """Take experts' packs that `push --pack` sent.

    Without EXPERTS, all there. Their base must be here. Their own files need not: `unpack` makes
    them.
    """
    from mergepipe_pipeline.verbs.pull_pack import pull_packs as run

    done = run(console.warehouse, address, experts, progress=console.progress, **how)
    console.show(
        [asdict(one) for one in done],
        *(
            f"{one.name}: pack {one.pack_id[:16]} against {one.base}, "
            + (f"{size(one.nbytes)} came" if one.fresh else "here before")
            for one in done
        ),
    )


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
@click.option("--inputs", is_flag=True, help="Also hash what the snapshot was merged from.")
@verb
def verify(
    console: Console,
    what: str | None,
    everything: bool,
    scopes: Sequence[Scope],
    inputs: bool,
) -> None:
    """Re-hash every byte of a snapshot, or, with --all, of everything.

    WHAT is an id, a prefix, a ref, REF@VERSION, or a folder of --out. Exit 0, or name what is wrong
    and exit 19.
    """
    if everything == (what is not None) or (everything and inputs):
        raise click.UsageError("Give a snapshot (with --inputs or not), or --all.")
    if scopes and not everything:
        raise click.UsageError("--scope goes with --all.")
    if what is not None:
        _verify_snapshot(console, what, inputs=inputs)
        return
    from mergepipe_pipeline.verbs.verify import verify_all

    report = verify_all(console.existing, scopes or _SCOPES, progress=console.progress)
    _show_report(console, report)


def _verify_snapshot(console: Console, what: str, *, inputs: bool) -> None:
    from mergepipe_pipeline.verbs.verify import verify as run

    # A folder says all of itself, also on a machine that has no warehouse.
    home = console.place if Path(what).is_dir() else console.existing
    done = run(home, what, console.progress)
    sentence = f"ok: {done.files} files, {size(done.nbytes)} checked"
    if not inputs:
        console.show({"ok": True, **asdict(done)}, sentence)
        return
    from mergepipe_pipeline.execution.lookup import snapshot_named
    from mergepipe_pipeline.verbs.verify import verify_all

    snapshot = snapshot_named(console.existing, what)
    report = verify_all(console.existing, _INPUTS, inputs_of=snapshot, progress=console.progress)
    _show_report(console, report, asdict(done), sentence)


def _show_report(
    console: Console, report: Report, snapshot: dict[str, Any] | None = None, *lines: str
) -> None:
    console.warn(*report.notes)
    verdict = "ok" if report.ok else counted(len(report.findings), "finding")
    summary = (
        f"{verdict}: {', '.join(report.scopes)}; "
        f"{report.files} checks, {size(report.nbytes)} hashed"
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
    """Take away what is damaged, and learn it again where inputs are there.

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
