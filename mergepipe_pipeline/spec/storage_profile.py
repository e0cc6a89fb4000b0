"""What a user's machine costs, measured by `calibrate`: its storage, and the engine on it.

A model of it, not a log: reading takes seeks · `seek_s` + bytes / `read_bytes_per_s`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mergepipe_pipeline.spec.engine_pace import EnginePace


@dataclass(frozen=True, slots=True)
class StorageProfile:
    """Rates in bytes per second, the cost of a seek in seconds.

    `measured_on` is a time in UTC (ISO 8601); `where` the file that was read, or the
    folder of one that was made for it. `engine` None: not calibrated for time.
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
        return {**asdict(self), "engine": self.engine and self.engine.to_json()}

    @staticmethod
    def from_json(value: dict[str, Any]) -> StorageProfile:
        """The profile stored by `to_json`, also by one that knew no engine."""
        engine = value.get("engine")
        return StorageProfile(**{**value, "engine": engine and EnginePace.from_json(engine)})
