"""Finds snapshots and plans: by a ref, a version of one, an id, a prefix, or a folder somewhere.

Plans are sealed files, by id.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mergepipe_pipeline.digest import seal_line, sha256_hex, unseal, unseal_line
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.domain.request import Request, RequestedModel
from mergepipe_pipeline.domain.snapshot import MANIFEST, PROVENANCE, Snapshot
from mergepipe_pipeline.errors import CorruptionError, NotFoundError
from mergepipe_pipeline.snapshots.find import load_snapshot, read_manifest
from mergepipe_pipeline.storage.atomic import remove_tree, write_atomic
from mergepipe_pipeline.storage.chain import MOST_VERSIONS
from mergepipe_pipeline.storage.forms import read_form, record_of
from mergepipe_pipeline.text import whole_number
from mergepipe_pipeline.warehouse import Warehouse

_LOG = logging.getLogger("mergepipe")


T = TypeVar("T")


def store_plan(warehouse: Warehouse, plan: MergePlan) -> None:
    """Write a plan, sealed, under its id; its folders by named roots. Raises StorageFullError."""
    data = _recorded(warehouse, plan)
    write_atomic(warehouse.plan_path(plan.plan_id), data)


def store_working_plan(warehouse: Warehouse, recipe: str, plan: MergePlan) -> str:
    """Write the plan that a standing recipe works on; its SHA-256. Raises StorageFullError.

    Under its id alone it would be another recipe's with equal weights, whose config and tokenizer
    are those of another base.
    """
    data = _recorded(warehouse, plan)
    sha256 = sha256_hex(data)
    write_atomic(warehouse.working_plan_path(recipe, sha256), data)
    return sha256


@dataclass(frozen=True, slots=True)
class WorkingPlan:
    """The work of a standing recipe: a plan, the state that it answers, and its inputs' states.

    `snapshot_id` is "" until the plan's snapshot is committed.
    """

    plan_id: str
    plan_sha256: str
    wanted: str
    inputs: dict[str, str]
    snapshot_id: str = ""


def working_plan(warehouse: Warehouse, recipe: str) -> WorkingPlan:
    """The record of the plan that a recipe works on. Raises NotFoundError, CorruptionError."""
    path, next_step = warehouse.current_plan_path(recipe), f"materialize {recipe}/plan"
    if not path.exists():
        raise NotFoundError(
            "A recipe has no plan yet",
            where=recipe,
            found=str(path),
            next_step=f"{next_step} first",
        )
    what = "The record of a recipe's plan"
    data = path.read_bytes()
    return read_form(WorkingPlan, data, str(path), what, f"{next_step}: it plans anew")[0]


def load_working_plan(warehouse: Warehouse, recipe: str, working: WorkingPlan) -> MergePlan:
    """The plan that a standing recipe works on. Raises CorruptionError."""
    path = warehouse.working_plan_path(recipe, working.plan_sha256)
    refuse_other_plan(path, working.plan_sha256)
    plan = _read(path, lambda _, value: checked_plan(working.plan_id, value))
    return _with_folders(plan, warehouse.roots.here)


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


def _with_folders(plan: MergePlan, placed: Callable[[str], str]) -> MergePlan:
    """The plan with each folder as `placed` gives it; its id covers none of them."""
    models = (replace(m, root=placed(m.root)) for m in plan.request.models)
    return replace(
        plan,
        sources=tuple(replace(s, root=placed(s.root)) for s in plan.sources),
        packs=tuple(replace(p, root=placed(p.root)) for p in plan.packs),
        request=replace(plan.request, models=tuple(models)),
    )


def _recorded(warehouse: Warehouse, plan: MergePlan) -> bytes:
    return seal_line(_with_folders(plan, warehouse.roots.recorded).to_json())


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
    return _with_folders(_read(path, checked_plan), warehouse.roots.here)


def stored_plans(warehouse: Warehouse, read: Callable[[str, Any], T]) -> Iterator[tuple[str, T]]:
    """Yield what `read` makes of each plan's id and JSON value, by id.

    Damaged plans, and those of other versions of this program, are logged and left out.
    """
    for path in sorted(warehouse.plans.glob("*.json")):
        try:
            yield path.stem, _read(path, read)
        except CorruptionError as error:
            _LOG.warning("%s", error)


def checked_plan(plan_id: str, value: Any) -> MergePlan:
    """The plan of a JSON value, as recorded. Raises ValueError if it has another id."""
    plan = record_of(MergePlan, value)
    if plan.plan_id != plan_id:
        raise ValueError(f"the plan {plan.plan_id} under the name of {plan_id}")
    return plan


def _read(path: Path, read: Callable[[str, Any], T]) -> T:
    """Return what `read` makes of a stored plan's id and JSON value. Raises CorruptionError."""
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


def snapshot_named(warehouse: Warehouse, text: str) -> Snapshot:
    """The snapshot of a ref, `REF@VERSION`, an id, a unique prefix, or a snapshot's folder.

    The folder may be an exported one. Raises NotFoundError, CorruptionError (manifest).
    """
    try:
        return load_snapshot(warehouse.snapshots, snapshot_of(warehouse, text))
    except NotFoundError:
        folder = Path(text).expanduser()
        if not text or not folder.is_dir():
            raise
        if not (folder / MANIFEST).is_file():
            raise NotFoundError(
                "A folder is no snapshot",
                where=str(folder),
                expected="the folder of a snapshot, whole",
                found=f"no {MANIFEST} in it",
                next_step="give the folder that `mergepipe merge` made, or see `mergepipe ls`",
            ) from None
    manifest = read_manifest(folder)
    return Snapshot(manifest.snapshot_id, str(folder.resolve()), manifest)


def provenance_of(snapshot: Snapshot) -> dict[str, Any]:
    """How a snapshot came about. Raises CorruptionError."""
    path = Path(snapshot.path) / PROVENANCE
    if not path.is_file():  # a FIFO would keep its reader waiting
        raise CorruptionError(
            "A snapshot has no provenance",
            where=str(path),
            expected=PROVENANCE,
            found="no such file",
            next_step="copy the whole folder of the snapshot",
        )
    return unseal(path.read_bytes(), str(path))


def request_of(snapshot: Snapshot) -> Request:
    """How a snapshot was asked for; of one that no recipe made, its inputs alone.

    Raises CorruptionError.
    """
    made = provenance_of(snapshot)
    if "request" in made:
        return record_of(Request, made["request"])
    inputs = zip(snapshot.manifest.inputs, made["sources"], strict=True)
    return Request(
        models=tuple(
            RequestedModel(i.name, i.name, s["root"], s["checkpoint_id"], i.content_sha256)
            for i, s in inputs
        )
    )


def snapshot_of(warehouse: Warehouse, text: str) -> str:
    """The id that a ref, `REF@VERSION`, an id or a unique prefix means. Raises NotFoundError."""
    refs = warehouse.refs
    if text in refs:
        return refs.current(text).snapshot_id
    ref, _, number = text.rpartition("@")
    version = whole_number(number, MOST_VERSIONS)
    if ref in refs and version is not None:
        return refs.target(ref, version).snapshot_id
    return load_snapshot(warehouse.snapshots, text).snapshot_id


def plan_of(warehouse: Warehouse, text: str) -> MergePlan:
    """The plan that an id, a unique prefix, a snapshot or a ref means. Raises NotFoundError."""
    return load_plan(warehouse, _plan_id(warehouse, text))


def _plan_id(warehouse: Warehouse, text: str) -> str:
    plans = sorted(p.stem for p in warehouse.plans.glob("*.json"))
    stored = [p for p in plans if text and p.startswith(text)]
    if len(stored) == 1:
        return stored[0]
    try:
        return load_snapshot(warehouse.snapshots, snapshot_of(warehouse, text)).manifest.plan_id
    except NotFoundError as error:
        raise NotFoundError(
            "Neither a plan, a snapshot nor a ref",
            where=str(warehouse.root),
            found=repr(text),
            expected="an id, a unique prefix of one, or a ref",
            next_step="see `mergepipe ls`, or make a plan with `mergepipe plan RECIPE`",
        ) from error
