"""The differences between the live snapshot and a worse one, and how each change can be undone.

From manifests, provenance and catalog alone; no weight is read. A regression is made from the
refused snapshot's own provenance: the recipe, how it was asked for, and exactly the inputs that
were merged, whatever lies in the inbox by now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mergepipe_pipeline.catalog.catalog import Registration
from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.layers import layer_order
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.domain.request import Request, RequestedModel
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.errors import CheckpointChangedError, MergePipeError, NotFoundError
from mergepipe_pipeline.execution.lookup import load_plan, provenance_of, request_of
from mergepipe_pipeline.execution.stages import plan_in_stages
from mergepipe_pipeline.facts.contents import content_of
from mergepipe_pipeline.facts.offline import open_offline, open_root, present_root
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.recipe.yaml_text import said
from mergepipe_pipeline.resolution.recipe_text import parse_plan
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
        gone = {s.name for s in undone if s.previous is None}
        return plan_in_stages(
            warehouse,
            self.parsed,
            progress=progress,
            relative_to=self.folder,
            checkpoints=checkpoints,
            request=self.request,
            left_out=tuple(sorted({*self.request.left_out, *gone})),
        )


def regression_of(
    warehouse: Warehouse, folder: Path, live: Snapshot, refused: Snapshot
) -> Regression:
    """Find what differs between the two, and how each change can be undone. Reads no weight."""
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
    record = warehouse.offline.find(model.checkpoint_id)
    if record is not None:
        if "://" not in record.cold:
            yield record.cold, partial(open_checkpoint, record.cold, name)
        yield f"pack {record.pack_id}", partial(open_offline, warehouse, record, name)
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


#: Keys of a recipe that say when, where and for whom, and not what is merged.
_NOT_OF_WEIGHTS = frozenset({"schedule", "trigger", "timezone", "ref", "evaluate", "gate"})
_MOST_SHOWN = 12


@dataclass(frozen=True, slots=True)
class InputChange:
    """An input that came (`before` None), went (`after` None) or changed.

    Both are versions in the catalog, as `version 3`, or the start of a content's digest.
    """

    name: str
    role: str
    before: str | None
    after: str | None

    @property
    def summary(self) -> str:
        """The change in a few words."""
        what = self.name if self.role == "expert" else f"the base {self.name}"
        if self.before is None:
            return f"{what} came ({self.after})"
        if self.after is None:
            return f"{what} went"
        return f"{what} changed from {self.before} to {self.after}"


@dataclass(frozen=True, slots=True)
class Changes:
    """The differences from the snapshot `live` to the snapshot `other`.

    `asks_otherwise`: recipe, budget or strategy differ. `layers` are those with other bytes.
    """

    live: str
    other: str
    inputs: tuple[InputChange, ...]
    asks_otherwise: bool
    layers: tuple[str, ...]
    layers_total: int

    @property
    def summary(self) -> str:
        """All of it in one sentence."""
        return f"since the live snapshot {self.what}"

    @property
    def what(self) -> str:
        """The changes, without since when."""
        parts = [change.summary for change in self.inputs[:_MOST_SHOWN]]
        if len(self.inputs) > _MOST_SHOWN:
            parts.append(f"{len(self.inputs) - _MOST_SHOWN} more")
        parts += ["the recipe says something else"] if self.asks_otherwise else []
        named = f" ({', '.join(self.layers)})" if 0 < len(self.layers) <= _MOST_SHOWN else ""
        layers = f"{len(self.layers)} of {self.layers_total} layers differ{named}"
        return f"{'; '.join(parts) or 'no input changed'}; {layers}"


def changes_between(warehouse: Warehouse, live: Snapshot, other: Snapshot) -> Changes:
    """Compare `live` with `other`. Raises CorruptionError for a damaged provenance."""
    old, new = (provenance_of(s).get("recipe", "") for s in (live, other))
    before, after = request_of(live), request_of(other)
    shards = {s.layer: s.sha256 for s in live.manifest.shards}
    other_shards = {s.layer: s.sha256 for s in other.manifest.shards}
    differ = {
        n for n in shards.keys() | other_shards.keys() if shards.get(n) != other_shards.get(n)
    }
    requests = [
        (r.budget, r.strategy, r.block_elems, r.no_packs, r.left_out) for r in (before, after)
    ]
    return Changes(
        live.snapshot_id,
        other.snapshot_id,
        tuple(_inputs(warehouse, (live, before), (other, after))),
        requests[0] != requests[1] or said(old, _NOT_OF_WEIGHTS) != said(new, _NOT_OF_WEIGHTS),
        tuple(sorted(differ, key=layer_order)),
        len(other_shards),
    )


def contents_of(
    warehouse: Warehouse, snapshot: Snapshot, request: Request
) -> dict[tuple[str, str], str]:
    """By role and name what a snapshot was merged from: the digests that `content_of` gives.

    Of an input whose record is gone, the digest of its tensors alone. A stage's result is none, but
    what that stage merged is.
    """
    catalog, models = warehouse.catalog, {m.name: m for m in request.models}
    last = {e.name: (e.role, e.content_sha256) for e in snapshot.manifest.inputs}
    contents = {}
    for name, model in models.items():
        role, content = last.get(name, ("expert", model.content_sha256))
        if model.content_sha256 == content:
            with suppress(NotFoundError):
                checkpoint = catalog.checkpoint(model.checkpoint_id, model.name, model.root)
                content = content_of(catalog, checkpoint) if checkpoint else content
        contents[role, name] = content
    return contents


def _inputs(
    warehouse: Warehouse,
    before: tuple[Snapshot, Request],
    after: tuple[Snapshot, Request],
) -> Iterator[InputChange]:
    was, now = (contents_of(warehouse, *which) for which in (before, after))
    for key in dict.fromkeys((*now, *was)):
        if was.get(key) != now.get(key):
            role, name = key
            versions = (
                _version(warehouse, name, request, contents.get(key))
                for (_, request), contents in ((before, was), (after, now))
            )
            yield InputChange(name, role, *versions)


def _version(warehouse: Warehouse, name: str, request: Request, content: str | None) -> str | None:
    """The name of a content: by its version in the catalog, if it has one."""
    if content is None:
        return None
    ids = {m.checkpoint_id for m in request.models if m.name == name}
    versions: list[Registration] = []
    with suppress(MergePipeError):
        versions = warehouse.catalog.history(name)
    numbers = [r.version for r in versions if r.checkpoint.checkpoint_id in ids]
    return f"version {numbers[-1]}" if numbers else f"content {content[:8]}"
