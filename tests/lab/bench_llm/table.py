"""The table and the figure of scores: what merges under a budget keep of the full merge's gain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from mergepipe_pipeline.arrays import F64Array
from tests.lab.bench.pack_cells import STRATEGIES
from tests.lab.bench_llm.merges import BUDGETS, METHODS
from tests.lab.bench_llm.score import Scored, Scores
from tests.lab.bench_llm.tasks import TASKS

_DRAWS, _INSIDE = 10_000, (2.5, 97.5)
NAMES = tuple(task.name for task in TASKS)


@dataclass(frozen=True, slots=True)
class Kept:
    """The share of the full merge's gain, its interval, the KL from it in nats, and bytes read."""

    share: float
    low: float
    high: float
    kl: float
    read: float


def kept(scored: Scored, kind: str, method: str, budget: str, source: str) -> Kept | None:
    """Over all seeds of a kind of expert; None where a seed has no such merge.

    The interval is that of draws of (seed, task) with replacement.
    """
    gains: list[tuple[float, float]] = []  # of the merge, and of the full one
    divergences, reads = [], []
    for family in families(scored, kind):
        base, full = scored[f"{family} base"], f"{family} {method} 100%"
        key = f"{family} {method} {budget} {source}"
        if key not in scored or full not in scored:
            return None
        gains += [(scored[key][n] - base[n], scored[full][n] - base[n]) for n in NAMES]
        divergences.append(mean(scored[key][f"kl {n}"] for n in NAMES))
        reads.append(scored[key]["read"])
    if not gains:
        return None
    found = np.array(gains)  # [seeds * tasks, 2]
    low, high = np.percentile(_shares(found), _INSIDE)
    whole = found.sum(0)
    return Kept(whole[0] / whole[1], low, high, mean(divergences), mean(reads))


def _shares(gains: F64Array) -> F64Array:
    draws = np.random.default_rng(0).integers(len(gains), size=(_DRAWS, len(gains)))
    sums = gains[draws].sum(1)  # [draws, 2]
    shares: F64Array = sums[:, 0] / sums[:, 1]
    return shares


def families(scored: Scored, kind: str) -> list[str]:
    """The keys of a kind's families of which the base is scored."""
    bases = (key.removesuffix(" base") for key, _ in scored.items() if key.endswith(" base"))
    return sorted(name for name in bases if name.split()[0] == kind)


def whole_rows(scored: Scored, kind: str) -> Iterator[tuple[str, Scores]]:
    """Base, experts and full merges, each the mean over the seeds that have all of them."""
    by_name = defaultdict[str, list[Scores]](list)
    of_kind = families(scored, kind)
    for key, scores in scored.items():
        family, _, name = key.rpartition(" ") if "%" not in key else key.rsplit(" ", 2)
        if family in of_kind and " scale " not in key and (name == "100%" or "%" not in key):
            by_name[key.removeprefix(f"{family} ").removesuffix(" 100%")].append(scores)
    for name, all_ in by_name.items():
        yield name, {n: mean(s[n] for s in all_) for n in all_[0]}


def markdown(scored: Scored, kinds: Sequence[str]) -> str:
    """The tables of full merges, and of budgets, as a page has them."""
    texts = ("english", "code")
    lines: list[str] = []
    for kind in kinds:
        lines += [f"| {kind} | {' | '.join(NAMES)} | mean | {' | '.join(texts)} |"]
        lines += ["|---" * (len(NAMES) + 4) + "|"]
        for name, scores in whole_rows(scored, kind):
            right = [scores[n] for n in NAMES]
            cells = [*(f"{100 * r:.1f}" for r in right), f"{100 * mean(right):.1f}"]
            cells += [f"{scores[f'perplexity {t}']:.2f}" for t in texts]
            lines += [f"| {name} | {' | '.join(cells)} |"]
        lines += [""]
        lines += [f"| {kind} | from | {' | '.join(BUDGETS)} |", "|---" * (len(BUDGETS) + 2) + "|"]
        for method in METHODS:
            for source in STRATEGIES:
                found = [kept(scored, kind, method.operator, b, source) for b in BUDGETS]
                if any(found):
                    cells = [_cell(k) for k in found]
                    lines += [f"| {method.operator} | {source} | {' | '.join(cells)} |"]
        lines += [""]
    return "\n".join(lines)


def _cell(found: Kept | None) -> str:
    if found is None:
        return "–"
    inside = f"{100 * found.low:.0f} to {100 * found.high:.0f}"
    return f"{100 * found.share:.0f} ({inside}), {found.kl:.2g}"


def draw(scored: Scored, kinds: Mapping[str, str], path: Path) -> None:
    """Draw the gain kept against bytes read: a line per method from packs, one panel per kind."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(kinds), 3.6), layout="constrained")
    for axis, (kind, title) in zip(
        figure.subplots(1, len(kinds), squeeze=False)[0], kinds.items(), strict=True
    ):
        for method in METHODS:
            for source, line in (("packs", "-"), ("blocks", ":")):
                of = [kept(scored, kind, method.operator, b, source) for b in BUDGETS]
                points = [k for k in of if k is not None]
                if not points:
                    continue
                read = [100 * k.read for k in points]
                share = [100 * k.share for k in points]
                (drawn,) = axis.plot(read, share, line, marker="o", markersize=3)
                drawn.set_label(f"{method.operator}, {source}")
                low, high = [100 * k.low for k in points], [100 * k.high for k in points]
                axis.fill_between(read, low, high, alpha=0.1, color=drawn.get_color())
        axis.set(xscale="log", title=title, xlabel="bytes of the experts read, %")
        axis.set_ylabel("gain of the full merge kept, %")
        axis.axhline(100, color="grey", linewidth=0.6)
        axis.legend(fontsize=7)
    FigureCanvasAgg(figure).print_png(str(path))
