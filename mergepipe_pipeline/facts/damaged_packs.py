"""Takes damaged packs away, so that the next plan does without them.

A pack can be made again from its expert, unless it stands for one whose weight files are offline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.errors import CorruptionError, DamagedPackError, PackVersionError
from mergepipe_pipeline.packs.offline import OfflineExpert
from mergepipe_pipeline.storage.atomic import rename
from mergepipe_pipeline.warehouse import Warehouse


def irreplaceable_packs(warehouse: Warehouse) -> dict[str, OfflineExpert | None]:
    """The ids of packs that stand for experts, with these; all, of none, if a record is damaged.

    Packs stay irreplaceable where a later version lies in the expert's old folder.
    """
    try:
        return {e.pack_id: e for e in warehouse.offline.all() if not e.is_back}
    except CorruptionError:
        return dict.fromkeys(warehouse.packs.ids())


def refuse_damaged(warehouse: Warehouse, packs: Mapping[str, Iterable[str]]) -> None:
    """Look at the indexes of experts' packs, whose ids are by name, and take damaged ones away.

    Raises DamagedPackError once all were looked at, and CorruptionError for a pack that stands for
    its expert.
    """
    damaged: dict[str, DamagedPackError] = {}
    for name, pack_ids in packs.items():
        for pack_id in filter(lambda i: warehouse.packs.path(i).is_dir(), pack_ids):
            try:
                warehouse.packs.open(pack_id)
            except DamagedPackError as error:
                damaged.setdefault(name, set_aside(warehouse, [name], error))
    if not damaged:
        return
    names, first = list(damaged), next(iter(damaged.values()))
    if len(names) > 1:
        first.what = f"The packs of {' and '.join(names)} are damaged, and were set aside"
        first.next_step = _again(names, str(warehouse.aside))
    raise first


def set_aside(
    warehouse: Warehouse, names: Sequence[str], error: DamagedPackError
) -> DamagedPackError:
    """Take the damaged pack of these experts away; gives the error that says so.

    Raises CorruptionError for a pack that stands for its expert, which stays.
    """
    for expert in warehouse.offline.all():
        if expert.is_offline and expert.pack_id == error.pack_id:
            raise CorruptionError(
                f"The pack that stands for {expert.name} is damaged",
                where=error.where,
                expected=error.expected,
                found=error.found,
                next_step=expert.repaired,
            ) from None  # a damaged pack as its cause would mean that trying again helps
    path, folder = warehouse.packs.path(error.pack_id), warehouse.new_aside()
    with suppress(FileNotFoundError):  # another merge was here first
        rename(path, folder / path.relative_to(warehouse.root))
    is_other = isinstance(error, PackVersionError)
    problem = "was written by another version of the codec" if is_other else "is damaged"
    error.what = f"The pack of {' and '.join(names)} {problem}, and was set aside"
    error.next_step = _again(names, str(folder))
    return error


def _again(names: Sequence[str], folder: str) -> str:
    return (
        f"run the same command again, which reads the originals; `mergepipe pack {' '.join(names)}`"
        " packs anew, which a standing pipeline does by itself before it merges; what was set "
        f"aside is in {folder}"
    )


def experts_of(plan: MergePlan, pack_id: str) -> list[str]:
    """The experts of a plan that are read from a pack."""
    experts = [e for layer in plan.layers for task in layer.tasks for e in task.experts]
    sources = {
        part.source
        for e in experts
        if e.packed and plan.packs[e.packed.pack].pack_id == pack_id
        for part in e.view.stored
    }
    return sorted(plan.sources[number].name for number in sources)
