"""Commands that send and fetch results and packs: `push`, `pull`, `pull-pack`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from mergepipe_pipeline.cli.common import Console, counted, verb
from mergepipe_pipeline.text import size

if TYPE_CHECKING:
    from mergepipe_pipeline.remote.push import PushResult


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
    """Send a snapshot's model to hf://ORG/MODEL[@BRANCH] or s3://BUCKET/PREFIX (gs://, az://).

    Every byte is checked first. What is there already is not sent again, so that a push that was
    stopped goes on; readers see the whole model or none.
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
    """Take a snapshot that any warehouse published in the bucket, by ref, REF@VERSION or id.

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
@verb
def pull_pack(console: Console, address: str, experts: tuple[str, ...], base: str | None) -> None:
    """Take experts' packs that `push --pack` sent (default: all there), and merge from their tiers.

    Their base must be here. Their own files need not: `unpack` makes them.
    """
    from mergepipe_pipeline.verbs.pull_pack import pull_packs as run

    done = run(console.warehouse, address, experts, base=base, progress=console.progress)
    console.show(
        [asdict(one) for one in done],
        *(
            f"{one.name}: pack {one.pack_id[:16]} against {one.base}, "
            + (f"{size(one.nbytes)} came" if one.fresh else "here before")
            for one in done
        ),
    )
