"""How results look in the Dagster UI: plain values and Markdown tables."""

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from mergepipe_pipeline.pipeline.inspect import shares
from mergepipe_pipeline.spec.plan import MergePlan

MIB = 1 << 20


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
