"""Commands about checkpoints and their packs, from `register` to `unpack`; `ls` and `sql`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mergepipe_pipeline.cli.common import (
    Console,
    cells,
    column_table,
    counted,
    download_options,
    table,
    verb,
)
from mergepipe_pipeline.cli.evaluation import metrics_text
from mergepipe_pipeline.text import four_digits, listed, percent, size

if TYPE_CHECKING:
    from mergepipe_pipeline.catalog.views import View
    from mergepipe_pipeline.execution.packing import PackEstimate
    from mergepipe_pipeline.verbs.pack import Packed
    from mergepipe_pipeline.verbs.runs import Steps


_EXAMPLE = "select snapshot_id, version from snapshot_inputs where name = 'math'"
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
_run_option = click.option(
    "--run", "is_run", is_flag=True, help="Take the steps of a run, not the model beside them."
)


@click.command()
@click.argument("path", type=click.Path())
@click.option("--name", help="Name in the catalog (default: the folder's name).")
@click.option("--base", help="Registered name or path of the base this expert was tuned from.")
@_run_option
@verb
def register(console: Console, path: str, name: str | None, base: str | None, is_run: bool) -> None:
    """Make a checkpoint known by name, from its headers alone.

    Of a training run's folder, every whole checkpoint becomes known, as RUN.step-STEP.
    """
    from mergepipe_pipeline.verbs.register import register as run
    from mergepipe_pipeline.verbs.runs import holds_run, register_run

    if is_run or holds_run(path):
        _show_steps(console, register_run(console.warehouse, path, name, base))
        return
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
        + (f", stored as {c.form.name}: merges {_USE[bool(c.form.schemes)]}" if c.form else ""),
    )


#: What merges do with codes, by whether their scheme is known.
_USE = {True: "decode it where they compute", False: "only copy it"}


def _show_steps(console: Console, steps: Steps) -> None:
    console.show(
        asdict(steps),
        *steps.new,
        f"{counted(len(steps.new), 'step')} new, {len(steps.there)} there already",
        *(f"left out: {folder} ({why})" for folder, why in steps.left_out),
    )


@click.command()
@click.argument("name")
@click.option("--add", multiple=True, help="A tag to give; may be given several times.")
@click.option("--remove", multiple=True, help="A tag to take away.")
@verb
def tag(console: Console, name: str, add: tuple[str, ...], remove: tuple[str, ...]) -> None:
    """Change or show the tags by which recipes select a checkpoint."""
    from mergepipe_pipeline.verbs.register import tag as run

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
    """Read experts once against their base and remember statistics.

    Without NAMES, all.
    """
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
    """Query the catalog with SQL, or list its views and their columns."""
    from mergepipe_pipeline.catalog.queries import Limits
    from mergepipe_pipeline.catalog.views import VIEWS
    from mergepipe_pipeline.verbs.ls import export
    from mergepipe_pipeline.verbs.ls import query as run

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
@_run_option
@download_options
@verb
def land(
    console: Console, path: str, name: str | None, link: bool, tags: tuple[str, ...], is_run: bool
) -> None:
    """Put a checkpoint into the inbox whole.

    It replaces an older version of its name. PATH is a folder or an address, as hf://org/model. Of
    a training run's folder, every whole checkpoint lands that is not there yet, as RUN.step-STEP.
    """
    from mergepipe_pipeline.verbs.land import land as run
    from mergepipe_pipeline.verbs.runs import holds_run, land_run

    if is_run or holds_run(path):
        _show_steps(console, land_run(console.warehouse, path, name, link=link, tags=tags))
        return
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
    """Keep an expert's present content out of standing recipes.

    Recipes that name it wait, and what their refs name stays live.
    """
    from mergepipe_pipeline.verbs.register import quarantine as run

    done = run(console.warehouse, name, reason=reason, release=release, progress=console.progress)
    state = "kept out" if done.is_kept_out else "let in"
    console.show(asdict(done), f"{done.name}, content {done.content[:16]}: {state}, {done.reason}")


@click.command()
@click.argument("names", nargs=-1)
@click.option("--base", help="Pack against this base instead of the registered one.")
@click.option(
    "--replace",
    "is_replaced",
    is_flag=True,
    help="Move weight files to --cold, once the packs have given every one back.",
)
@click.option("--cold", type=click.Path(), help="Folder that --replace moves weight files into.")
@verb
def pack(
    console: Console,
    names: tuple[str, ...],
    base: str | None,
    is_replaced: bool,
    cold: str | None,
) -> None:
    """Write experts' deltas once in tiers, so that merges read a part.

    Without NAMES, all. What is not analysed is analysed first; tensors that an older pack has are
    taken over. A merge under a budget then buys levels instead of whole blocks, and an exact one
    reads X, or X20 where that is enough.
    """
    from mergepipe_pipeline.verbs.pack import pack as run
    from mergepipe_pipeline.verbs.replace import move_to_cold

    if is_replaced != (cold is not None) or (is_replaced and not names):
        raise click.UsageError("--replace takes names, and --cold FOLDER says where originals go")
    console.tell_of_compilation()
    done = run(console.warehouse, names, base=base, progress=console.progress)
    moved = [move_to_cold(console.warehouse, one, cold, console.progress) for one in done if cold]
    console.show(
        {"packs": [asdict(one) for one in done], "moved": [asdict(one) for one in moved]},
        *pack_lines(done),
        *(
            f"{m.name}: {counted(m.files, 'weight file')} moved to {m.cold}{' before' * m.before}"
            for m in moved
        ),
    )


def pack_lines(done: Sequence[Packed]) -> list[str]:
    """A table of packs for people."""
    tiers = list(dict.fromkeys(t for one in done for t in one.tier_nbytes))
    rows = [
        (
            one.name,
            f"packed in {one.seconds:.1f} s" if one.fresh else "packed before",
            *(percent(one.tier_nbytes.get(t, 0) / one.expert_nbytes) for t in tiers),
            size(one.nbytes),
            pay_back_text(one.pays_back_after),
        )
        for one in done
    ]
    return table(("expert", "state", *tiers, "pack", "pays back after"), rows)


def pay_back_text(merges: int | None) -> str:
    """How many merges, for people."""
    return "-" if merges is None else counted(merges, "exact merge")


def estimate_lines(estimates: Sequence[PackEstimate], label: str) -> list[str]:
    """Say what packs that are not there would take and save, all together."""
    if not estimates:
        return []
    total, packed = sum(p.expert_nbytes for p in estimates), sum(p.packed_nbytes for p in estimates)
    tiers = sum(n for p in estimates for n in p.tier_nbytes.values())
    exact = total - packed + sum(p.exact_nbytes for p in estimates)
    seconds = sum(p.seconds for p in estimates)
    after = [p.pays_back_after for p in estimates]
    merges = None if None in after else max(n for n in after if n is not None)
    saved = f", paid back after about {pay_back_text(merges)}" if merges else ""
    return [
        f"{label}`mergepipe pack` of {counted(len(estimates), 'expert')} would take about "
        f"{percent(tiers / total)} of their bytes and {seconds:.0f} s{saved}",
        f"{' ' * len(label)}an exact merge would read about {percent(exact / total)} of them",
    ]


@click.command()
@click.argument("name")
@click.option(
    "--to",
    type=click.Path(),
    help="New folder for them and what goes with them (default: where they were).",
)
@verb
def unpack(console: Console, name: str, to: str | None) -> None:
    """Make again the weight files that `pack --replace` moved away.

    NAME@VERSION, or NAME@ and the start of a checkpoint id, is an older version of it.
    """
    from mergepipe_pipeline.verbs.replace import unpack as run

    done = run(console.existing, name, to, console.progress)
    copied = f"; the originals stay in {done.root}" if Path(done.root).exists() else ""
    console.show(
        asdict(done),
        f"{done.name}: {counted(done.files, 'weight file')}, {size(done.nbytes)}, in {done.cold}"
        f"{copied}",
    )


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
