"""What `calibrate` measured of one machine: what its storage costs, and how fast the engine is.

Figures to predict with, not a log. Storage: a read takes `seek_s` + bytes / `read_bytes_per_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

#: Raised when the engine's figures come to mean something else; those of other versions are not
#: used. The storage's have kept their meaning since the first version, which had no number.
PROFILE_VERSION = 2
#: What a disk is taken to read where nobody has measured it.
DEFAULT_READ_BYTES_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class MethodPace:
    """CPU seconds of one core: per byte read to learn what planning needs, per element merged."""

    learn_byte_s: float
    merge_elem_s: float


@dataclass(frozen=True, slots=True)
class EnginePace:
    """The engine on one machine.

    `read_bytes_per_s` is what all its threads read of cold files, `start_s` the wall time of a
    merge of next to nothing, `plan_input_s` what a budget adds to planning per (tensor, expert).
    """

    cores: int
    read_bytes_per_s: float
    start_s: float
    plan_input_s: float
    methods: Mapping[str, MethodPace]

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> EnginePace:
        """The pace that `asdict` made plain."""
        methods = {name: MethodPace(**row) for name, row in value["methods"].items()}
        return EnginePace(**{**value, "methods": methods})


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """Rates in bytes per second, the cost of a seek in seconds.

    `write_bytes_per_s` is of durable files, hashed on the way. `measured_on` is a time in UTC (ISO
    8601); `where` the file that was read, or the folder of one that was made for it. `engine` None:
    only the storage was measured.
    """

    read_bytes_per_s: float
    seek_s: float
    write_bytes_per_s: float
    measured_on: str
    where: str
    engine: EnginePace | None = None

    @property
    def seek_nbytes(self) -> int:
        """Bytes that could be read in the time of a seek: gaps up to this are worth reading."""
        return round(self.seek_s * self.read_bytes_per_s)

    def read_s(self, seeks: float, nbytes: float) -> float:
        """Predicted seconds to read `nbytes` in `seeks` runs."""
        return seeks * self.seek_s + nbytes / self.read_bytes_per_s

    def to_json(self) -> dict[str, Any]:
        """Plain JSON material; `from_json` gives an equal profile back."""
        return {"version": PROFILE_VERSION, **asdict(self)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> MachineProfile:
        """The profile stored by `to_json`; one of another version without its engine.

        Raises KeyError, TypeError.
        """
        values = {f.name: value[f.name] for f in fields(MachineProfile) if f.name != "engine"}
        engine = value.get("engine") if value.get("version") == PROFILE_VERSION else None
        return MachineProfile(**values, engine=engine and EnginePace.from_json(engine))
