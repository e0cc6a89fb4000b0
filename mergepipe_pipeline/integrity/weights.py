"""Audits what was merged: weights that are NaN or infinite, and plans over their budget.

`non_finite_inputs` names the inputs that such weights come from.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.checkpoints.stored import count_non_finite
from mergepipe_pipeline.domain.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.domain.plan import MergePlan, TensorTask
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.domain.view import Part
from mergepipe_pipeline.dtypes import FLOATING, LARGEST, TORCH_NAME
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.remote.address import is_address
from mergepipe_pipeline.snapshots.commit import Checked, verify_snapshot
from mergepipe_pipeline.storage.forms import keep_record, kept_record
from mergepipe_pipeline.storage.source import RangedFiles, open_source
from mergepipe_pipeline.text import listed
from mergepipe_pipeline.warehouse import Warehouse

#: A multiple of every element's size.
_PIECE_NBYTES = 1 << 19


def non_finite_inputs(plan: MergePlan, tensors: Collection[str]) -> list[str]:
    """The names of a plan's sources that hold NaN or infinity in these output tensors' inputs.

    Reads them, but nothing from an address; sources that are gone are left out.
    """
    parts = {
        (part.source, part.entry): None
        for layer in plan.layers
        for task in layer.tasks
        if task.name in tensors
        for part in _parts(task)
    }
    names: dict[str, None] = {}
    for number, entry in parts:
        source = plan.sources[number]
        if source.name not in names and not is_address(source.root):
            with suppress(MergePipeError, OSError), open_source(source.root, "exact") as files:
                if any(_counts(files, entry)):
                    names[source.name] = None
    return list(names)


def _parts(task: TensorTask) -> Iterator[Part]:
    for view in (*(e.view for e in task.experts), *([task.base.view] if task.base else ())):
        yield from view.stored
        yield from view.low_rank.parts if view.low_rank else ()


def _counts(files: RangedFiles, entry: TensorEntry) -> Iterator[int]:
    """How many elements are NaN or infinite, in piece after piece of a tensor."""
    nbytes = entry.nbytes if entry.dtype in FLOATING else 0
    buffer = np.empty(min(nbytes, _PIECE_NBYTES), np.uint8)
    for start in range(0, nbytes, _PIECE_NBYTES):
        raw = buffer[: nbytes - start]
        files.read_into(entry.file, entry.start_byte + start, raw.data)
        yield count_non_finite(raw, entry.dtype)


#: Tensors that a warning names.
MOST_NAMED = 5
#: What to do about such weights.
MEND = "mend the expert that holds them there, or the recipe"


@dataclass(frozen=True, slots=True)
class Audit:
    """The audit of a snapshot whose every byte had its digest when it was read, after `at_ns`.

    `non_finite` counts NaN and infinite elements by tensor.
    """

    snapshot_id: str
    files: int
    nbytes: int
    non_finite: Mapping[str, int]
    at_ns: int

    @property
    def summary(self) -> str:
        """Which tensors hold what no model should, the first of them by name; "" for none."""
        return _named(self.non_finite)


def audit_snapshot(
    warehouse: Warehouse, recipe: str, snapshot: Snapshot, *, anew: bool = False
) -> Audit:
    """Check every byte and every weight of a recipe's snapshot; what was found is remembered.

    Of a snapshot that was audited last, and not long ago, only files that somebody touched since
    are read again, unless `anew`. Raises CorruptionError with the file and tensor that is wrong.
    """
    folder = warehouse.snapshots / snapshot.snapshot_id
    last = None if anew else kept_record(warehouse.audit_path(recipe), Audit)
    if last is not None and last.snapshot_id == snapshot.snapshot_id:
        digests = frozenset(shard.sha256 for shard in snapshot.manifest.shards)
        verify_snapshot(folder, checked=Checked(digests, last.at_ns))
        return last
    began_ns, verification = time.time_ns(), verify_snapshot(folder)
    audit = Audit(
        snapshot.snapshot_id,
        verification.files,
        verification.nbytes,
        non_finite(open_checkpoint(snapshot.path, snapshot.snapshot_id[:12])),
        began_ns,
    )
    keep_record(warehouse.audit_path(recipe), audit)
    return audit


def refuse_unfit(audit: Audit, plan: MergePlan) -> None:
    """Raise MergePipeError for a snapshot that no reader should get, with the reason."""
    e = plan.estimates
    if audit.non_finite:
        raise MergePipeError(
            "A merged model holds NaN or infinity and is not released",
            where=f"snapshot {audit.snapshot_id[:16]}",
            expected="finite weights",
            found=audit.summary,
            next_step=MEND,
        )
    if is_over_budget(plan):
        raise MergePipeError(
            "A merge that reads more than its budget is not released",
            where=f"plan {plan.plan_id[:16]}",
            expected=f"at most {e.budget_bytes} bytes of experts",
            found=f"{e.expert_bytes_planned} bytes",
            next_step="plan the recipe again",
        )


def is_over_budget(plan: MergePlan) -> bool:
    """Whether the plan buys more expert bytes than its budget allows."""
    e = plan.estimates
    return e.budget_bytes is not None and e.expert_bytes_planned > e.budget_bytes


def non_finite(checkpoint: Checkpoint) -> dict[str, int]:
    """Tensor name to the number of NaN and infinite elements, for tensors that have any."""
    with open_source(checkpoint.root) as files:
        counts = {t.name: sum(_counts(files, t)) for t in checkpoint.tensors}
    return {name: count for name, count in counts.items() if count}


def non_finite_warning(counts: dict[str, int], plan: MergePlan) -> tuple[str, ...]:
    """The warning about such tensors: which, how many elements, and why that may be."""
    if not counts:
        return ()
    tasks = (task for layer in plan.layers for task in layer.tasks)
    dtypes = sorted({task.out_dtype for task in tasks if task.name in counts})
    ends = " or ".join(f"{TORCH_NAME[d]}, which ends at ±{LARGEST[d]:g}" for d in dtypes)
    what = "NaN, infinity or values cut off" if "F8_E4M3" in dtypes else "NaN or infinity"
    held = non_finite_inputs(plan, list(counts)[:MOST_NAMED])
    why = (
        f"such values are in {' and '.join(held)}"
        if held
        else "no model was found to hold such values: they may be too large for "
        f"{ends} (see out_dtype)"
    )
    return (f"the result holds {what}: {_named(counts)}; {why}",)


def _named(counts: Mapping[str, int]) -> str:
    """The number of elements of each tensor, the first of them by name."""
    named = [f"{n} in {name}" for name, n in counts.items()]
    return listed(named, MOST_NAMED, "tensors more")
