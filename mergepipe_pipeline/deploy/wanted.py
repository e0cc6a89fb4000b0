"""The state that a recipe wants: a digest of what it says and of its inputs as indexed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache

from mergepipe_pipeline.deploy.arrivals import place_of
from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.digest import digest_json, sha256_hex
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.plan import ENGINE_VERSION
from mergepipe_pipeline.errors import CheckpointError, NotFoundError
from mergepipe_pipeline.facts.offline import present_root
from mergepipe_pipeline.facts.tensor_digests import content_of
from mergepipe_pipeline.recipe.yaml_text import read_documents
from mergepipe_pipeline.remote.address import is_address
from mergepipe_pipeline.storage.side_files import side_stamps
from mergepipe_pipeline.storage.source import open_source
from mergepipe_pipeline.warehouse import Warehouse

#: Keys of a recipe that say when, not what.
_WHEN = frozenset({"schedule", "trigger", "timezone"})


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
    far = [m for m in names if place_of(warehouse, catalog, m) is None]
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
    said = _said(file.parsed.text) if file.parsed else ""
    # Lineage has names: of a recipe that does not name an expert, what it takes does.
    taken = [s.taken for s in file.selected]
    asked = [ENGINE_VERSION, sha256_hex(said.encode()), contents, *([taken] if taken else [])]
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
    return json.dumps(
        [
            {k: v for k, v in document.value.items() if k not in _WHEN}
            for document in read_documents(text)
            if isinstance(document.value, dict)
        ]
    )
