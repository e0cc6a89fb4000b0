"""Commands about checkpoints: `register`, `tag`, `analyze`, `sql`, `land`, `quarantine`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mergepipe_pipeline.cli.common import Console, download_options, table, verb
from mergepipe_pipeline.cli.packs import pack_lines
from mergepipe_pipeline.text import four_digits, listed, size

if TYPE_CHECKING:
    from mergepipe_pipeline.catalog.views import View


_EXAMPLE = "select snapshot_id, version from snapshot_inputs where name = 'math'"


@click.command()
@click.argument("path", type=click.Path())
@click.option("--name", help="Name in the catalog (default: the folder's name).")
@click.option("--base", help="Registered name or path of the base this expert was tuned from.")
@verb
def register(console: Console, path: str, name: str | None, base: str | None) -> None:
    """Make a checkpoint known by name, from its headers alone."""
    from mergepipe_pipeline.verbs.register import register as run

    r = run(console.warehouse, path, name, base)
    c = r.checkpoint
    console.warn(*c.ignored_warnings)
    console.show(
        {
            "name": r.name,
            "version": r.version,
            "base": r.base,
            "checkpoint_id": c.checkpoint_id,
            "tensors": len(c.tensors),
            "files": len(c.files),
            "ignored_files": list(c.ignored_files),
            "nbytes": c.nbytes,
            "root": c.root,
            "form": c.form and c.form.name,
        },
        f"{r.name}: version {r.version}, {len(c.tensors)} tensors in {len(c.files)} file(s), "
        f"{size(c.nbytes)}"
        + (f", base {r.base}" if r.base else "")
        + (f", stored as {c.form.name}: merges only copy it" if c.form else ""),
    )


@click.command()
@click.argument("name")
@click.option("--add", multiple=True, help="A tag to give; may be given several times.")
@click.option("--remove", multiple=True, help="A tag to take away.")
@verb
def tag(console: Console, name: str, add: tuple[str, ...], remove: tuple[str, ...]) -> None:
    """Change the tags of a checkpoint's name, or show them: recipes select experts by them."""
    from mergepipe_pipeline.verbs.tag import tag as run

    tags = sorted(run(console.existing, name, add, remove))
    console.show({"name": name, "tags": tags}, f"{name}: {', '.join(tags) or 'no tags'}")


@click.command()
@click.argument("names", nargs=-1)
@click.option("--base", help="Analyse against this base instead of the registered one.")
@click.option("--block-size", "block_elems", type=int, help="Elements per block (a power of two).")
@click.option("--pack", "is_packed", is_flag=True, help="Pack the experts, too; see `pack`.")
@download_options
@verb
def analyze(
    console: Console,
    names: tuple[str, ...],
    base: str | None,
    block_elems: int | None,
    is_packed: bool,
) -> None:
    """Read experts once against their base and remember block statistics (default: all names)."""
    from mergepipe_pipeline.verbs.analyze import analyze as run

    console.tell_of_compilation()
    done = run(
        console.warehouse, names, base=base, block_elems=block_elems, progress=console.progress
    )
    rows = [
        (
            a.name,
            a.base or "-",
            "analysed" if a.fresh else "known",
            four_digits(a.norm),
            a.zero_blocks,
            a.blocks,
            a.content_sha256[:16],
        )
        for a in done
    ]
    analyses = [asdict(a) for a in done]
    lines = table(("name", "base", "state", "|delta|", "zero blocks", "blocks", "content"), rows)
    if not is_packed:
        console.show(analyses, *lines)
        return
    from mergepipe_pipeline.verbs.pack import pack, with_levels

    experts = with_levels(console.warehouse, [a.name for a in done if a.base])
    packs = (
        pack(console.warehouse, experts, base=base, progress=console.progress) if experts else ()
    )
    data = {"analyses": analyses, "packs": [asdict(p) for p in packs]}
    console.show(data, *lines, "", *pack_lines(packs))


@click.command()
@click.argument("query", required=False)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.IntRange(min=1),
    default=60,
    show_default=True,
    help="Seconds that the query may take.",
)
@click.option(
    "--memory",
    "memory_mib",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="MiB that the query may take.",
)
@click.option(
    "--export",
    "target",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write all views as tables of a new DuckDB file, instead of a query.",
)
@verb
def sql(
    console: Console, query: str | None, timeout_s: int, memory_mib: int, target: Path | None
) -> None:
    """Query the catalog with SQL; without a query, list the views and their columns."""
    from mergepipe_pipeline.catalog.queries import Limits
    from mergepipe_pipeline.catalog.views import VIEWS
    from mergepipe_pipeline.verbs.sql import export
    from mergepipe_pipeline.verbs.sql import query as run

    if target and query:
        raise click.UsageError("--export takes no query: the file has all views.")
    if target:
        export(console.existing, target)
        console.show({"path": str(target.absolute())}, f"{target}: {', '.join(VIEWS)}")
        return
    if not query:
        console.show(
            {name: {"what": v.what, "columns": dict(v.columns)} for name, v in VIEWS.items()},
            *(line for name, view in VIEWS.items() for line in _view_lines(name, view)),
            f'for example: mergepipe sql "{_EXAMPLE}"',
        )
        return
    columns, rows = run(console.existing, query, Limits(timeout_s, memory_mib << 20))
    console.show([dict(zip(columns, row, strict=True)) for row in rows], *table(columns, rows))


def _view_lines(name: str, view: View) -> tuple[str, ...]:
    width = max(map(len, view.columns))
    columns = (f"  {column.ljust(width)}  {means}" for column, means in view.columns.items())
    return (f"{name}: {view.what}", *columns, "")


@click.command()
@click.argument("path", type=click.Path())
@click.option("--name", help="Name in the inbox (default: the folder's name).")
@click.option("--link", is_flag=True, help="Link the files instead of copying them.")
@click.option("--tag", "tags", multiple=True, help="Give the name a tag; see `tag`.")
@download_options
@verb
def land(console: Console, path: str, name: str | None, link: bool, tags: tuple[str, ...]) -> None:
    """Put a checkpoint into the inbox whole; it replaces an older version of its name.

    PATH is a folder or an address, as hf://org/model.
    """
    from mergepipe_pipeline.verbs.land import land as run

    done = run(console.warehouse, path, name, link=link, tags=tags, progress=console.progress)
    left_out = listed(done.left_out, 5)
    console.show(
        asdict(done),
        f"{done.name}: {done.files} file(s), {size(done.nbytes)}, in {done.path}"
        + (", in place of an older version" if done.replaced else "")
        + (f"; left out, as no part of a model: {left_out}" if left_out else ""),
    )


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
