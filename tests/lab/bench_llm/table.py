"""The table and the figure of scores: what merges under a budget keep of the full merge's gain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from mergepipe_pipeline.arrays import F64Array
from tests.lab.bench.pack_cells import STRATEGIES
from tests.lab.bench_llm.kinds import Kind
from tests.lab.bench_llm.merges import BUDGETS, METHODS, Method
from tests.lab.bench_llm.score import Scored, Scores

_DRAWS, _INSIDE = 10_000, (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Kept:
    """The share of the full merge's gain, its interval, the KL from it in nats, and bytes read."""

    share: float
    low: float
    high: float
    kl: float
    read: float


def kept(scored: Scored, kind: Kind, method: str, budget: str, source: str) -> Kept | None:
    """Over all seeds of a kind of expert; None where a seed has no such merge.

    The interval is that of draws of tasks, and of seeds for all of them, with replacement.
    """
    gains: list[list[tuple[float, float]]] = []  # of the merge, and of the full one
    divergences, reads = [], []
    for family in families(scored, kind):
        base, full = scored[kind.model.name], f"{family} {method} 100%"
        key = f"{family} {method} {budget} {source}"
        if key not in scored or full not in scored:
            return None
        gains.append([(scored[key][n] - base[n], scored[full][n] - base[n]) for n in _names(kind)])
        divergences.append(mean(scored[key][f"kl {n}"] for n in _names(kind)))
        reads.append(scored[key]["read"])
    if not gains:
        return None
    found = np.array(gains)  # [seeds, tasks, 2]
    low, high = np.percentile(_shares(found), _INSIDE)
    whole = found.sum((0, 1))
    return Kept(whole[0] / whole[1], low, high, mean(divergences), mean(reads))


def _shares(gains: F64Array) -> F64Array:
    random, (n_seeds, n_tasks, _) = np.random.default_rng(0), gains.shape
    tasks = random.integers(n_tasks, size=(_DRAWS, n_tasks, 1))
    seeds = random.integers(n_seeds, size=(_DRAWS, n_seeds))
    of_seeds = gains[seeds].sum(1)  # [draws, tasks, 2]
    sums = np.take_along_axis(of_seeds, tasks, 1).sum(1)  # [draws, 2]
    shares: F64Array = sums[:, 0] / sums[:, 1]
    return shares


def _names(kind: Kind) -> list[str]:
    return [task.name for task in kind.tasks]


def families(scored: Scored, kind: Kind) -> list[str]:
    """The keys of a kind's families of which a full merge is scored."""
    whole = (key.split() for key, _ in scored.items() if key.endswith(" 100%"))
    return sorted({f"{name} {seed}" for name, seed, *_ in whole if name == kind.name})


def whole_rows(scored: Scored, kind: Kind) -> Iterator[tuple[str, Scores]]:
    """Base, experts and full merges, each the mean over the seeds that have it."""
    yield "base", scored[kind.model.name]
    of_kind = families(scored, kind)
    merges = (f"{m.operator} {who}" for m in METHODS for who in ("100%", "mergekit"))
    for name in (*_names(kind), *merges):
        all_ = [scored[f"{f} {name}"] for f in of_kind if f"{f} {name}" in scored]
        # A merge of mergekit's that equals ours in every element has no row of its own.
        if all_ and any(s.get("error", 1.0) for s in all_):
            yield name.removesuffix(" 100%"), {n: mean(s[n] for s in all_) for n in all_[0]}


def markdown(scored: Scored, kinds: Sequence[Kind]) -> str:
    """The tables of full merges, of budgets, and of the time that all took, as a page has them."""
    lines: list[str] = []
    for kind in kinds:
        if families(scored, kind):
            lines += [*_full(scored, kind), "", *_budgets(scored, kind), ""]
    return "\n".join([*lines, *_parts(scored)])


def _full(scored: Scored, kind: Kind) -> Iterator[str]:
    names, texts = _names(kind), ("english", "code")
    yield _row(kind.title, *names, "mean", *texts)
    yield "|---" * (len(names) + 4) + "|"
    for name, scores in whole_rows(scored, kind):
        right = [scores[n] for n in names]
        shares = (f"{100 * r:.1f}" for r in (*right, mean(right)))
        yield _row(name, *shares, *(f"{scores[f'perplexity {t}']:.2f}" for t in texts))
    if equal := [m.operator for m in METHODS if _is_equal(scored, kind, m)]:
        yield f"\nmergekit's merges by {', '.join(equal)} equal ours in every element."


def _is_equal(scored: Scored, kind: Kind, method: Method) -> bool:
    keys = [f"{f} {method.operator} mergekit" for f in families(scored, kind)]
    found = [scored[key]["error"] for key in keys if key in scored]
    return bool(found) and not any(found)


def _budgets(scored: Scored, kind: Kind) -> Iterator[str]:
    yield _row(kind.title, "from", *BUDGETS)
    yield "|---" * (len(BUDGETS) + 2) + "|"
    for method in METHODS:
        for source in STRATEGIES:
            found = [kept(scored, kind, method.operator, b, source) for b in BUDGETS]
            if any(found):
                yield _row(method.operator, source, *(_cell(k) for k in found))


def _parts(scored: Scored) -> Iterator[str]:
    yield _row("part", "times", "minutes", "peak, MiB")
    yield "|---" * 4 + "|"
    for name, part in sorted(scored.parts.items()):
        yield _row(name, str(part.times), f"{part.seconds / 60:.1f}", str(part.peak_mib))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(found: Kept | None) -> str:
    if found is None:
        return "–"
    inside = f"{100 * found.low:.0f} to {100 * found.high:.0f}"
    return f"{100 * found.share:.0f} ({inside}), {found.kl:.2g}"


def draw(scored: Scored, kinds: Sequence[Kind], path: Path) -> None:
    """Draw the gain kept against bytes read: a line per method from packs, one panel per kind."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(kinds), 3.6), dpi=160, layout="constrained")
    for axis, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
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
        axis.set(xscale="log", title=kind.title, xlabel="bytes of the experts read")
        axis.set_xticks([float(b.removesuffix("%")) for b in BUDGETS], BUDGETS)
        axis.minorticks_off()
        axis.set_ylabel("gain of the full merge kept, %")
        axis.axhline(100, color="grey", linewidth=0.6)
        axis.legend(fontsize=7)
    FigureCanvasAgg(figure).print_png(str(path))
