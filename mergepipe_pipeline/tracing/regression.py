"""A snapshot that is worse than the live one, and what is needed to merge it in other ways.

It is made from the refused snapshot's own provenance: the recipe, how it was asked for, and exactly
the inputs that were merged, whatever lies in the inbox by now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mergepipe_pipeline.contents.away import open_away, open_root, present_root
from mergepipe_pipeline.contents.tensor_digests import content_of
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.domain.request import Request, RequestedModel
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.errors import CheckpointChangedError, MergePipeError, NotFoundError
from mergepipe_pipeline.execution.lookup import load_plan, request_of
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.resolution.recipe_text import parse_plan
from mergepipe_pipeline.storage.open_checkpoint import open_checkpoint
from mergepipe_pipeline.tracing.changes import Changes, changes_between, contents_of
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Suspect:
    """An input that came or changed, and how that is undone.

    Its live version, `previous`, takes its place where that still exists, else it is left out.
    `undoing` says in words which of the two, and why.
    """

    name: str
    content: str
    previous: Checkpoint | None
    undoing: str


@dataclass(frozen=True)
class Regression:
    """The `refused` snapshot of a recipe in `folder` beside the `live` one, which was better.

    `parsed` is the recipe as it was merged: its selectors stand for the experts of then.
    `unmovable` are changes that cannot be undone one by one, in words.
    """

    parsed: ParsedRecipe
    folder: Path
    live: Snapshot
    refused: Snapshot
    changes: Changes
    suspects: tuple[Suspect, ...]
    unmovable: tuple[str, ...]
    request: Request

    def is_live(self, undone: tuple[Suspect, ...]) -> bool:
        """Whether nothing is left of what changed, so that the live snapshot is the result."""
        return not self.unmovable and len(undone) == len(self.suspects)

    def plan_without(
        self, warehouse: Warehouse, undone: tuple[Suspect, ...], progress: Progress | None = None
    ) -> MergePlan:
        """The plan of the recipe with these changes undone.

        Raises what planning raises: RecipeError for an expert that cannot be left out,
        CheckpointChangedError for an input that is not what was merged any more.
        """
        if self.is_live(undone):
            return load_plan(warehouse, self.live.manifest.plan_id)
        previous = {s.name: s.previous for s in undone if s.previous is not None}
        checkpoints: dict[str, Checkpoint] = {}
        for model in self.request.models:
            checkpoint = previous.get(model.name) or _as_merged(warehouse, model)
            # By name as well as by text, so that none of them is registered as the newest.
            checkpoints |= {model.text: checkpoint, model.name: checkpoint}
        return make_plan(
            warehouse,
            self.parsed,
            progress=progress,
            relative_to=self.folder,
            budget=self.request.budget,
            strategy=self.request.strategy,
            block_elems=self.request.block_elems,
            no_packs=self.request.no_packs,
            checkpoints=checkpoints,
            leave_out=[s.name for s in undone if s.previous is None],
        )


def regression_of(
    warehouse: Warehouse, folder: Path, live: Snapshot, refused: Snapshot
) -> Regression:
    """What differs between the two, and how each change can be undone. Reads no weight."""
    changes = changes_between(warehouse, live, refused)
    before, request = request_of(live), request_of(refused)
    models = {m.name: m for m in before.models}
    was, now = contents_of(warehouse, live, before), contents_of(warehouse, refused, request)
    suspects, unmovable = [], ["the recipe"] if changes.asks_otherwise else []
    for change in changes.inputs:
        previous, why_not = None, ""
        if change.before is not None and change.after is not None:
            content = was[change.role, change.name]
            previous, why_not = _previous(warehouse, models[change.name], content)
        if change.after is None or (previous is None and change.role == "base"):
            unmovable.append(change.summary)
            continue
        undoing = f"with {change.before}" if previous else f"without it{why_not}"
        suspects.append(Suspect(change.name, now[change.role, change.name], previous, undoing))
    merged = parse_plan(load_plan(warehouse, refused.manifest.plan_id))
    return Regression(
        merged, folder, live, refused, changes, tuple(suspects), tuple(unmovable), request
    )


def _previous(
    warehouse: Warehouse, model: RequestedModel, content: str
) -> tuple[Checkpoint | None, str]:
    """A checkpoint with the content that is live, or why there is none."""
    reasons: dict[str, None] = {}
    for place, look in _places(warehouse, model):
        try:
            checkpoint = look()
            if content_of(warehouse.catalog, checkpoint) == content:
                return checkpoint, ""
            reasons[f"{place} holds another version"] = None
        except MergePipeError as error:  # it is gone, or nobody knows what it holds
            reasons[f"{place}: {error.what}"] = None
    return None, f" (its live version is gone: {'; '.join(reasons)})"


def _places(
    warehouse: Warehouse, model: RequestedModel
) -> Iterator[tuple[str, Callable[[], Checkpoint]]]:
    """Where its files were, where `pack --replace` has them, and where its name was since."""
    name = model.name
    yield model.root, partial(open_root, warehouse, model.root, name)
    record = warehouse.replaced.find(model.checkpoint_id)
    if record is not None:
        yield record.cold, partial(open_checkpoint, record.cold, name)
        yield f"pack {record.pack_id}", partial(open_away, warehouse, record, name)
    with suppress(NotFoundError):
        for root in dict.fromkeys(r.checkpoint.root for r in warehouse.catalog.history(name)):
            yield root, partial(open_root, warehouse, root, name)


def _as_merged(warehouse: Warehouse, model: RequestedModel) -> Checkpoint:
    """An input as it was merged. Raises CheckpointChangedError if that is not there any more."""
    root = present_root(warehouse, model.checkpoint_id, model.root)
    checkpoint = open_root(warehouse, root, model.name)
    if checkpoint.checkpoint_id != model.checkpoint_id:
        raise CheckpointChangedError(
            "An input of the refused snapshot is not what it was",
            where=f"{model.name}, {model.root}",
            expected=f"checkpoint {model.checkpoint_id[:8]}",
            found=f"checkpoint {checkpoint.checkpoint_id[:8]}",
            next_step="merge and judge the recipe again: what is there now may pass",
        )
    return checkpoint
