"""The state that a standing recipe wants, where the recipe is, why, and what comes next.

What is wanted is a digest of what the recipe says and of its inputs as indexed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Literal

from mergepipe_pipeline.deploy.arrivals import place_of
from mergepipe_pipeline.deploy.recipe_files import RecipeFile, yaml_files
from mergepipe_pipeline.deploy.retry import NEXT, Attempt, is_last, pause_s
from mergepipe_pipeline.digest import digest_json, sha256_hex
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.plan import ENGINE_VERSION
from mergepipe_pipeline.errors import CheckpointError, NotFoundError
from mergepipe_pipeline.facts.contents import content_of
from mergepipe_pipeline.facts.offline import present_root
from mergepipe_pipeline.recipe.yaml_text import said
from mergepipe_pipeline.remote.address import is_address
from mergepipe_pipeline.storage.side_files import side_stamps
from mergepipe_pipeline.storage.source import open_source
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
#: Keys of a recipe that say when, not what.
_WHEN = frozenset({"schedule", "trigger", "timezone"})


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


def standing(file: RecipeFile, state: State, told: str) -> Standing:
    """Where a recipe is, for a reason; what comes next is what the reason says, or the state."""
    why, step = _parts(told)
    following = _NEXT[state].format(name=file.name, job=file.job or f"merge_{file.identifier}")
    return Standing(state, told, why, step or following)


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
    """Say what a person does first where there are no models or no recipes; else None."""
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


def wanted(warehouse: Warehouse, file: RecipeFile) -> str | None:
    """The digest of what a release would be made from; None while an input is not indexed."""
    catalog = warehouse.catalog
    if not all(member in catalog for member in file.members):
        return None
    return wanted_of(warehouse, file, [catalog.get(m).checkpoint for m in file.members])


def not_indexed(warehouse: Warehouse, file: RecipeFile) -> str:
    """Which inputs of a recipe have contents that are not known."""
    catalog = warehouse.catalog
    names = [m for m in file.members if not catalog.has_content(m)]
    which = f"{', '.join(names)} {'are' if names[1:] else 'is'}" if names else "an input is"
    far = [m for m in names if place_of(warehouse, m) is None]
    # What is away or at an address is not watched.
    how = f"; `mergepipe analyze {' '.join(far)}` does it" if far else ""
    return f"{which} not indexed yet{how}"


def wanted_of(warehouse: Warehouse, file: RecipeFile, inputs: Iterable[Checkpoint]) -> str | None:
    """The same of these inputs."""
    try:
        contents = [
            [content_of(warehouse.catalog, c), c.layout_sha256, *_beside(warehouse, file, c)]
            for c in inputs
        ]
    except NotFoundError:
        return None
    text = _said(file.parsed.text) if file.parsed else ""
    # Lineage has names: of a recipe that does not name an expert, what it takes does.
    taken = [s.taken for s in file.selected]
    asked = [ENGINE_VERSION, sha256_hex(text.encode()), contents, *([taken] if taken else [])]
    return digest_json(asked)[:24]


def _beside(warehouse: Warehouse, file: RecipeFile, checkpoint: Checkpoint) -> list[str]:
    """What lies beside the weights, where it goes into the result: of the model whose config and
    tokenizer it gets, of all where a tokenizer is made.
    """
    made = any(s.tokenizer is not None or s.chat_template is not None for s in file.stages)
    if is_address(checkpoint.root) or not (made or checkpoint.name == _template(file)):
        return []
    known = warehouse.catalog.side_digests(checkpoint.checkpoint_id)
    root = present_root(warehouse, checkpoint.checkpoint_id, checkpoint.root)
    stamps: list[str] = []
    with suppress(CheckpointError), open_source(root) as source:
        stamps += [f"{s.file} {known.get(s, s)}" for s in side_stamps(source, root)]
    return stamps


def _template(file: RecipeFile) -> str:
    """The model whose config and tokenizer the last stage's result has."""
    stages = {stage.stage or stage.name: stage for stage in file.stages}
    stage = file.stages[-1]
    while True:
        model = stage.references[stage.base or 0].model
        if model not in stage.stages_used:
            return model
        stage = stages[model]


@lru_cache(maxsize=512)  # sensors ask of every recipe at each tick
def _said(text: str) -> str:
    """What a recipe says of its result: without comments, layout, and when it is to be made."""
    return json.dumps(said(text, _WHEN))
