"""Plans as sealed files, by id."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from mergepipe_pipeline.digest import canonical_json, seal_line, sha256_hex, unseal_line
from mergepipe_pipeline.domain.places import with_folders
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.domain.plan_json import plan_from_json
from mergepipe_pipeline.errors import CorruptionError, NotFoundError
from mergepipe_pipeline.storage.atomic import remove_tree, write_atomic
from mergepipe_pipeline.warehouse import Warehouse

_LOG = logging.getLogger("mergepipe")


T = TypeVar("T")


def store_plan(warehouse: Warehouse, plan: MergePlan) -> None:
    """Write a plan, sealed, under its id; its folders by named roots. Raises StorageFullError."""
    write_atomic(warehouse.plan_path(plan.plan_id), _recorded(warehouse, plan))


def store_working_plan(warehouse: Warehouse, recipe: str, plan: MergePlan) -> str:
    """Write the plan that a standing recipe works on; its SHA-256. Raises StorageFullError.

    Under its id alone it would be another recipe's with equal weights, whose config and tokenizer
    are those of another base.
    """
    data = _recorded(warehouse, plan)
    sha256 = sha256_hex(data)
    write_atomic(warehouse.working_plan_path(recipe, sha256), data)
    return sha256


def load_working_plan(
    warehouse: Warehouse, recipe: str, plan_id: str, sha256: str | None
) -> MergePlan:
    """The plan that a standing recipe works on; by its id alone where no SHA-256 was recorded.

    Raises NotFoundError, CorruptionError.
    """
    if sha256 is None:
        return load_plan(warehouse, plan_id)
    path = warehouse.working_plan_path(recipe, sha256)
    refuse_other_plan(path, sha256)
    plan = _read(path, lambda _, value: checked_plan(plan_id, value))
    return with_folders(plan, warehouse.roots.here)


def refuse_other_plan(path: Path, sha256: str) -> None:
    """Raise CorruptionError for a recipe's plan whose SHA-256 does not begin like this."""
    digest = sha256_hex(path.read_bytes()) if path.is_file() else "no file"
    if not digest.startswith(sha256):
        raise CorruptionError(
            "A recipe's plan is not the one that it works on",
            where=str(path),
            expected=f"sha256 {sha256[:16]}",
            found=digest[:16],
            next_step="plan the recipe anew: materialize its asset `plan`",
        )


def forget_other_plans(warehouse: Warehouse, recipe: str, sha256: str) -> None:
    """Remove the plans that a standing recipe has worked on before."""
    current = warehouse.working_plan_path(recipe, sha256)
    for path in working_plans(warehouse):
        if path.name.rsplit(".", 2)[0] == recipe and path != current:
            remove_tree(path)


def working_plans(warehouse: Warehouse) -> list[Path]:
    """The plans of all standing recipes; the part before the suffix begins their SHA-256."""
    return sorted(warehouse.releases.glob("*.plan"))


def _recorded(warehouse: Warehouse, plan: MergePlan) -> bytes:
    recorded = with_folders(plan, warehouse.roots.recorded).to_json()
    return seal_line(canonical_json(recorded))


def load_plan(warehouse: Warehouse, plan_id: str) -> MergePlan:
    """A stored plan by its id, with folders of this machine.

    Raises NotFoundError, CorruptionError.
    """
    path = warehouse.plan_path(plan_id)
    if not path.exists():
        raise NotFoundError(
            "No such plan",
            where=str(path),
            found=plan_id,
            next_step="make it with `mergepipe plan RECIPE`",
        )
    return with_folders(_read(path, checked_plan), warehouse.roots.here)


def stored_plans(warehouse: Warehouse, read: Callable[[str, Any], T]) -> Iterator[tuple[str, T]]:
    """What `read` makes of each plan's id and JSON value, by id.

    Damaged plans, and those of other versions of this program, are logged and left out.
    """
    for path in sorted(warehouse.plans.glob("*.json")):
        try:
            yield path.stem, _read(path, read)
        except CorruptionError as error:
            _LOG.warning("%s", error)


def checked_plan(plan_id: str, value: Any) -> MergePlan:
    """The plan of a JSON value, as recorded. Raises ValueError if it has another id."""
    plan = plan_from_json(value)
    if plan.plan_id != plan_id:
        raise ValueError(f"the plan {plan.plan_id} under the name of {plan_id}")
    return plan


def _read(path: Path, read: Callable[[str, Any], T]) -> T:
    """What `read` makes of a stored plan's id and JSON value. Raises CorruptionError."""
    try:
        return read(path.stem, json.loads(unseal_line(path.read_bytes(), str(path))))
    except (CorruptionError, AttributeError, TypeError, LookupError, ValueError) as error:
        cause = error.what if isinstance(error, CorruptionError) else str(error)
        raise CorruptionError(
            "A plan is damaged, or has another form than this version writes",
            where=str(path),
            expected="what `mergepipe plan` stored under this name",
            found=cause,
            next_step="make it again with `mergepipe plan RECIPE`",
        ) from error
