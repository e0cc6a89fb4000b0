"""What the card of a result says of its inputs: models of the hub, licence and languages.

Goes to the provenance, which no id covers, and from there to the cards of copies: what inputs say
of themselves may change, or be out of reach, while their weights are the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from mergepipe_pipeline.contents.away import present_root
from mergepipe_pipeline.digest import unseal
from mergepipe_pipeline.domain.plan import MergePlan, Source
from mergepipe_pipeline.domain.snapshot import PROVENANCE
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.remote.address import HUB, parse_address
from mergepipe_pipeline.remote.hub_cache import hub_name
from mergepipe_pipeline.snapshots.model_folder import STATED
from mergepipe_pipeline.storage.side_files import CARD
from mergepipe_pipeline.storage.source import open_source
from mergepipe_pipeline.warehouse import Warehouse

#: What is read of a card: its front matter stands first.
_MOST_NBYTES = 64 << 10
_FRONT = re.compile(r"\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
#: How the hub writes licences and languages.
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: Licences that say nothing without the name that stands beside them.
_OTHER = "other"

Facts = dict[str, Any]


def card_facts(warehouse: Warehouse, plan: MergePlan) -> Facts:
    """The keys of a card's front matter that all inputs of a plan give, by name.

    `base_model` lists those of the hub, a base first; `license` and `language` are there where
    every input says the same.
    """
    by_role = sorted(zip(plan.roles, plan.sources, strict=True), key=lambda pair: pair[0])
    inputs = [_facts_of(warehouse, source) for _, source in by_role]
    named = dict.fromkeys(name for facts in inputs for name in facts.get("base_model", ()))
    facts: Facts = {}
    if named:
        facts |= {"base_model": list(named), "base_model_relation": "merge"}
    for key in ("license", "language"):
        values = [facts_of_one.get(key) for facts_of_one in inputs]
        if values[0] is not None and all(value == values[0] for value in values):
            facts[key] = values[0]
    return facts


def _facts_of(warehouse: Warehouse, source: Source) -> Facts:
    """What one input says of itself; an earlier stage says what its inputs did."""
    if Path(source.root).parent == warehouse.snapshots:
        path = Path(source.root) / PROVENANCE
        try:
            stated = unseal(path.read_bytes(), str(path)).get(STATED)
        except (OSError, MergePipeError):
            return {}
        return stated if isinstance(stated, dict) else {}
    name = _hub_model(source.root)
    return {"base_model": [name] if name else [], **dict(_stated(_front(warehouse, source)))}


def _hub_model(root: str) -> str | None:
    """The name on the hub of what lies at a root, a folder of the hub's cache or an address."""
    scheme, separator, _ = root.partition("://")
    if separator:
        return parse_address(root).place if scheme == HUB else None
    return hub_name(Path(root))


def _front(warehouse: Warehouse, source: Source) -> Mapping[str, Any]:
    """The front matter of an input's card; empty where there is none that can be read."""
    root = present_root(warehouse, source.checkpoint_id, source.root)
    try:
        with open_source(root) as files:
            if CARD not in files.list():
                return {}
            data = files.read_range(CARD, 0, min(files.size(CARD), _MOST_NBYTES))
    except MergePipeError:
        return {}
    match = _FRONT.match(data.decode("utf-8", "replace"))
    try:
        # Plain texts: `no` is a language, and no tag makes anything.
        front = yaml.BaseLoader(match[1]).get_single_data() if match else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return front if isinstance(front, dict) else {}


def _stated(front: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Licence and languages of a front matter, as far as it has them in the hub's form."""
    licence = front.get("license")
    if isinstance(licence, str) and _WORD.fullmatch(licence) and licence.lower() != _OTHER:
        yield "license", licence
    languages = front.get("language")
    words = languages if isinstance(languages, list) else [languages]
    if words and all(isinstance(word, str) and _WORD.fullmatch(word) for word in words):
        yield "language", sorted(set(words))
