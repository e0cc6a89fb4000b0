"""The form of provenances, made by anybody.

No id covers a provenance, and lists and queries over all snapshots read it: one of another form
would end them for the snapshots beside it. Its keys may be more than these.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, JsonValue, model_validator

from mergepipe_pipeline.domain.bounds import CheckpointId, Text
from mergepipe_pipeline.domain.outcome import Realised
from mergepipe_pipeline.domain.plan import Estimates
from mergepipe_pipeline.domain.request import Request
from mergepipe_pipeline.domain.snapshot import Manifest
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.storage.forms import read_form


class _Told(BaseModel):
    """A part of a provenance: these keys are of these types, and others are left alone."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class _Source(_Told):
    name: Text
    root: Text
    checkpoint_id: CheckpointId | Literal[""]


class _MadeBy(_Told):
    verb: Text
    parameters: dict[str, JsonValue]


class ProvenanceForm(_Told):
    """The provenance of a merge of a recipe, or of a verb without one (`made_by`)."""

    created: Text
    recipe_name: Text
    sources: tuple[_Source, ...]
    engine_version: Text | None = None
    host: Text = ""
    python: Text = ""
    versions: dict[str, Text] = {}
    card: dict[str, JsonValue] = {}
    made_by: _MadeBy | None = None
    recipe: Text | None = None
    ref: Text | None = None
    request: Request | None = None
    warnings: tuple[Text, ...] = ()
    choices: dict[str, tuple[Text, Text]] = {}
    estimates: Estimates | None = None
    realised: Realised | None = None
    time: dict[str, JsonValue] | None = None

    @model_validator(mode="after")
    def _of_merge(self) -> ProvenanceForm:
        told = self.model_fields_set
        of_merges = {"recipe": self.recipe, "ref": self.ref, "estimates": self.estimates}
        if self.made_by is None or not told.isdisjoint({*of_merges, "realised"}):
            missing = [key for key, value in of_merges.items() if value is None]
            missing += [] if "realised" in told else ["realised"]
            if missing:
                raise ValueError(f"no `{missing[0]}`")
        return self


def provenance_from(data: bytes, manifest: Manifest, where: str) -> dict[str, Any]:
    """The provenance in a file's bytes, made by anybody. Raises CorruptionError."""
    what, next_step = "The provenance of a snapshot", "take it with the version that published it"
    form, value = read_form(ProvenanceForm, data, where, what, next_step)
    if len(form.sources) != len(manifest.inputs):
        raise CorruptionError(
            "The provenance of a snapshot is not that of its manifest",
            where=where,
            expected=f"{len(manifest.inputs)} sources, one of each input",
            found=f"{len(form.sources)}",
            next_step="publish it again from a warehouse that has it",
        )
    return value
