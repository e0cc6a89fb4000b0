"""Whether the provenance of a snapshot that came from elsewhere has the form that a merge writes.

No id covers a provenance, and lists and queries over all snapshots read it: one of another form
would end them for the snapshots beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mergepipe_pipeline.digest import unseal
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.spec.request import Request
from mergepipe_pipeline.spec.snapshot import Manifest

_TEXTS = ("created", "recipe", "recipe_name", "ref")
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
            expected="what a merge of a recipe tells",
            found=str(error)[:200],
            next_step="take it with the version that published it, or publish it again",
        ) from error
    return provenance


def _problems(provenance: dict[str, Any], manifest: Manifest) -> Iterator[str]:
    sources, estimates = provenance["sources"], provenance["estimates"]
    realised = provenance["realised"] or {}
    if not isinstance(sources, list) or len(sources) != len(manifest.inputs):
        yield f"`sources` that are not the manifest's {len(manifest.inputs)} inputs"
    texts = [provenance[key] for key in _TEXTS] + [estimates["strategy"]]
    for text in texts + [source[key] for source in sources for key in _SOURCE_TEXTS]:
        if not isinstance(text, str):
            yield f"{text!r} instead of a text"
    sizes = [estimates[key] for key in _NBYTES] + [realised.get("expert_bytes_read")]
    for nbytes in sizes:
        if nbytes is not None and (type(nbytes) is not int or not 0 <= nbytes < _LARGEST):
            yield f"{nbytes!r} instead of a number of bytes"
    for number in [estimates[key] for key in _NORMS] + [realised.get("layers_s")]:
        if type(number) not in (type(None), int, float) or abs(number or 0) >= _LARGEST:
            yield f"{number!r} instead of a number"
