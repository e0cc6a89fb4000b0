"""What layers cost when they ran: the records that `merge` makes and `commit` keeps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mergepipe_pipeline.snapshots.objects import StoredObject


@dataclass(frozen=True, slots=True)
class LayerOutcome:
    """One layer after `merge_layers`: reused from the action cache, or what it cost."""

    name: str
    layer_key: str
    stored: StoredObject
    reused: bool
    expert_bytes_read: int
    base_bytes_read: int
    wall_s: float
    bytes_written: int


@dataclass(frozen=True, slots=True)
class Realised:
    """What running layers cost, in bytes and seconds; reused layers cost nothing."""

    expert_bytes_read: int
    base_bytes_read: int
    bytes_written: int
    layers_executed: int
    layers_reused: int
    layers_s: float

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
        )
