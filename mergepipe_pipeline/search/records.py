"""The facts of a search: what it asks for, its prior, its proposals and their results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mergepipe_pipeline.optimise.trials import REFERENCE
from mergepipe_pipeline.search.search_file import SearchFile
from mergepipe_pipeline.search.space import Layer, Space

Point = tuple[float, ...]


@dataclass(frozen=True)
class Search:
    """A search that has begun, or could (`began` "" until then).

    Relative paths of its file start from `folder`. `contents` are the digests of what its models
    held when it began, by their texts; `evaluator_id` is its evaluator's.
    """

    name: str
    text: str = field(repr=False)
    file: SearchFile
    folder: Path
    layers: tuple[Layer, ...] = field(repr=False)
    evaluator_id: str
    contents: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    began: str = ""

    @property
    def told(self) -> str:
        """The search, in messages."""
        return f"the search {self.name}"

    def space(self, prior: Prior) -> Space:
        """The space, whose blocks the prior knows."""
        return Space(self.file, self.layers, prior.blocks)


@dataclass(frozen=True, slots=True)
class Prior:
    """What is expected of each coordinate before anything is evaluated.

    `parameter` and `activation` are differences per numbered layer (None: not asked for), `blocks`
    the layers that share a weight, `scores` and `length_scales` per coordinate in the order of
    `labels` (None where the file says `prior: none`).
    """

    labels: tuple[str, ...]
    blocks: tuple[tuple[str, ...], ...]
    parameter: tuple[float, ...] | None = None
    activation: tuple[float, ...] | None = None
    scores: tuple[float, ...] | None = None
    length_scales: tuple[float, ...] | None = None

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Prior:
        """The prior of which `value` is the `asdict`."""
        fields: dict[str, Any] = {k: None if v is None else tuple(v) for k, v in value.items()}
        fields["blocks"] = tuple(map(tuple, value["blocks"]))
        return Prior(**fields)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A point to evaluate, who asked for it, and when (UTC)."""

    number: int
    point: Point
    asked_by: str
    asked: str

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Proposal:
        """The proposal of which `value` is the `asdict`."""
        return Proposal(**{**value, "point": tuple(value["point"])})


@dataclass(frozen=True, slots=True)
class MergeCost:
    """What merging a candidate took: layers, bytes read of sources and base, and seconds.

    `scratch_nbytes` is what is read where no layer is known already.
    """

    layers_merged: int
    layers_reused: int
    nbytes_read: int
    scratch_nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a proposal; `ended` is a time in UTC.

    A failure says why in `failure`, has no metrics, and the lowest value in each objective; without
    a snapshot it could not be merged.
    """

    number: int
    point: Point
    values: tuple[float, ...]
    metrics: Mapping[str, float]
    failure: str
    snapshot_id: str | None
    merge: MergeCost | None
    evaluation_s: float
    ended: str

    @property
    def is_failure(self) -> bool:
        """Whether nothing was measured."""
        return bool(self.failure)

    @staticmethod
    def failed(
        search: Search,
        proposal: Proposal,
        why: str,
        ended: str,
        snapshot_id: str | None = None,
        merge: MergeCost | None = None,
    ) -> Result:
        """The result of a proposal that failed."""
        values = (REFERENCE,) * len(search.file.objectives)
        return Result(
            proposal.number, proposal.point, values, {}, why, snapshot_id, merge, 0.0, ended
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON material."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Result:
        """The result of which `value` is the `asdict`."""
        merge = value["merge"]
        return Result(
            **{
                **value,
                "point": tuple(value["point"]),
                "values": tuple(value["values"]),
                "merge": None if merge is None else MergeCost(**merge),
            }
        )
