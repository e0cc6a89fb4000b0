"""What differs between the live snapshot and another one: experts, their versions, and layers.

From manifests, provenance and catalog alone; no weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from mergepipe_pipeline.catalog.catalog import Registration
from mergepipe_pipeline.contents.tensor_digests import content_of
from mergepipe_pipeline.domain.layers import layer_order
from mergepipe_pipeline.domain.request import Request
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.errors import MergePipeError, NotFoundError
from mergepipe_pipeline.execution.lookup import provenance_of, request_of
from mergepipe_pipeline.recipe.yaml_text import read_documents
from mergepipe_pipeline.warehouse import Warehouse

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
    """What differs from the snapshot `live` to the snapshot `other`.

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
        """What changed, without since when."""
        parts = [change.summary for change in self.inputs[:_MOST_SHOWN]]
        if len(self.inputs) > _MOST_SHOWN:
            parts.append(f"{len(self.inputs) - _MOST_SHOWN} more")
        parts += ["the recipe says something else"] if self.asks_otherwise else []
        named = f" ({', '.join(self.layers)})" if 0 < len(self.layers) <= _MOST_SHOWN else ""
        layers = f"{len(self.layers)} of {self.layers_total} layers differ{named}"
        return f"{'; '.join(parts) or 'no input changed'}; {layers}"


def changes_between(warehouse: Warehouse, live: Snapshot, other: Snapshot) -> Changes:
    """What differs from `live` to `other`. Raises CorruptionError for a damaged provenance."""
    recipes = [provenance_of(s).get("recipe", "") for s in (live, other)]
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
        requests[0] != requests[1] or _said(recipes[0]) != _said(recipes[1]),
        tuple(sorted(differ, key=layer_order)),
        len(other_shards),
    )


def _said(recipe: str) -> list[object]:
    """What a recipe's text says of its result's weights."""
    return [
        {k: v for k, v in document.value.items() if k not in _NOT_OF_WEIGHTS}
        for document in read_documents(recipe)
        if isinstance(document.value, dict)
    ]


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
    """What a content is called: by its version in the catalog, if it has one."""
    if content is None:
        return None
    ids = {m.checkpoint_id for m in request.models if m.name == name}
    versions: list[Registration] = []
    with suppress(MergePipeError):
        versions = warehouse.catalog.history(name)
    numbers = [r.version for r in versions if r.checkpoint.checkpoint_id in ids]
    return f"version {numbers[-1]}" if numbers else f"content {content[:8]}"
