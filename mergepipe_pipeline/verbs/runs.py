"""The verbs on a training run's folder: each checkpoint lands, or is registered, by its step.

What is no whole checkpoint is left out with the reason; the next call takes it once it is whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from mergepipe_pipeline.checkpoints.open_checkpoint import is_complete
from mergepipe_pipeline.deploy.arrivals import stamps_of
from mergepipe_pipeline.deploy.runs import steps_at
from mergepipe_pipeline.domain.training_run import STEP_FORM, member_name, steps_in
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.storage.regular import text_of
from mergepipe_pipeline.verbs.land import land
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Steps:
    """What a run's folder brought: the names that are new, those that were there, (folder, why)."""

    new: tuple[str, ...]
    there: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]


def holds_run(path: str | Path) -> bool:
    """Whether a folder has checkpoints that are named by steps, and no weights of its own."""
    steps, has_weights = steps_at(Path(path)) if os.path.isdir(path) else ({}, False)
    return bool(steps) and not has_weights


def land_run(
    warehouse: Warehouse,
    path: str | Path,
    run: str | None = None,
    *,
    link: bool = False,
    tags: Collection[str] = (),
) -> Steps:
    """Land every whole checkpoint of a run's folder that is not there as it is, in order of steps.

    Raises MergePipeError for a folder without steps or with two folders of one, before any lands;
    else as `land`.
    """

    def take(folder: Path, name: str) -> bool:
        final = warehouse.inbox / name
        # Landing keeps sizes and times.
        if final.is_dir() and set(stamps_of(final)[0]) <= set(stamps_of(folder)[0]):
            return False
        land(warehouse, str(folder), name, link=link, tags=tags)
        return True

    return _each(path, run, take)


def register_run(
    warehouse: Warehouse, path: str | Path, run: str | None = None, base: str | None = None
) -> Steps:
    """Register every whole checkpoint of a run's folder where it lies, in order of steps.

    Raises MergePipeError for a folder without steps or with two folders of one, before any is
    registered; else as `register`.
    """

    def take(folder: Path, name: str) -> bool:
        known = {(n, version) for n, version, *_ in warehouse.catalog.registrations()}
        made = register(warehouse, folder, name, base)
        return (made.name, made.version) not in known

    return _each(path, run, take)


def _each(path: str | Path, run: str | None, take: Callable[[Path, str], bool]) -> Steps:
    """Give each whole step to `take`, which says whether it is new."""
    folder = Path(path).resolve()
    inside = sorted(p.name for p in folder.iterdir() if p.is_dir()) if os.path.isdir(folder) else []
    steps = steps_in(inside)
    twice = next((folders for folders in steps.values() if len(folders) > 1), [])
    if twice or not steps:
        raise MergePipeError(
            "This is no folder of a training run",
            where=text_of(folder),
            expected=f"one folder for each step, named like {STEP_FORM}",
            found=f"{' and '.join(twice)}, which are one step" if twice else "no such folder",
            next_step="move one of them away" if twice else "check the path",
        )
    named = {folders[0] for folders in steps.values()}
    why = f"it is not named by a step, like {STEP_FORM}"
    left_out = [(text_of(one), why) for one in inside if one not in named]
    new: list[str] = []
    there: list[str] = []
    for step, (one,) in steps.items():
        name = member_name(run or folder.name, step)
        if problem := is_complete(str(folder / one)):
            left_out.append((one, problem))
        else:
            (new if take(folder / one, name) else there).append(name)
    return Steps(tuple(new), tuple(there), tuple(left_out))
