"""How far away a source is: what a request costs beside its bytes, as `calibrate` measured it.

Kept beside the downloads, since it is of this machine's network and of no warehouse.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mergepipe_pipeline.digest import seal, unseal
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.remote.address import parse_address
from mergepipe_pipeline.remote.clients import IN_FLIGHT
from mergepipe_pipeline.remote.pieces import downloads_folder, refusals_named
from mergepipe_pipeline.storage.atomic import write_atomic

#: Bytes that are worth a request where nobody has measured: 20 ms at 150 MB/s, shared by twelve.
DEFAULT_GAP_NBYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds until a request's first byte; bytes per second of all requests together.

    `measured_on` is a time in UTC (ISO 8601).
    """

    latency_s: float
    bytes_per_s: float
    measured_on: str

    @property
    def gap_nbytes(self) -> int:
        """Bytes that come in the time that one of several requests takes from the others."""
        return round(self.latency_s * self.bytes_per_s / IN_FLIGHT)

    def seconds(self, requests: float, nbytes: float) -> float:
        """Predicted seconds to fetch `nbytes` by requests, several at once."""
        return max(self.latency_s, requests * self.latency_s / IN_FLIGHT) + nbytes / (
            self.bytes_per_s
        )


def source_of(root: str) -> str:
    """What an address shares its pace with: the host or bucket, or the hub."""
    address = parse_address(root)
    place = "" if address.scheme == "hf" else address.place.partition("/")[0]
    return f"{address.scheme}://{place}"


def pace_of(root: str) -> Pace | None:
    """What was measured of an address's source; None if nothing was, or the record is damaged."""
    measured = _paces().get(source_of(root))
    try:
        return Pace(**measured) if measured else None
    except TypeError:
        return None


def put_pace(root: str, pace: Pace) -> None:
    """Remember what was measured of an address's source. Raises as `refusals_named`."""
    with refusals_named():
        write_atomic(_path(), seal({"paces": _paces() | {source_of(root): asdict(pace)}}))


def gap_nbytes(root: str | None = None) -> int:
    """Bytes between two ranges that are fetched rather than asked around."""
    pace = pace_of(root) if root else None
    return DEFAULT_GAP_NBYTES if pace is None else pace.gap_nbytes


def _paces() -> dict[str, Any]:
    try:
        paces: dict[str, Any] = unseal(_path().read_bytes(), str(_path()))["paces"]
    except (OSError, CorruptionError, KeyError):
        return {}
    return paces


def _path() -> Path:
    return downloads_folder() / ".sources.json"
