"""Where a standing recipe is: in what state, why, and what comes next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from mergepipe_pipeline.deploy.recipe_files import RecipeFile, yaml_files
from mergepipe_pipeline.deploy.retry import NEXT, Attempt, is_last, pause_s
from mergepipe_pipeline.warehouse import Warehouse

State = Literal[
    "current",
    "running",
    "waiting",
    "to be merged",
    "failing",
    "failed",
    "refused",
    "cannot be used",
]
_NEXT: dict[State, str] = {
    "current": "nothing, until an input or the recipe changes",
    "running": "it is released when the run ends well",
    "waiting": "it goes on by itself once that is over",
    "to be merged": "run the job {job}, or wait for its schedule",
    "failing": "it is tried again by itself",
    "failed": "mend the cause, or run the job {job}",
    "refused": "mend what changed, or find the suspect: `mergepipe bisect {name}`",
    "cannot be used": "mend its file: `mergepipe check` tells all that is wrong",
}


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a recipe is.

    `told` says why in full at this moment; `why` says it without what changes by the second, and
    `then` what comes next or what a person does.
    """

    state: State
    told: str
    why: str
    then: str


def standing(file: RecipeFile, state: State, told: str, then: str = "") -> Standing:
    """Where a recipe is, for a reason; what comes next is what the reason says, or the state."""
    why, step = _parts(told)
    following = _NEXT[state].format(name=file.name, job=f"merge_{file.identifier}")
    return Standing(state, told, why, step or then or following)


def failing(file: RecipeFile, attempts: Sequence[Attempt], told: str, first_s: float) -> Standing:
    """Where a recipe is whose last attempts failed, of which `reason_to_wait` gives `told`."""
    last = attempts[-1]
    why, step = _parts(last.error)
    why = f"attempt {last.number} failed: {why}"
    if is_last(attempts):
        return Standing("failed", told, why, step or standing(file, "failed", "").then)
    again = datetime.fromtimestamp(last.ended_s + pause_s(first_s, last.number), UTC)
    return Standing("failing", told, why, f"it is tried again at {again:%H:%M:%S} UTC")


def _parts(error: str) -> tuple[str, str]:
    """What is wrong, and what to do; a list of problems, which says it best, stands after both."""
    why, _, rest = error.partition(NEXT)
    step, _, listed = rest.partition("\n")
    return listed or why, step


def how_to_begin(warehouse: Warehouse) -> tuple[str, str]:
    """How a model, and how a recipe, comes into a warehouse: a folder and a command."""
    land = f"`mergepipe --home {warehouse.root} land MODEL`"
    return (
        f"put a model's folder into {warehouse.inbox} or run {land}",
        f"write a recipe to {warehouse.recipes}/NAME.yml",
    )


def first_steps(warehouse: Warehouse) -> str | None:
    """What a person does first where there are no models or no recipes; None where both are."""
    land, write = how_to_begin(warehouse)
    has_models = bool(warehouse.catalog.names()) or any(warehouse.inbox.iterdir())
    has_recipes = any(yaml_files(warehouse.recipes))
    if has_models and has_recipes:
        return None
    if has_models:
        return f"There is no recipe yet: {write}"
    if has_recipes:
        return f"There is no model yet: {land}"
    return f"The warehouse {warehouse.root} is empty: first {land}, then {write}"
