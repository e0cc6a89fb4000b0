"""The verb `explain` in depth: one tensor, one expert, one snapshot.

Plans and the catalog tell it; only weights that the catalog does not know are read. `shares` says
what a plan reads in all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.domain.plan import MergePlan, TensorTask
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.errors import NotFoundError
from mergepipe_pipeline.execution.lookup import (
    checked_plan,
    load_plan,
    plan_of,
    snapshot_of,
    stored_plans,
)
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.problem import SolvedProblem, solve_plan
from mergepipe_pipeline.planner.level_reasons import level_account
from mergepipe_pipeline.planner.level_selection import LevelSelection
from mergepipe_pipeline.planner.reasons import Account, Block, account
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.report.comparison import Comparison, full_plan_id, known_comparison
from mergepipe_pipeline.report.query import first_versions, provenance, snapshots_with_provenance
from mergepipe_pipeline.report.shares import shares
from mergepipe_pipeline.resolution.recipe_text import load_recipe
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True)
class TensorStory:
    """One output tensor of a plan: what makes it, and why each block of it is read or left.

    `experts` are the models' names by the positions that `blocks` give. `is_current`: the recipe
    planned today would read the same; else `account` is of today's list, not of the plan's.
    """

    plan: MergePlan
    layer: str
    task: TensorTask
    experts: tuple[str, ...]
    account: Account
    blocks: tuple[Block, ...]
    is_current: bool


@dataclass(frozen=True, slots=True)
class Appearance:
    """A plan or snapshot that an expert is part of; version None: that content has no version."""

    kind: Literal["plan", "snapshot"]
    id: str
    recipe: str
    method: str
    version: int | None
    nbytes_total: int
    nbytes_read: int


@dataclass(frozen=True, slots=True)
class Contribution:
    """One expert in one layer of a plan: bytes, and Σ‖c·δ‖² of it and of what was read.

    Of sparsifying methods the part that they keep. `others_sq_norm` is what was read of the other
    experts. None where there is no base to differ from.
    """

    expert: str
    layer: str
    nbytes_total: int
    nbytes_bought: int
    sq_norm: float | None
    sq_norm_bought: float | None
    others_sq_norm: float | None

    @property
    def share_of_bytes(self) -> float:
        """Bytes read of this expert's."""
        return self.nbytes_bought / max(1, self.nbytes_total)

    @property
    def share_of_sq_norm(self) -> float | None:
        """Energy read of this expert's; 1 where it changes nothing."""
        if self.sq_norm is None or self.sq_norm_bought is None:
            return None
        return self.sq_norm_bought / self.sq_norm if self.sq_norm > 0 else 1.0

    @property
    def part(self) -> float | None:
        """Its part of all that was read for the layer, by squared norm; 0 where nothing was."""
        if self.sq_norm_bought is None or self.others_sq_norm is None:
            return None
        together = self.sq_norm_bought + self.others_sq_norm
        return self.sq_norm_bought / together if together > 0 else 0.0

    @property
    def change(self) -> float | None:
        """Estimated ‖c·δ‖₂ that it contributes."""
        return None if self.sq_norm_bought is None else math.sqrt(self.sq_norm_bought)


@dataclass(frozen=True)
class ExpertStory:
    """Where an expert is used, and what it contributed to one of these plans."""

    name: str
    appearances: tuple[Appearance, ...]
    plan: MergePlan
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True)
class SnapshotStory:
    """What a snapshot was expected to cost and lose, and what it did; `comparison` if known.

    `is_full`: it is the full merge itself. None where its plan is gone.
    """

    snapshot: Snapshot
    provenance: dict[str, Any]
    is_full: bool | None
    comparison: Comparison | None


def explain_tensor(
    warehouse: Warehouse, what: str, tensor: str, progress: Progress | None = None
) -> TensorStory:
    """Why a plan, snapshot, ref or recipe file reads what it reads of one output tensor.

    Raises NotFoundError for an unknown one, with the nearest names.
    """
    plan = _plan(warehouse, what, progress)
    tasks = {task.name: (layer.name, task) for layer in plan.layers for task in layer.tasks}
    if tensor not in tasks:
        near = get_close_matches(tensor, tasks, n=3, cutoff=0.3)
        raise NotFoundError(
            "No output tensor of this name",
            where=f"plan {plan.plan_id[:16]}",
            found=repr(tensor),
            expected=", ".join(near or list(tasks)[:3]),
            next_step="see `mergepipe explain PLAN --by tensor`",
        )
    solved = solve_plan(warehouse, plan, progress)
    account = _account(solved)
    layer, task = tasks[tensor]
    names = list(solved.problem.tensors)
    blocks = tuple(account.blocks(names.index(tensor))) if tensor in names else ()
    return TensorStory(
        plan, layer, task, solved.experts, account, blocks, _is_current(plan, solved)
    )


def _is_current(plan: MergePlan, solved: SolvedProblem) -> bool:
    """Whether planning again gives the same; taken to be so for a search for an error."""
    e = plan.estimates
    if e.budget_bytes is None and e.error_bound != 0:
        return True
    return np.array_equal(solved.again(), solved.levels)


def _account(solved: SolvedProblem) -> Account:
    selection, budget = solved.selection, solved.recipe.budget
    if isinstance(selection, LevelSelection):
        return level_account(selection, budget)
    return account(solved.problem, budget, selection.ranking, selection.choice)


def _plan(warehouse: Warehouse, what: str, progress: Progress | None) -> MergePlan:
    """The plan of a recipe file, or the one that `plan_of` finds."""
    path = Path(what).expanduser()
    if path.is_file():
        folder = path.resolve().parent
        parsed = load_recipe(path, warehouse)
        return make_plan(warehouse, parsed, relative_to=folder, progress=progress)
    return plan_of(warehouse, what)


def explain_expert(
    warehouse: Warehouse, name: str, where: str | None = None, progress: Progress | None = None
) -> ExpertStory:
    """Every plan and snapshot with an expert, and what it contributes to `where`.

    Default: the newest snapshot with it, else a plan. Raises NotFoundError if it is in none.
    """
    appearances = tuple(_appearances(warehouse, name))
    if not appearances:
        warehouse.catalog.get(name)
        raise NotFoundError(
            "No plan or snapshot has this expert",
            where=str(warehouse.root),
            found=repr(name),
            next_step="make a plan with `mergepipe plan RECIPE`",
        )
    plan = plan_of(warehouse, where or appearances[0].id)
    mine = tuple(
        c
        for c in contributions(solve_plan(warehouse, plan, progress))
        if name in c.expert.split("+")
    )
    if not mine:
        raise NotFoundError(
            "This plan does not have the expert",
            where=f"plan {plan.plan_id[:16]}",
            found=repr(name),
            expected=", ".join(dict.fromkeys(s.expert for s in shares(plan, "expert"))),
            next_step=f"see where it is: `mergepipe explain expert {name}`",
        )
    return ExpertStory(name, appearances, plan, mine)


def _appearances(warehouse: Warehouse, name: str) -> Iterator[Appearance]:
    """Snapshots from the newest on, then plans by id."""
    versions = first_versions(warehouse.catalog)
    newest_first = sorted(
        snapshots_with_provenance(warehouse), key=lambda pair: str(pair[1]["created"]), reverse=True
    )
    read = partial(_plan_with, name)
    plans = {plan_id: plan for plan_id, plan in stored_plans(warehouse, read) if plan is not None}
    for snapshot, _ in newest_first:
        plan = plans.get(snapshot.manifest.plan_id)
        if plan is not None:
            yield _appearance(plan, "snapshot", snapshot.snapshot_id, name, versions)
    for plan_id, plan in plans.items():
        yield _appearance(plan, "plan", plan_id, name, versions)


def _plan_with(name: str, plan_id: str, value: Any) -> MergePlan | None:
    """A plan's JSON value as `checked_plan` gives it; None of one without the expert."""
    pairs = zip(value["sources"], value["roles"], strict=True)
    is_in = any((source["name"], role) == (name, "expert") for source, role in pairs)
    return checked_plan(plan_id, value) if is_in else None


def _appearance(
    plan: MergePlan,
    kind: Literal["plan", "snapshot"],
    own_id: str,
    name: str,
    versions: dict[tuple[str, str], int],
) -> Appearance:
    pairs = zip(plan.sources, plan.roles, strict=True)
    source = next(source for source, role in pairs if (source.name, role) == (name, "expert"))
    mine = [s for s in shares(plan, "expert") if name in s.expert.split("+")]
    return Appearance(
        kind,
        own_id,
        plan.recipe_name,
        plan.method,
        versions.get((name, source.checkpoint_id)),
        sum(s.nbytes_total for s in mine),
        sum(s.nbytes_read for s in mine),
    )


def contributions(solved: SolvedProblem) -> list[Contribution]:
    """What each expert contributes to each layer of a choice, layer by layer."""
    c, table, levels = solved.table.candidates, solved.table, solved.levels
    layers = solved.layers
    names = list(dict.fromkeys(layers))
    of_layer = np.array([names.index(layer) for layer in layers], np.int64)
    tensor = np.array([row.tensor for row in c.rows], np.int64)[c.row]
    width = len(solved.experts)
    cell = of_layer[tensor] * width + c.expert
    known = bool(np.isfinite(c.sq_norm).all())

    def total(values: npt.NDArray[Any]) -> F64Array:
        sums = np.bincount(cell, values, len(names) * width)
        return sums.astype(np.float64).reshape(len(names), width)

    nbytes, bought = total(c.nbytes), total(table.nbytes(levels))
    # What is approximated has the share of the squared norm that is not left.
    whole = np.where(table.delta_sq > 0, table.delta_sq, 1.0)
    share = 1 - np.minimum(table.residual_sq(levels) / whole, 1) if known else 1.0
    sq_norm, kept = total(c.sq_norm), total(c.sq_norm * share)
    return [
        Contribution(
            solved.experts[y],
            names[x],
            int(nbytes[x, y]),
            int(bought[x, y]),
            float(sq_norm[x, y]) if known else None,
            float(kept[x, y]) if known else None,
            float(kept[x].sum() - kept[x, y]) if known else None,
        )
        for x, y in np.argwhere(nbytes).tolist()
    ]


def explain_snapshot(warehouse: Warehouse, what: str) -> SnapshotStory:
    """What a snapshot was expected to cost and lose, and what it did.

    Raises NotFoundError, CorruptionError.
    """
    snapshot = load_snapshot(warehouse.snapshots, snapshot_of(warehouse, what))
    stored = provenance(snapshot.path)
    try:
        plan = load_plan(warehouse, snapshot.manifest.plan_id)
    except NotFoundError:
        return SnapshotStory(snapshot, stored, None, None)
    is_full = full_plan_id(plan) == plan.plan_id
    return SnapshotStory(snapshot, stored, is_full, known_comparison(warehouse, plan))
