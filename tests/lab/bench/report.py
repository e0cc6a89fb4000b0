"""Tables of measured rows, as benchmarks print them and `docs/benchmarks.md` shows them.

Measures nothing. Each ratio is of two runs in the same round, so that what slows the machine down
for a while slows both; min, median and max are over rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from tests.lab.bench.cases import CASES
from tests.lab.bench.rows import Row

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


def table(rows: Sequence[Row]) -> str:
    """Markdown: per case and number of experts the times, their ratios, memory and bytes."""
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.case, row.k, row.who), []).append(row)
    lines = [
        "| case | K | ours, s | limit, s | `cat`, s | ours / limit | mergekit, s | ours, MiB "
        "| mergekit, MiB | read / planned |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, k in sorted({(case, k) for case, k, who in groups if who == "ours"}, key=_order):
        peer_name = CASES[case].peer_name if case in CASES else None
        ours, limit, cat = (groups.get((case, k, who), []) for who in ("ours", "limit", "cat"))
        peer = groups.get((peer_name or "", k, "mergekit"), [])
        promised = [row for row in ours if row.needed.expert_nbytes > 0]
        cells = [
            *(_walls(ours), _walls(limit), _walls(cat), spread(ratios(ours, limit))),
            *(_walls(peer), _mib(ours), _mib(peer), spread(map(expert_share, promised), 3)),
        ]
        lines.append(f"| {case} | {k or '–'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mib(rows: Sequence[Row]) -> str:
    """Anonymous memory of one contender."""
    return spread((row.cost.anon_nbytes / 2**20 for row in rows), 0)


def _order(key: tuple[str, int]) -> tuple[int, int]:
    case, k = key
    return (list(CASES).index(case) if case in CASES else len(CASES)), k


def _walls(rows: Sequence[Row]) -> str:
    stopped = [row for row in rows if row.cost.stopped]
    if stopped:
        cost = stopped[0].cost
        return f"ended after {cost.wall_s:.0f} ({cost.stopped})"
    return spread(wall_s(row) for row in rows)


def report(rows: Sequence[Row]) -> str:
    """The tables of rows, one for each family, commit and machine, under a line that says which."""
    parts = []
    for setting in dict.fromkeys(row.setting for row in rows):
        parts.append(
            f"{setting.family} at {setting.commit}: {setting.cores} cores ({setting.cpu}), "
            f"{setting.ram_nbytes / 2**30:.0f} GiB, {setting.disk}, Linux {setting.kernel}."
        )
        parts.append(table([row for row in rows if row.setting == setting]))
    return "\n\n".join(parts)
