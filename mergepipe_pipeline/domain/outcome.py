"""Outcomes of merges, what they made and cost: the records that a run makes and a commit keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from math import sqrt
from typing import Any

from mergepipe_pipeline.domain.bounds import Number, Size


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A merged layer in the object store; `tensors` as in `domain.snapshot.ShardEntry`.

    `non_finite`: tensor name and number of elements that are NaN, infinite or cut off, if any.
    `sq_rounding` is Σ (w − what its code means)² over the weights that are coded.
    """

    sha256: str
    nbytes: int
    tensors: tuple[tuple[str, str], ...]
    non_finite: tuple[tuple[str, int], ...] = ()
    sq_rounding: float = 0.0


def rounding_error(objects: Iterable[StoredObject]) -> float:
    """The L2 norm of what coding changed in these layers."""
    return sqrt(sum(stored.sq_rounding for stored in objects))


@dataclass(frozen=True, slots=True)
class Realised:
    """The cost of running layers, in bytes and seconds; reused layers cost nothing.

    Of the workers' time, added up over threads, `read_s` went to reading and `arithmetic_s` is the
    rest; `write_s` is what one thread spent on coding, hashing and writing. `sum_bytes_read` are of
    kept sums; those that are kept count as written.
    """

    expert_bytes_read: Size
    base_bytes_read: Size
    bytes_written: Size
    layers_executed: Size
    layers_reused: Size
    layers_s: Number
    read_s: Number = 0.0
    arithmetic_s: Number = 0.0
    write_s: Number = 0.0
    sum_bytes_read: Size = 0

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        read = self.expert_bytes_read + self.base_bytes_read + self.sum_bytes_read
        return read + self.bytes_written

    @staticmethod
    def total(costs: Iterable[Realised]) -> Realised:
        """The sum of costs."""
        rows = map(astuple, (Realised(0, 0, 0, 0, 0, 0.0), *costs))
        return Realised(*(round(sum(column), 3) for column in zip(*rows, strict=True)))


@dataclass(frozen=True, slots=True)
class LayerOutcome:
    """One layer that was run or reused from the action cache, and what that cost."""

    name: str
    layer_key: str
    stored: StoredObject
    cost: Realised

    @property
    def reused(self) -> bool:
        """Whether it was there before."""
        return self.cost.layers_reused > 0


@dataclass(frozen=True, slots=True)
class RunStart:
    """When a verb began (`time.monotonic`).

    `downloaded` gives the requests and bytes per address since then, as JSON.
    """

    at_s: float
    downloaded: Callable[[], dict[str, Any]] = dict


@dataclass(frozen=True, slots=True)
class Times:
    """Wall seconds of a merge until its commit.

    `before_s` is the verb's start with analysis and planning, 0 for a plan that was there.
    `downloaded` gives the requests and bytes that came over the wire so far, by address, as JSON.
    """

    before_s: float
    merging_s: float
    downloaded: Callable[[], dict[str, Any]] = dict

    def to_json(self) -> dict[str, Any]:
        """Both, and the total."""
        before_s, merging_s = round(self.before_s, 3), round(self.merging_s, 3)
        total_s = round(self.before_s + self.merging_s, 3)
        return {"before_s": before_s, "merging_s": merging_s, "total_s": total_s}


@dataclass(frozen=True, slots=True)
class Shard:
    """Layers by name, in plan order: number `number` of `count`, from 1.

    `nbytes` are read and written for them.
    """

    number: int
    count: int
    layers: tuple[str, ...]
    nbytes: int
