"""The audits of what was merged: is there a weight that no model should have?"""

from __future__ import annotations

from pathlib import Path

from mergepipe_pipeline.dtypes import LARGEST, TORCH_NAME
from mergepipe_pipeline.pipeline.commit import object_store
from mergepipe_pipeline.spec.plan import MergePlan
from mergepipe_pipeline.spec.snapshot import Snapshot
from mergepipe_pipeline.storage.checkpoint import open_checkpoint
from mergepipe_pipeline.storage.finite import non_finite as non_finite_of_file
from mergepipe_pipeline.warehouse import Warehouse

#: Tensors that a warning names.
_MOST_NAMED = 5


def non_finite(snapshot: Snapshot) -> dict[str, int]:
    """Tensor name to the number of NaN and infinite elements, for tensors that have any.

    Opens the snapshot as any other checkpoint, so headers and index are audited on the way.
    """
    checkpoint = open_checkpoint(snapshot.path, snapshot.snapshot_id[:12])
    found: dict[str, int] = {}
    for file in checkpoint.files:
        found |= non_finite_of_file(Path(checkpoint.root) / file.path)
    return found


def merged_non_finite(home: Warehouse, plan: MergePlan) -> dict[str, int]:
    """As `non_finite`, from what was noted when the plan's layers were merged; reads no weight.

    Elements that F8_E4M3 cut off at its end are among them.
    """
    store = object_store(home)
    known = [store.lookup(layer.action_key) for layer in plan.layers]
    return {name: n for stored in known if stored for name, n in stored.non_finite}


def non_finite_warning(found: dict[str, int], plan: MergePlan) -> tuple[str, ...]:
    """What to tell a user of such tensors: which, how many elements, and why that may be."""
    if not found:
        return ()
    named = [f"{n} in {name}" for name, n in list(found.items())[:_MOST_NAMED]]
    more = f" and {len(found) - _MOST_NAMED} tensors more" if len(found) > _MOST_NAMED else ""
    tasks = (task for layer in plan.layers for task in layer.tasks)
    dtypes = sorted({task.out_dtype for task in tasks if task.name in found})
    ends = " or ".join(f"{TORCH_NAME[d]}, which ends at ±{LARGEST[d]:g}" for d in dtypes)
    what = "NaN, infinity or values cut off" if "F8_E4M3" in dtypes else "NaN or infinity"
    return (
        f"the result holds {what}: {', '.join(named)}{more}; either a model holds such "
        f"values there, or they are too large for {ends} (see out_dtype)",
    )
