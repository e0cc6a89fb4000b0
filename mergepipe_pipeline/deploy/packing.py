"""Which packs experts are to have: against every base that a recipe merges them into.

What is wanted is compared with what the records of `arrivals` say and with the packs that are
there: a pack that is gone, a base with new contents or a new recipe make an expert due again.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property

from mergepipe_pipeline.deploy.arrivals import MAX_FAILURES, Arrival, arrival
from mergepipe_pipeline.deploy.recipe_files import RecipeFile, bases_read
from mergepipe_pipeline.domain.recipe import Budget
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.warehouse import Warehouse


def reason_to_wait_for_packs(warehouse: Warehouse, file: RecipeFile) -> str | None:
    """Which packs a recipe with a budget waits for: without them it would buy far less.

    Not for ever: after `MAX_FAILURES` packings, whatever failed them, it waits no more, though an
    expert is packed as soon as its surroundings let it be. None for nothing.
    """
    if all(stage.budget == Budget() for stage in file.stages):
        return None
    wanted = PacksWanted(warehouse)
    known = {name: arrival(warehouse, name) for name in file.members}
    names = [
        n
        for n, seen in known.items()
        if seen.indexed and seen.packing.tries < MAX_FAILURES and wanted.is_awaited(n, seen)
    ]
    return f"it waits for the packs of {', '.join(names)}" if names else None


class PacksWanted:
    """What the recipes and registrations of a warehouse want now, each read once."""

    def __init__(self, warehouse: Warehouse) -> None:
        self._warehouse = warehouse

    def bases_of(self, name: str) -> dict[str, str]:
        """The registered bases of an expert, each as `base@checkpoint id`; in name order."""
        bases = {*self._read.get(name, ())}
        if name in self._registered and self._registered[name][1]:
            bases.add(self._registered[name][1])
        return {
            base: f"{base}@{self._registered[base][0]}"
            for base in sorted(bases)
            if base in self._registered
        }

    def is_due(self, name: str, known: Arrival, retry_s: float) -> bool:
        """Whether an expert that is indexed is to be packed now."""
        return self.is_awaited(name, known) and known.left_s(retry_s) <= 0

    def waiting(self, name: str, known: Arrival, retry_s: float) -> str | None:
        """Why an expert is not packed now that lacks a pack and is tried again; None for others."""
        left_s = known.left_s(retry_s)
        if left_s <= 0 or not known.packing.tries or not self.is_awaited(name, known):
            return None
        return (
            f"packing {known.packing.tries} for it did not end well; the next in {left_s:.0f} s; "
            f"the last failure: {known.packing.last_error}"
        )

    def is_awaited(self, name: str, known: Arrival) -> bool:
        """Whether an expert that is indexed lacks a pack that is to be made, now or later."""
        bases = set(self.bases_of(name).values())
        is_packed = not bases or (
            known.packed.token == known.indexed
            and bases <= set(known.packed.bases)
            and all(self._warehouse.packs.path(pack_id).is_dir() for pack_id in known.packed.packs)
        )
        return not is_packed and not known.packing.is_given_up

    @cached_property
    def _read(self) -> dict[str, set[str]]:
        return bases_read(self._warehouse)

    @cached_property
    def _registered(self) -> dict[str, tuple[str, str]]:
        """Name to the current version's checkpoint id and base, "" without one."""
        registered: dict[str, tuple[str, str]] = {}
        with suppress(MergePipeError):
            for name, _, checkpoint_id, base, _ in self._warehouse.catalog.registrations():
                registered[name] = checkpoint_id, base or ""
        return registered
