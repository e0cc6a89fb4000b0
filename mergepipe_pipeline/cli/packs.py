"""Commands about packs: `pack`, `unpack`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mergepipe_pipeline.cli.common import Console, counted, table, verb
from mergepipe_pipeline.text import percent, size

if TYPE_CHECKING:
    from mergepipe_pipeline.execution.packing import PackEstimate
    from mergepipe_pipeline.verbs.pack import Packed

_ALL = "L0,L1,L2,L3,X20,X"


@click.command()
@click.argument("names", nargs=-1)
@click.option("--base", help="Pack against this base instead of the registered one.")
@click.option(
    "--tiers",
    default=_ALL,
    show_default=True,
    help="Tiers to write: L0 up to some Lk approximate, X20 and X are exact.",
)
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
    tiers: str,
    is_replaced: bool,
    cold: str | None,
) -> None:
    """Write experts' deltas once in tiers, so that merges read a part (default: all experts).

    What is not analysed is analysed first; tensors that an older pack has are taken over. A merge
    under a budget then buys levels instead of whole blocks, and an exact one reads X20 and X.
    """
    from mergepipe_pipeline.verbs.pack import pack as run
    from mergepipe_pipeline.verbs.replace import move_to_cold

    if is_replaced != (cold is not None) or (is_replaced and not names):
        raise click.UsageError("--replace takes names, and --cold FOLDER says where originals go")
    console.tell_of_compilation()
    done = run(
        console.warehouse,
        names,
        base=base,
        tiers=[t.strip() for t in tiers.split(",")],
        progress=console.progress,
    )
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
    """What packs that are not there would take and save, all together, for people."""
    if not estimates:
        return []
    total, packed = (
        sum(getattr(p, f"{of}_nbytes") for p in estimates) for of in ("expert", "packed")
    )
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
    """Make the weight files that `pack --replace` moved away again, bit for bit.

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
