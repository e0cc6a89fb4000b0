"""What merging made and cost when it ran: the records that a run makes and a commit keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A merged layer in the object store; `tensors` as in `domain.snapshot.ShardEntry`.

    `non_finite`: tensor name and number of elements that are NaN, infinite or cut off, if any.
    """

    sha256: str
    nbytes: int
    tensors: tuple[tuple[str, str], ...]
    non_finite: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOutcome:
    """One layer after `run_layers`: reused from the action cache, or what it cost."""

    name: str
    layer_key: str
    stored: StoredObject
    reused: bool
    expert_bytes_read: int
    base_bytes_read: int
    wall_s: float
    bytes_written: int
    read_s: float = 0.0
    arithmetic_s: float = 0.0
    write_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Realised:
    """What running layers cost, in bytes and seconds; reused layers cost nothing.

    `read_s` and `arithmetic_s` are added up over threads, `write_s` is one thread's.
    """

    expert_bytes_read: int
    base_bytes_read: int
    bytes_written: int
    layers_executed: int
    layers_reused: int
    layers_s: float
    read_s: float = 0.0
    arithmetic_s: float = 0.0
    write_s: float = 0.0

    @staticmethod
    def of(layers: Iterable[LayerOutcome]) -> Realised:
        """The sum over layers."""
        return Realised.total(
            Realised(
                x.expert_bytes_read,
                x.base_bytes_read,
                x.bytes_written,
                int(not x.reused),
                int(x.reused),
                x.wall_s,
                x.read_s,
                x.arithmetic_s,
                x.write_s,
            )
            for x in layers
        )

    @staticmethod
    def total(costs: Iterable[Realised]) -> Realised:
        """The sum of costs."""
        rows = list(costs)
        return Realised(
            sum(c.expert_bytes_read for c in rows),
            sum(c.base_bytes_read for c in rows),
            sum(c.bytes_written for c in rows),
            sum(c.layers_executed for c in rows),
            sum(c.layers_reused for c in rows),
            round(sum(c.layers_s for c in rows), 3),
            round(sum(c.read_s for c in rows), 3),
            round(sum(c.arithmetic_s for c in rows), 3),
            round(sum(c.write_s for c in rows), 3),
        )


@dataclass(frozen=True, slots=True)
class RunStart:
    """When a verb began (`time.monotonic`), and how long it was said to take, as JSON.

    `downloaded` gives the requests and bytes per address since then, as JSON.
    """

    at_s: float
    predicted: dict[str, Any] | None = None
    downloaded: Callable[[], dict[str, Any]] = dict


@dataclass(frozen=True, slots=True)
class Times:
    """Wall seconds of a merge: what was predicted, as JSON, and what came until its commit.

    `before_s` is the verb's start with analysis and planning, 0 for a plan that was there.
    `downloaded` gives the requests and bytes that came over the wire so far, by address, as JSON.
    """

    predicted: dict[str, Any] | None
    before_s: float
    merging_s: float
    downloaded: Callable[[], dict[str, Any]] = dict

    def to_json(self) -> dict[str, Any]:
        """Both, with the realised total."""
        came = {"before_s": round(self.before_s, 3), "merging_s": round(self.merging_s, 3)}
        came["total_s"] = round(self.before_s + self.merging_s, 3)
        return {"predicted": self.predicted, "realised": came}


@dataclass(frozen=True, slots=True)
class Shard:
    """Layers by name, in plan order: number `number` of `count`, from 1.

    `cost` is what they are predicted to take, in `unit`: seconds, or bytes where nobody has
    measured the machine.
    """

    number: int
    count: int
    layers: tuple[str, ...]
    cost: float
    unit: str
