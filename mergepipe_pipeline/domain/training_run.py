"""The names of the checkpoints of one training run: by the run and the step that each was saved at.

Trainers name a folder by its step; the warehouse names what lies there `RUN.step-STEP`, so that no
version number and no size in another name is ever read as a step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

#: How trainers name the folder of a step, for people.
STEP_FORM = "checkpoint-1000, step_1000, global_step1000, iter_0001000 or 1000"
_FOLDER = re.compile(r"(?:(?:checkpoint|ckpt|global_step|step|iter)[-_]?)?([0-9]{1,18})")
_MEMBER = re.compile(r"(?P<run>.+)\.step-(?P<step>0|[1-9][0-9]*)")


def member_name(run: str, step: int) -> str:
    """The name of a run's checkpoint."""
    return f"{run}.step-{step}"


def run_of(name: str) -> str | None:
    """The run that a name's checkpoint is of; None where the name is of none."""
    member = _MEMBER.fullmatch(name)
    return member and member["run"]


def step_of(name: str) -> int:
    """The step in the name of a run's checkpoint."""
    member = _MEMBER.fullmatch(name)
    assert member is not None, name
    return int(member["step"])


def is_weights(file: str) -> bool:
    """Whether a file's name says that its folder is a checkpoint itself."""
    return file.endswith(".safetensors") or file == ".metadata"


def steps_in(folders: Iterable[str]) -> dict[int, list[str]]:
    """The folders that are named by a step, by step in increasing order."""
    steps: dict[int, list[str]] = {}
    for folder in sorted(folders):
        if found := _FOLDER.fullmatch(folder):
            steps.setdefault(int(found[1]), []).append(folder)
    return dict(sorted(steps.items()))
