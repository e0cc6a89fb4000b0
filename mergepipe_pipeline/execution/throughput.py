"""How long a merge may take here: its bytes, at the rate that the newest merge here had.

For people who wait, and to compare merges with each other; no plan and no id depends on it.
"""

from __future__ import annotations

from heapq import nlargest

from mergepipe_pipeline.digest import unseal
from mergepipe_pipeline.domain.outcome import Realised
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.domain.snapshot import PROVENANCE
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.resolution.resolve import ResolvedRecipe
from mergepipe_pipeline.warehouse import Warehouse

#: Newest snapshots that are asked: those of tools, and those that reused all layers, tell nothing.
_MOST_ASKED = 8
#: What is said in the place of a time.
UNKNOWN = "not known before the first merge here"


def expected_s(warehouse: Warehouse, nbytes: int) -> float | None:
    """Seconds to read, merge and write so many bytes; None before the first merge here."""
    files = [path for path in warehouse.snapshots.glob(f"*/{PROVENANCE}") if path.is_file()]
    for path in nlargest(_MOST_ASKED, files, key=lambda path: path.stat().st_mtime_ns):
        try:
            realised = unseal(path.read_bytes(), str(path)).get("realised")
            came = Realised(**realised) if realised else None
        except (OSError, CorruptionError, TypeError):
            continue
        if came and came.nbytes and came.layers_s:
            return came.layers_s * nbytes / came.nbytes
    return None


def nbytes_of_recipe(resolved: ResolvedRecipe) -> int:
    """Bytes that learning and merging a stage read and write, from headers."""
    cost = resolved.cost
    read = cost.expert_bytes_total
    if cost.budget_bytes is not None:
        read = min(read, cost.budget_bytes)
    return cost.analysis_bytes + cost.base_bytes + read + cost.output_bytes


def nbytes_of_plan(plan: MergePlan) -> int:
    """Bytes that merging a plan reads and writes."""
    return sum(layer.nbytes for layer in plan.layers)
