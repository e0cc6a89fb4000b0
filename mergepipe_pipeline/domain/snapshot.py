"""Snapshots: a manifest that names every byte, and refs that name manifests.

The manifest is the snapshot: its digest is the snapshot's id. Recipe text, budget, time, host and
realised cost go to `provenance.json`, which no id covers: two ways to ask for the same result name
it alike.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.bounds import PlainName, Sha256, SideName, SideSize, Size, Text
from mergepipe_pipeline.domain.plan import MergePlan

#: The file of a snapshot that names every other one.
MANIFEST = "manifest.json"
#: The one that tells how it came about, which no id covers.
PROVENANCE = "provenance.json"

#: Operator, its variant ("" for none), number of output tensors.
OperatorCount = tuple[Text, Text, Size]


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One weight file of a snapshot: a merged layer and the content-addressed object it links to.

    `tensors` are (name, SHA-256 of the file up to that tensor's end), in file order.
    """

    file: PlainName
    layer: Text
    layer_key: Sha256
    sha256: Sha256
    nbytes: Size
    tensors: tuple[tuple[Text, Sha256], ...]


@dataclass(frozen=True, slots=True)
class SideFile:
    """One other file of a snapshot (config, tokenizer, index, card, recipe)."""

    file: SideName
    sha256: Sha256
    nbytes: SideSize


@dataclass(frozen=True, slots=True)
class LineageEntry:
    """One input checkpoint: its role, its name, the digest of its tensors' digests."""

    role: Text  # "base" or "expert"
    name: Text
    content_sha256: Sha256


@dataclass(frozen=True)
class Manifest:
    """The identity of a snapshot: same inputs, same manifest, same id.

    `operators` count the output tensors by what made them; `copy` took them as they are. Raises
    ValueError for a file that is named twice.
    """

    plan_id: Sha256
    method: Text
    inputs: tuple[LineageEntry, ...]
    operators: tuple[OperatorCount, ...]
    shards: tuple[ShardEntry, ...]
    side_files: tuple[SideFile, ...]
    format: Literal["mergepipe-manifest/2"] = "mergepipe-manifest/2"

    def __post_init__(self) -> None:
        taken = {MANIFEST, PROVENANCE}
        for name in (*(s.file for s in self.shards), *(f.file for f in self.side_files)):
            if name in taken:
                raise ValueError(f"the file {name!r} twice")
            taken.add(name)

    @cached_property
    def manifest_hash(self) -> str:
        """64 hex over the whole manifest."""
        return digest_json(self.to_json())

    @property
    def snapshot_id(self) -> str:
        """The first 32 hex characters of `manifest_hash`: the name of the snapshot's folder."""
        return self.manifest_hash[:32]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON material."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A published snapshot: its id, its folder, its manifest."""

    snapshot_id: str
    path: str
    manifest: Manifest

    @property
    def manifest_path(self) -> str:
        """The file that holds the manifest."""
        return f"{self.path}/{MANIFEST}"


@dataclass(frozen=True, slots=True)
class Ref:
    """Version `number` of the ref `name`: the snapshot it names, and a free-text reason."""

    name: str
    number: int
    snapshot_id: str
    reason: str


def operator_counts(plan: MergePlan) -> tuple[OperatorCount, ...]:
    """How many output tensors each operator makes, by name and variant (empty: none)."""
    counts = Counter((task.operator, task.variant) for layer in plan.layers for task in layer.tasks)
    return tuple((*which, n) for which, n in sorted(counts.items()))
