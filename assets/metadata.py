"""How results look in the Dagster UI: plain values and Markdown tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from mergepipe_pipeline.pipeline.commit import operator_counts
from mergepipe_pipeline.pipeline.inspect import makings, shares
from mergepipe_pipeline.spec.plan import MergePlan

if TYPE_CHECKING:
    from mergepipe_pipeline.analysis.conflicts import ConflictReport

MIB = 1 << 20
#: Chosen operators that are shown with their reasons.
_MOST_REASONS = 8


def markdown_table(
    headers: Sequence[str], rows: Sequence[Sequence[Any]]
) -> dg.MarkdownMetadataValue:
    """A Markdown table as the UI renders it."""
    lines = ["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
    lines += ["| " + " | ".join(str(c) for c in row) + " |" for row in rows]
    return dg.MetadataValue.md("\n".join(lines))


def plan_metadata(plan: MergePlan) -> Mapping[str, Any]:
    """What a person asks of a plan: bytes, bound, and what each expert gives."""
    e = plan.estimates
    saved = e.expert_bytes_total - e.expert_bytes_planned
    meta: dict[str, Any] = {
        "plan_id": plan.plan_id,
        "method": plan.method,
        "strategy": e.strategy,
        "expert_mib_total": round(e.expert_bytes_total / MIB, 3),
        "expert_mib_planned": round(e.expert_bytes_planned / MIB, 3),
        "expert_mib_saved": round(saved / MIB, 3),
        "blocks_bought": e.blocks_bought,
        "blocks_total": e.blocks_total,
        "blocks_known_zero": e.blocks_zero,
        "error_bound_note": e.bound_note,
        "operators": markdown_table(("operator", "variant", "tensors"), operator_counts(plan)),
        **_choices_metadata(plan),
        "experts": markdown_table(
            ("expert", "MiB", "MiB read", "read"),
            [
                (
                    s.expert,
                    f"{s.nbytes_total / MIB:.2f}",
                    f"{s.nbytes_read / MIB:.2f}",
                    f"{100 * s.nbytes_read / max(1, s.nbytes_total):.1f} %",
                )
                for s in shares(plan, "expert")
            ],
        ),
    }
    if e.budget_bytes is not None:
        meta["budget_mib"] = round(e.budget_bytes / MIB, 3)
    if e.error_bound is not None:
        meta["error_bound_l2"] = e.error_bound
        if e.update_norm:
            meta["error_bound_relative"] = e.error_bound / e.update_norm
    if plan.warnings:
        meta["warnings"] = dg.MetadataValue.md("\n".join(f"- {w}" for w in plan.warnings))
    return meta


def _choices_metadata(plan: MergePlan) -> Mapping[str, Any]:
    """Per kind of choice (`auto`: KEEP, AVG, TIES, DARE) its tensors, and the first reasons."""
    chosen = [m for m in makings(plan) if m.reason]
    if not chosen:
        return {}
    counts = Counter(m.reason.partition(":")[0] for m in chosen)
    rows = [(m.tensor, m.operator, m.reason) for m in chosen[:_MOST_REASONS]]
    return {
        **{f"tensors_{kind}": n for kind, n in sorted(counts.items())},
        "choices": markdown_table(("tensor", "operator", "reason"), rows),
    }


def conflict_metadata(found: Mapping[str, ConflictReport]) -> Mapping[str, Any]:
    """Tables of one report per stage; keys name the stage where there are several."""
    if not found:
        return {"compared": "nothing: no stage merges into a base that is a checkpoint"}
    meta: dict[str, Any] = {}
    for stage, report in found.items():
        prefix = f"{stage}: " if len(found) > 1 else ""
        meta |= {
            f"{prefix}experts": len(report.experts),
            f"{prefix}interference": report.interference,
            f"{prefix}cosine_standard_error": report.standard_error,
            f"{prefix}cosines": markdown_table(("", *report.experts), report.cosine_rows()),
            f"{prefix}norms": markdown_table(("layer", *report.experts), report.norm_rows()),
        }
    return meta
