"""The verb `conflicts`: how a recipe's experts agree and differ, from catalog samples alone.

Also what is shown of it, on the command line and in the Dagster UI alike: estimates come with one
standard error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.model import grid_for
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.facts.analysed import analysed_experts
from mergepipe_pipeline.pictures import HeatMap, heat_maps
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.resolution.fit import refuse_unplaced
from mergepipe_pipeline.resolution.locate import Places
from mergepipe_pipeline.resolution.open_models import open_models
from mergepipe_pipeline.resolution.plain_numbers import refuse_coded
from mergepipe_pipeline.text import plain
from mergepipe_pipeline.verbs.explain import Table
from mergepipe_pipeline.warehouse import Warehouse

if TYPE_CHECKING:
    from mergepipe_pipeline.analysis.agreement import Agreement
    from mergepipe_pipeline.analysis.conflict_report import ConflictReport, Pair

    #: How the experts of each stage conflict, by the stage's name.
    ConflictReports = Mapping[str, ConflictReport]

#: Pairs listed as the most conflicting and as the most redundant, unless asked for otherwise.
MOST_PAIRS = 10


def conflicts(
    warehouse: Warehouse,
    parsed: ParsedRecipe,
    *,
    relative_to: Path | None = None,
    known: Mapping[str, Checkpoint] | None = None,
    progress: Progress | None = None,
) -> ConflictReports:
    """Stage name to how its experts conflict; analyses what the catalog does not know yet.

    A stage without a base to differ from, or on the result of another one, has no report; models
    that are results of stages are not compared. Checkpoints that are `known` by name are not opened
    anew. Raises what opening the models raises.
    """
    stages = (*parsed.before, parsed)
    reports = {
        s.stage or s.name: _of_stage(warehouse, s, relative_to, known or {}, progress)
        for s in stages
    }
    return {name: report for name, report in reports.items() if report is not None}


def _of_stage(
    warehouse: Warehouse,
    parsed: ParsedRecipe,
    relative_to: Path | None,
    known: Mapping[str, Checkpoint],
    progress: Progress | None,
) -> ConflictReport | None:
    from mergepipe_pipeline.analysis.conflict_report import conflicts as compare

    base = None if parsed.base is None else parsed.references[parsed.base]
    if base is None or base.model in parsed.stages_used:
        return None
    merged = [parsed.references[n] for n in dict.fromkeys(e.model for e in parsed.entries())]
    experts = [r for r in merged if r is not base and r.model not in parsed.stages_used]
    problems: list[MergePipeError] = []
    models = open_models(Places(warehouse, relative_to, known), [base, *experts], 0, problems)
    if problems:
        raise problems[0]
    if not all(model.is_partial for model in models[1:]):
        refuse_coded(models)
    for model in models[1:]:
        refuse_unplaced(model, models[0])
    grid = grid_for(models[0], parsed.block_elems)
    analysed = analysed_experts(warehouse, models[1:], models[0], grid, progress)
    names = [m.name for m in models[1:]]
    return compare(names, [e.stats() for e in analysed]) if analysed else None


def largest_error(report: ConflictReport, figure: str) -> float:
    """The largest standard error in a matrix of all experts; 0 where nothing was seen."""
    return float(np.nan_to_num(getattr(report.whole, figure)).max(initial=0.0))


def tables(report: ConflictReport, by: str, most: int = MOST_PAIRS) -> dict[str, Table]:
    """Everything that is shown of a report, by its title; tables of pairs may have no rows."""
    total = float(np.square(report.whole.norms).sum())
    places = report.places(by).items()
    pairs = ("place", "experts", "cosine", "same sign", "squared norm lost")
    return {
        "cosines": _matrix(report, "cosine", "+"),
        "elements moved the same way": _matrix(report, "sign_agreement", ""),
        f"by {by}": (
            (by, "squared norm", "mean cosine", "lowest", "highest", "same sign", "interference"),
            [(place, *_place_row(report, agreement, total)) for place, agreement in places],
        ),
        "conflicting pairs": (pairs, [*map(_pair_row, report.conflicting(by)[:most])]),
        "redundant pairs": (pairs, [*map(_pair_row, report.redundant("all")[:most])]),
    }


def record(stage: str, report: ConflictReport, by: str, most: int) -> dict[str, Any]:
    """All figures over all and per place, and the `most` worst pairs, as plain values."""
    return {
        "stage": stage,
        "experts": list(report.experts),
        "all": plain(asdict(report.whole)),
        by: {place: plain(asdict(agreement)) for place, agreement in report.places(by).items()},
        "conflicting": [plain(asdict(p)) for p in report.conflicting(by)[:most]],
        "redundant": [plain(asdict(p)) for p in report.redundant("all")[:most]],
    }


def picture(reports: ConflictReports, by: str = "layer") -> bytes:
    """Draw the cosines of all experts, and each one's mean cosine with the others, as PNG."""
    maps = []
    for stage, report in reports.items():
        names, profile = report.experts, report.profile(by)
        largest = max(0.1, float(np.abs(profile).max(initial=0.0)))
        title = f"{stage}: mean cosine with the others, by {by}"
        maps += [
            HeatMap(names, names, report.whole.cosine, f"{stage}: cosine", (-1, 1), True),
            HeatMap([*report.places(by)], names, profile, title, (-largest, largest), True),
        ]
    return heat_maps(maps)


def percent(share: float, error: float, sign: str = "+") -> str:
    """A share and its standard error in percent; "-" for one that is not there."""
    shown = _estimate(100 * share, 100 * error, sign)
    return shown if math.isnan(share) else f"{shown} %"


def _estimate(value: float, error: float, sign: str = "+") -> str:
    """A figure and its standard error to two digits; "-" for one that is not there."""
    if math.isnan(value):
        return "-"
    digits = max(0, min(6, 1 - math.floor(math.log10(error)))) if error > 0 else 3
    return f"{value:{sign}z.{digits}f} ± {error:.{digits}f}"


def _matrix(report: ConflictReport, figure: str, sign: str) -> Table:
    """A figure of every expert with every expert."""
    rows = [
        (name, *("-" if math.isnan(v) else f"{v:{sign}z.3f}" for v in row))
        for name, row in zip(report.experts, getattr(report.whole, figure), strict=True)
    ]
    return ("", *report.experts), rows


def _place_row(report: ConflictReport, agreement: Agreement, total: float) -> tuple[str, ...]:
    """A layer's or tensor's share of Σ‖δ‖², and how its deltas agree."""
    first, second = np.triu_indices(len(report.experts), 1)
    share = f"{100 * np.square(agreement.norms).sum() / total:.2f} %" if total else "-"
    interference = percent(agreement.interference, agreement.interference_error)
    if not len(first):
        return (share, "-", "-", "-", "-", interference)
    cosines, signs = agreement.cosine[first, second], agreement.sign_agreement[first, second]
    seen = signs[~np.isnan(signs)]

    def pair(at: int) -> str:
        i, j = first[at], second[at]
        shown = _estimate(cosines[at], agreement.cosine_error[i, j])
        return f"{shown} {report.experts[i]}·{report.experts[j]}"

    return (
        share,
        f"{cosines.mean():+z.3f}",
        pair(int(cosines.argmin())),
        pair(int(cosines.argmax())),
        f"{100 * seen.mean():.1f} %" if len(seen) else "-",
        interference,
    )


def _pair_row(p: Pair) -> tuple[str, ...]:
    return (
        p.place,
        f"{p.first}, {p.second}",
        _estimate(p.cosine, p.cosine_error),
        percent(p.sign_agreement, p.sign_error, sign=""),
        percent(p.lost, p.lost_error),
    )
