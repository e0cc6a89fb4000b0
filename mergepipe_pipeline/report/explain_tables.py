"""Explanations as rows of tables, as flat records for machines, and as pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.pictures import HeatMap, heat_maps
from mergepipe_pipeline.report.comparison import Comparison
from mergepipe_pipeline.report.shares import shares
from mergepipe_pipeline.report.stories import Contribution, ExpertStory, SnapshotStory, TensorStory


def block_records(story: TensorStory) -> list[dict[str, Any]]:
    """One flat record per block of every expert."""
    return [
        {"tensor": story.task.name, **asdict(b), "expert": story.experts[b.expert]}
        for b in story.blocks
    ]


def expert_records(story: TensorStory) -> list[dict[str, Any]]:
    """One flat record per expert of a tensor: its blocks by reason, bytes, the range of worths."""
    records = []
    for position in dict.fromkeys(b.expert for b in story.blocks):
        mine = [b for b in story.blocks if b.expert == position]
        worths = [b.worth for b in mine if b.worth is not None]
        reasons, levels = Counter(b.why for b in mine), Counter(b.level for b in mine if b.level)
        records.append(
            {
                "expert": story.experts[position],
                "nbytes_total": sum(b.nbytes for b in mine),
                "nbytes_read": sum(b.nbytes_read for b in mine),
                "change": float(np.linalg.norm([b.change for b in mine])),
                "worth_most": max(worths, default=None),
                "worth_least": min(worths, default=None),
                "blocks": len(mine),
                "reasons": dict(reasons),
                "levels": dict(levels),
            }
        )
    return records


def contribution_records(contributions: Sequence[Contribution]) -> list[dict[str, Any]]:
    """One flat record per expert and layer."""
    return [
        {
            **asdict(c),
            "share_of_bytes": c.share_of_bytes,
            "share_of_energy": c.share_of_sq_norm,
            "part": c.part,
            "change": c.change,
        }
        for c in contributions
    ]


def layer_records(comparison: Comparison) -> list[dict[str, Any]]:
    """One flat record per layer, and one for all: realised error and update in L2."""
    return [{**asdict(x), "relative": x.relative} for x in (*comparison.layers, comparison.whole)]


def bytes_picture(plan: MergePlan) -> bytes:
    """PNG: the share of each expert's bytes that is read, layer by layer."""
    all_shares = list(shares(plan, "layer"))
    layers = list(dict.fromkeys(s.place for s in all_shares))
    experts = list(dict.fromkeys(s.expert for s in all_shares))
    values = np.full((len(layers), len(experts)), np.nan)
    for s in all_shares:
        read = 100 * s.nbytes_read / max(1, s.nbytes_total)
        values[layers.index(s.place), experts.index(s.expert)] = read
    title = f"{plan.recipe_name}: % of bytes read"
    return heat_maps([HeatMap(layers, experts, values, title, limits=(0, 100), text="{:.0f}")])


def blocks_picture(story: TensorStory) -> bytes:
    """PNG: worth of every block against the last one read, as a power of ten; empty: no list.

    Above 0 is what was worth more.
    """
    experts = list(dict.fromkeys(b.expert for b in story.blocks))
    columns = 1 + max((b.block for b in story.blocks), default=0)
    values = np.full((len(experts), columns), np.nan)
    cut = story.account.cut_worth
    for b in story.blocks:
        if b.worth and cut:
            values[experts.index(b.expert), b.block] = np.log10(b.worth / cut)
    largest = float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0
    return heat_maps(
        [
            HeatMap(
                [story.experts[n] for n in experts],
                [str(n) for n in range(columns)],
                values,
                "log10(worth / cut)",
                limits=(-max(largest, 0.1), max(largest, 0.1)),
                diverging=True,
            )
        ]
    )


def contributions_picture(story: ExpertStory) -> bytes:
    """PNG: per layer the shares read of an expert's bytes and squared norm, and its part of all."""
    layers = [c.layer for c in story.contributions]
    values = [
        [
            100 * (v if v is not None else np.nan)
            for v in (c.share_of_bytes, c.share_of_sq_norm, c.part)
        ]
        for c in story.contributions
    ]
    columns = ("bytes", "squared norm", "part of all")
    title = f"{story.name} in {story.plan.recipe_name}, %"
    return heat_maps([HeatMap(layers, columns, values, title, limits=(0, 100), text="{:.0f}")])


def snapshot_records(story: SnapshotStory) -> list[dict[str, Any]]:
    """Figure, what was expected of it, what came: bytes, L2 norms, seconds; None for unknown."""
    if "estimates" not in story.provenance:  # no recipe made it
        return []
    e, realised = story.provenance["estimates"], story.provenance["realised"] or {}
    whole = story.comparison.whole if story.comparison else None
    rows = [
        ("expert_bytes", e["expert_bytes_planned"], realised.get("expert_bytes_read")),
        ("error", e.get("predicted_error"), whole and whole.error),
        ("error_margin", e.get("predicted_margin"), None),
        ("error_bound", e["error_bound"], whole and whole.error),
        ("update_norm", e["update_norm"], whole and whole.update),
        ("base_bytes", None, realised.get("base_bytes_read")),
        ("bytes_written", None, realised.get("bytes_written")),
        ("layers_executed", None, realised.get("layers_executed")),
        ("layers_reused", None, realised.get("layers_reused")),
        ("seconds", None, realised.get("layers_s")),
    ]
    return [{"figure": name, "expected": a, "realised": b} for name, a, b in rows]
