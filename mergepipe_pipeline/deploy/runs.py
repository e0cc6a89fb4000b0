"""Training runs in the inbox: each step in a run's folder is an expert, by a link beside it.

The folder may itself be a link to where a trainer writes. A step whose folder the trainer removed
loses its link, and so leaves as any expert whose folder is deleted.
"""

from __future__ import annotations

import os
from pathlib import Path

from mergepipe_pipeline.domain.bounds import NAME
from mergepipe_pipeline.domain.training_run import is_weights, member_name, run_of, steps_in
from mergepipe_pipeline.storage.atomic import link_path, remove_tree
from mergepipe_pipeline.storage.regular import text_of
from mergepipe_pipeline.warehouse import Warehouse


def steps_at(folder: Path) -> tuple[dict[int, list[str]], bool]:
    """The folders of steps in a folder, by step, and whether it has weights of its own, too.

    Raises OSError.
    """
    with os.scandir(folder) as entries:
        inside = list(entries)
    has_weights = any(is_weights(e.name) for e in inside)
    return steps_in(e.name for e in inside if os.path.isdir(e.path)), has_weights


def link_steps(warehouse: Warehouse) -> None:
    """Link every step of the runs in the inbox, and drop the links of steps that are gone.

    A run that cannot be read, or is empty as where a disk is not mounted, keeps its links.
    """
    linked: dict[str, dict[Path, str]] = {}
    for path in sorted(warehouse.inbox.iterdir()):
        run = run_of(path.name)
        if run and path.is_symlink() and os.path.dirname(target := os.readlink(path)) == run:
            linked.setdefault(run, {})[path] = os.path.basename(target)
        elif NAME.fullmatch(path.name) and path.is_dir():
            linked.setdefault(path.name, {})
    for run, links in linked.items():
        try:
            steps, _ = steps_at(warehouse.inbox / run)
            there = set(os.listdir(warehouse.inbox / run))
        except OSError:
            continue
        for link, folder in links.items():
            if there and folder not in there:
                remove_tree(link)
        for step, folders in steps.items():
            link = warehouse.inbox / member_name(run, step)
            if len(folders) == 1 and NAME.fullmatch(link.name) and not os.path.lexists(link):
                link_path(f"{run}/{folders[0]}", link)


def run_problem(warehouse: Warehouse, run: str) -> str | None:
    """Why steps of a run's folder are left out; "" if none is, None where the folder is no run.

    One with weights of its own is an expert like others, whose steps are linked all the same.
    Raises OSError.
    """
    folder = warehouse.inbox / run
    steps, has_weights = steps_at(folder) if os.path.isdir(folder) else ({}, False)
    if not steps or has_weights:
        return None
    said = []
    for step, folders in steps.items():
        link = warehouse.inbox / member_name(run, step)
        if len(folders) > 1:
            said.append(f"{text_of(' and '.join(folders))} are one step: move one of them away")
        elif link.exists() and not link.samefile(folder / folders[0]):
            said.append(f"{link.name} has landed from elsewhere: {folders[0]} is left out")
    return "; ".join(said)
