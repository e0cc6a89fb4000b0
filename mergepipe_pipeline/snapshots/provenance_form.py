"""Whether the provenance of a snapshot that came from elsewhere has a form that is written here.

No id covers a provenance, and lists and queries over all snapshots read it: one of another form
would end them for the snapshots beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mergepipe_pipeline.digest import unseal
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.snapshots.model_folder import STATED
from mergepipe_pipeline.spec.request import Request
from mergepipe_pipeline.spec.snapshot import Manifest

_TEXTS = ("created", "recipe_name")
#: What merges tell, and verbs without a recipe do not.
_OF_MERGES = ("recipe", "ref", "estimates", "realised")
_SOURCE_TEXTS = ("name", "root", "checkpoint_id")
_NBYTES = ("budget_bytes", "expert_bytes_total", "expert_bytes_planned")
_NORMS = ("error_bound", "update_norm")
_LARGEST = 1 << 63


def provenance_from(data: bytes, manifest: Manifest, where: str) -> dict[str, Any]:
    """The provenance in a file's bytes, made by anybody. Raises CorruptionError."""
    provenance = unseal(data, where)
    try:
        if problem := next(_problems(provenance, manifest), None):
            raise ValueError(problem)
        if "request" in provenance:
            Request.from_json(provenance["request"])
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise CorruptionError(
            "The provenance of a snapshot has another form than this version writes",
            where=where,
            expected="what a merge of a recipe tells, or a verb without one",
            found=str(error)[:200],
            next_step="take it with the version that published it, or publish it again",
        ) from error
    return provenance


def _problems(provenance: dict[str, Any], manifest: Manifest) -> Iterator[str]:
    sources, made_by = provenance["sources"], provenance.get("made_by")
    if not isinstance(sources, list) or len(sources) != len(manifest.inputs):
        yield f"`sources` that are not the manifest's {len(manifest.inputs)} inputs"
    yield from _no_texts([provenance[key] for key in _TEXTS])
    yield from _no_texts([source[key] for source in sources for key in _SOURCE_TEXTS])
    if not isinstance(provenance.get(STATED, {}), dict):
        yield f"{provenance[STATED]!r} instead of what a card says"
    if made_by is not None:
        yield from _no_texts([made_by["verb"]])
        if not isinstance(made_by["parameters"], dict):
            yield f"{made_by['parameters']!r} instead of parameters"
    if made_by is None or any(key in provenance for key in _OF_MERGES):
        yield from _problems_of_merge(provenance)


def _problems_of_merge(provenance: dict[str, Any]) -> Iterator[str]:
    estimates, realised = provenance["estimates"], provenance["realised"] or {}
    yield from _no_texts([provenance["recipe"], provenance["ref"], estimates["strategy"]])
    sizes = [estimates[key] for key in _NBYTES] + [realised.get("expert_bytes_read")]
    for nbytes in sizes:
        if nbytes is not None and (type(nbytes) is not int or not 0 <= nbytes < _LARGEST):
            yield f"{nbytes!r} instead of a number of bytes"
    for number in [estimates[key] for key in _NORMS] + [realised.get("layers_s")]:
        if type(number) not in (type(None), int, float) or abs(number or 0) >= _LARGEST:
            yield f"{number!r} instead of a number"


def _no_texts(values: list[Any]) -> Iterator[str]:
    yield from (f"{value!r} instead of a text" for value in values if not isinstance(value, str))
