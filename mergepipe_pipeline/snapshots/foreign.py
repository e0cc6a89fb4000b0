"""The forms of what a snapshot's folder, a bucket's refs and its actions may say, made by anybody.

No id covers a provenance, and lists and queries over all snapshots read it: one of another form
would end them for the snapshots beside it. Its keys may be more than these, since later releases
tell more.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from mergepipe_pipeline.domain.request import Request
from mergepipe_pipeline.domain.snapshot import MANIFEST, PROVENANCE, Manifest
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.storage.forms import (
    CheckpointId,
    Form,
    Number,
    PlainName,
    Sha256,
    SideName,
    Size,
    SnapshotId,
    Text,
    read_form,
)

#: Above every side file: modules of sentence-transformers and tokenizers are the largest.
_MOST_SIDE_NBYTES = 256 << 20


class _Shard(Form):
    file: PlainName
    layer: Text
    layer_key: Sha256
    sha256: Sha256
    nbytes: Size
    tensors: tuple[tuple[Text, Sha256], ...]


class _SideFile(Form):
    file: SideName
    sha256: Sha256
    nbytes: int = Field(ge=0, le=_MOST_SIDE_NBYTES)


class _Input(Form):
    role: Text
    name: Text
    content_sha256: Sha256


class ManifestForm(Form):
    """`Manifest` as JSON: its files have different names, of which none is another record's."""

    plan_id: Sha256
    method: Text
    inputs: tuple[_Input, ...]
    operators: tuple[tuple[Text, Text, Size], ...]
    shards: tuple[_Shard, ...]
    side_files: tuple[_SideFile, ...]
    format: Literal["mergepipe-manifest/2"] = "mergepipe-manifest/2"

    @model_validator(mode="after")
    def _names(self) -> ManifestForm:
        taken = {MANIFEST, PROVENANCE}
        for name in (*(s.file for s in self.shards), *(f.file for f in self.side_files)):
            if name in taken:
                raise ValueError(f"the file {name!r} twice")
            taken.add(name)
        return self


class _Told(BaseModel):
    """A part of a provenance: these keys are of these types, and others are left alone."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class _Source(_Told):
    name: Text
    root: Text
    checkpoint_id: CheckpointId | Literal[""]


class _Estimates(_Told):
    strategy: Text
    budget_bytes: Size | None
    expert_bytes_total: Size
    expert_bytes_planned: Size
    error_bound: Number | None
    update_norm: Number | None
    predicted_error: Number | None = None
    predicted_margin: Number | None = None
    bound_note: Text = ""
    update_note: Text = ""
    block_elems: Size = 0
    blocks_total: Size = 0
    blocks_bought: Size = 0
    blocks_zero: Size = 0
    reads: Size = 0
    expert_bytes_packed: Size = 0
    pack_block_elems: Size = 0


class _Realised(_Told):
    expert_bytes_read: Size | None = None
    base_bytes_read: Size | None = None
    bytes_written: Size | None = None
    layers_executed: Size | None = None
    layers_reused: Size | None = None
    layers_s: Number | None = None
    read_s: Number = 0.0
    arithmetic_s: Number = 0.0
    write_s: Number = 0.0


class _MadeBy(_Told):
    verb: Text
    parameters: dict[str, JsonValue]


class ProvenanceForm(_Told):
    """What a merge of a recipe tells, or a verb without one (`made_by`)."""

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
    estimates: _Estimates | None = None
    realised: _Realised | None = None
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


class VersionForm(Form):
    """A version of a ref in a bucket."""

    snapshot_id: SnapshotId
    reason: Text
    version_of: Text


class ActionForm(_Told):
    """Which object a layer key gave."""

    action_key: Text
    object: Sha256
    nbytes: Size
    tensors: tuple[tuple[Text, Sha256], ...]
    non_finite: dict[str, Size] = {}


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
