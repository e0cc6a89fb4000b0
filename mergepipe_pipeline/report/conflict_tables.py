"""A conflict report as rows of tables, as a record for machines, and as a picture.

For the command line and the Dagster UI alike. Estimates are shown with one standard error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from mergepipe_pipeline.pictures import HeatMap, heat_maps
from mergepipe_pipeline.text import plain

if TYPE_CHECKING:
    from mergepipe_pipeline.analysis.agreement import Agreement
    from mergepipe_pipeline.analysis.conflict_report import ConflictReport, Pair

Row = tuple[str, ...]

PAIR_HEADERS = ("place", "experts", "cosine", "same sign", "squared norm lost")


def estimate(value: float, error: float, sign: str = "+") -> str:
    """A figure and its standard error to two digits; "-" for one that is not there."""
    if math.isnan(value):
        return "-"
    digits = max(0, min(6, 1 - math.floor(math.log10(error)))) if error > 0 else 3
    return f"{value:{sign}z.{digits}f} ± {error:.{digits}f}"


def percent(share: float, error: float, sign: str = "+") -> str:
    """A share and its standard error in percent; "-" for one that is not there."""
    shown = estimate(100 * share, 100 * error, sign)
    return shown if math.isnan(share) else f"{shown} %"


def matrix_rows(report: ConflictReport, figure: str) -> list[Row]:
    """One row per expert: `figure` ("cosine" or "sign_agreement") with every expert."""
    values = getattr(report.whole, figure)
    sign = "+" if figure == "cosine" else ""
    return [
        (name, *("-" if math.isnan(v) else f"{v:{sign}z.3f}" for v in row))
        for name, row in zip(report.experts, values, strict=True)
    ]


def largest_error(report: ConflictReport, figure: str) -> float:
    """The largest standard error in such a matrix; 0 where nothing was seen."""
    errors = getattr(report.whole, figure)
    return float(np.nan_to_num(errors).max(initial=0.0))


def place_headers(by: str) -> Row:
    """What `place_rows` holds."""
    return (by, "squared norm", "mean cosine", "lowest", "highest", "same sign", "interference")


def place_rows(report: ConflictReport, by: str) -> list[Row]:
    """One row per layer or tensor: its share of Σ‖δ‖², and how its deltas agree."""
    total = float(np.square(report.whole.norms).sum())
    return [
        _place_row(report, place, agreement, total)
        for place, agreement in report.places(by).items()
    ]


def _place_row(report: ConflictReport, place: str, agreement: Agreement, total: float) -> Row:
    first, second = np.triu_indices(len(report.experts), 1)
    share = f"{100 * np.square(agreement.norms).sum() / total:.2f} %" if total else "-"
    interference = percent(agreement.interference, agreement.interference_error)
    if not len(first):
        return (place, share, "-", "-", "-", "-", interference)
    cosines, signs = agreement.cosine[first, second], agreement.sign_agreement[first, second]
    low, high = int(cosines.argmin()), int(cosines.argmax())
    seen = signs[~np.isnan(signs)]

    def pair(at: int) -> str:
        i, j = first[at], second[at]
        shown = estimate(cosines[at], agreement.cosine_error[i, j])
        return f"{shown} {report.experts[i]}·{report.experts[j]}"

    return (
        place,
        share,
        f"{cosines.mean():+z.3f}",
        pair(low),
        pair(high),
        f"{100 * seen.mean():.1f} %" if len(seen) else "-",
        interference,
    )


def pair_rows(pairs: Sequence[Pair]) -> list[Row]:
    """One row per pair, under `PAIR_HEADERS`."""
    return [
        (
            p.place,
            f"{p.first}, {p.second}",
            estimate(p.cosine, p.cosine_error),
            percent(p.sign_agreement, p.sign_error, sign=""),
            percent(p.lost, p.lost_error),
        )
        for p in pairs
    ]


def pair_records(stage: str, report: ConflictReport, by: str) -> list[dict[str, Any]]:
    """Every pair in every place and over all, one flat record each; None for what is unknown."""
    pairs = [*report.pairs("all"), *(report.pairs(by) if by != "all" else ())]
    return [{"stage": stage, **plain(asdict(pair))} for pair in pairs]


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


def picture(report: ConflictReport, by: str = "layer", title: str = "") -> bytes:
    """PNG: the cosines of all experts, and each expert's mean cosine with the others per place."""
    names = report.experts
    profile = report.profile(by)
    largest = max(0.1, float(np.abs(profile).max(initial=0.0)))
    prefix = f"{title}: " if title else ""
    return heat_maps(
        [
            HeatMap(names, names, report.whole.cosine, f"{prefix}cosine", (-1, 1), True),
            HeatMap(
                list(report.places(by)),
                names,
                profile,
                f"mean cosine with the others, by {by}",
                (-largest, largest),
                True,
            ),
        ]
    )
