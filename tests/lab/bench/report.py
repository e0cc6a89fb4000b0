"""Tables and a picture of measured rows.

    python -m tests.lab.bench.report ROWS.jsonl [--out RESULTS.md]

Measures nothing. Each ratio is of two runs in the same round, so that what slows the machine down
for a while slows both; min, median and max are over rounds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.bench import FOLDER
from tests.lab.bench.cases import CASES
from tests.lab.bench.rows import Row, Setting, Spent, load

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKS = {"ours": "o-", "limit": "s--", "cat": "v-.", "mergekit": "^:"}
Figure = Callable[[Row], float]


def wall_s(row: Row) -> float:
    """Seconds from start to exit."""
    return row.cost.wall_s


def storage_gb(row: Row) -> float:
    """Bytes that the kernel fetched from storage for it, in 10⁹."""
    return row.cost.storage_read_nbytes / 1e9


def line(row: Row) -> str:
    """One measurement, to be printed as it is done."""
    stopped = f", ended: {row.cost.stopped}" if row.cost.stopped else ""
    return (
        f"round {row.round + 1} {row.case} K={row.k} {row.who}: {wall_s(row):.2f} s, "
        f"CPU {row.cost.cpu_s:.2f} s, {row.cost.anon_nbytes / 2**20:.0f} MiB anonymous, "
        f"{storage_gb(row):.3f} GB from storage{stopped}"
    )


def spread(values: Iterable[float], digits: int = 2) -> str:
    """`min / median / max`, or the one value there is, or a dash."""
    found = sorted(values)
    if not found:
        return "–"
    shown = [found[0], statistics.median(found), found[-1]] if len(found) > 1 else found
    return " / ".join(f"{value:.{digits}f}" for value in shown)


def ratios(above: Sequence[Row], below: Sequence[Row], figure: Figure = wall_s) -> list[float]:
    """figure(above) / figure(below) for every round that has both and neither was stopped."""
    by_round = {row.round: row for row in below if not row.cost.stopped}
    return [
        figure(row) / figure(by_round[row.round])
        for row in above
        if row.round in by_round and not row.cost.stopped
    ]


def expert_share(row: Row) -> float:
    """Bytes from storage that were not the base's, over those that were planned."""
    return (row.cost.storage_read_nbytes - row.needed.base_nbytes) / row.needed.expert_nbytes


def tables(rows: Sequence[Row]) -> str:
    """Markdown: times with ratios, then memory and bytes."""
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.case, row.k, row.who), []).append(row)
    keys = sorted({(case, k) for case, k, who in groups if who == "ours"}, key=_order)
    times = [
        "| case | K | ours, wall s | limit, wall s | cat, wall s | ours / limit "
        "| mergekit, wall s | mergekit / ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    costs = [
        "| case | K | who | CPU s | anonymous MiB | resident MiB | from storage MB "
        "| expert bytes read / planned |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, k in keys:
        peer_name = CASES[case].peer_name if case in CASES else None
        ours = groups[case, k, "ours"]
        limit, cat = (groups.get((case, k, who), []) for who in ("limit", "cat"))
        peer = groups.get((peer_name or "", k, "mergekit"), [])
        times.append(
            f"| {case} | {k} | {_walls(ours)} | {_walls(limit)} | {_walls(cat)} "
            f"| {spread(ratios(ours, limit))} | {_walls(peer)} | {_times_slower(peer, ours)} |"
        )
        own_peer = peer if peer_name == case else []
        for who, found in (
            ("ours", ours),
            ("limit", limit),
            ("cat", cat),
            ("mergekit", own_peer),
        ):
            if found:
                costs.append(f"| {case} | {k} | {who} | {_costs(found)} |")
    return "\n".join(
        [*times, "", *costs, "", *_profile([groups[(*key, "ours")] for key in keys], keys)]
    )


def _profile(groups: Sequence[Sequence[Row]], keys: Sequence[tuple[str, int]]) -> list[str]:
    """Where the time of ours went: shares in percent, medians."""
    told = [
        (key, [(row, row.spent) for row in rows if row.spent])
        for key, rows in zip(keys, groups, strict=True)
    ]
    lines = [
        "| case | K | before merging % | merging % | start, commit, exit % "
        "| hashing and handing over to the disk, beside it % | of workers' time reading % |",
        "|---|---|---|---|---|---|---|",
    ]
    for (case, k), rows in told:
        if rows:
            parts = [_shares(row, spent) for row, spent in rows]
            cells = [f"{statistics.median(column):.0f}" for column in zip(*parts, strict=True)]
            lines.append(f"| {case} | {k} | {' | '.join(cells)} |")
    return lines if len(lines) > 2 else []


def _shares(row: Row, spent: Spent) -> tuple[float, ...]:
    """Percent of wall: three parts follow each other, the fourth runs beside them.

    The last is of what workers did. How many there were is the engine's choice.
    """
    parts = (
        spent.before_s,
        spent.merging_s,
        wall_s(row) - spent.before_s - spent.merging_s,
        spent.write_s,
    )
    worked_s = spent.read_s + spent.arithmetic_s
    reading = 100 * spent.read_s / worked_s if worked_s else 0.0
    return *(100 * part / wall_s(row) for part in parts), reading


def _order(key: tuple[str, int]) -> tuple[int, int]:
    case, k = key
    return (list(CASES).index(case) if case in CASES else len(CASES)), k


def _walls(rows: Sequence[Row]) -> str:
    stopped = [row for row in rows if row.cost.stopped]
    if stopped:
        cost = stopped[0].cost
        return f"ended after {cost.wall_s:.0f} ({cost.stopped})"
    return spread(wall_s(row) for row in rows)


def _times_slower(peer: Sequence[Row], ours: Sequence[Row]) -> str:
    """mergekit's time over ours; a run that was ended by its timeout gives a bound."""
    if any(row.cost.stopped == "timeout" for row in peer):
        return f"> {wall_s(peer[0]) / statistics.median(map(wall_s, ours)):.1f}"
    return spread(ratios(peer, ours), 1)


def _costs(rows: Sequence[Row]) -> str:
    """The cells of one contender; only ours promises how many expert bytes it reads."""
    figures: list[tuple[Figure, int]] = [
        (lambda row: row.cost.cpu_s, 1),
        (lambda row: row.cost.anon_nbytes / 2**20, 0),
        (lambda row: row.cost.rss_nbytes / 2**20, 0),
        (lambda row: row.cost.storage_read_nbytes / 1e6, 0),
    ]
    cells = [spread(map(figure, rows), digits) for figure, digits in figures]
    promised = rows[0].who == "ours" and rows[0].needed.expert_nbytes > 0
    return " | ".join([*cells, spread(map(expert_share, rows), 3) if promised else "–"])


def heading(setting: Setting) -> str:
    """Commit, family and machine."""
    return (
        f"## {setting.family} at {setting.commit}\n\n{setting.cores} cores ({setting.cpu}), "
        f"{setting.ram_nbytes / 2**30:.0f} GiB, {setting.disk}, Linux {setting.kernel}."
    )


def write_results(rows: Sequence[Row], file: Path) -> None:
    """RESULTS.md with a picture beside it for each section: a family, a commit, a machine."""
    sections = [
        "# Results\n\nMade by `python -m tests.lab.bench.report`; `bench_merge.py` says what was "
        "measured. Cells are min / median / max over the rounds, ratios of runs in one round; "
        "expert bytes are the kernel's count of bytes from storage, less the base's."
    ]
    for number, setting in enumerate(dict.fromkeys(row.setting for row in rows), 1):
        here = [row for row in rows if row.setting == setting]
        sections += [heading(setting), tables(here)]
        picture = file.with_name(f"{file.stem}-{number}.png")
        if plot(here, picture):
            sections.append(f"![wall and bytes against K]({picture.name})")
    file.write_text("\n\n".join(sections) + "\n")


def plot(rows: Sequence[Row], file: Path) -> bool:
    """Wall and bytes from storage against K, one column for each case: medians, min to max.

    Returns False, without a file, if no case has a limit to be compared with.
    """
    from matplotlib.figure import Figure as Drawing

    cases = sorted({row.case for row in rows if row.who == "limit"}, key=list(CASES).index)
    if not cases:
        return False
    drawing = Drawing(figsize=(1.5 + 2.2 * len(cases), 6), layout="constrained")
    axes = drawing.subplots(2, len(cases), sharex=True, sharey="row", squeeze=False)
    for column, case in enumerate(cases):
        wall, storage = axes[0][column], axes[1][column]
        wall.set_title(case)
        storage.set_xlabel("experts (K)")
        for who, mark in _MARKS.items():
            name = CASES[case].peer_name if who == "mergekit" else case
            found = [row for row in rows if (row.case, row.who) == (name, who)]
            _line(wall, found, wall_s, who, mark)
            _line(storage, found, storage_gb, who, mark)
    axes[0][0].set(ylabel="wall, s", yscale="log")
    axes[1][0].set(ylabel="from storage, GB", xticks=sorted({row.k for row in rows if row.k}))
    axes[1][0].set_ylim(bottom=0)
    handles = {
        label: h
        for axis in axes[0]
        for h, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    axes[0][0].legend(handles.values(), handles.keys())
    drawing.savefig(file, dpi=110)
    return True


def _line(axis: Axes, rows: Sequence[Row], figure: Figure, who: str, mark: str) -> None:
    """Medians against K, with bars from min to max; runs that were ended are left out."""
    whole = [row for row in rows if not row.cost.stopped]
    ks = sorted({row.k for row in whole})
    if not ks:
        return
    by_k = [[figure(row) for row in whole if row.k == k] for k in ks]
    middles = [statistics.median(values) for values in by_k]
    below = [m - min(values) for m, values in zip(middles, by_k, strict=True)]
    above = [max(values) - m for m, values in zip(middles, by_k, strict=True)]
    axis.errorbar(ks, middles, yerr=[below, above], fmt=mark, label=who, capsize=2)


def main() -> None:
    """Write RESULTS.md, and the pictures beside it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--out", type=Path, default=FOLDER / "RESULTS.md")
    args = parser.parse_args()
    write_results(load(args.rows), args.out)


if __name__ == "__main__":
    main()
