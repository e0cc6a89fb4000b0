"""What reading at an address costs: which ranges go into one request, and what a request costs.

The throughput of a source is kept beside the downloads, as `calibrate` measured it: it is of this
machine's network and of no warehouse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mergepipe_pipeline.digest import seal, unseal
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.remote.address import parse_address
from mergepipe_pipeline.remote.clients import IN_FLIGHT
from mergepipe_pipeline.remote.ranges import downloads_folder, refusals_named
from mergepipe_pipeline.remote.servers import PINS
from mergepipe_pipeline.storage.atomic import write_atomic
from mergepipe_pipeline.storage.source import FileRange


@dataclass(frozen=True, slots=True)
class Egress:
    """What is asked of one address, and why; headers come besides.

    `nbytes` and `requests` are what is left to fetch, `kept_nbytes` what was fetched before.
    `at_most`: a plan may need less. `seconds` are predicted, if `calibrate` measured the source.
    """

    address: str
    requests: int
    nbytes: int
    kept_nbytes: int
    why: str
    at_most: bool = False
    seconds: float | None = None


def egress_of(root: str, ranges: Iterable[FileRange], why: str) -> Egress:
    """What fetching ranges of the files at an address costs. Raises RemoteError."""
    pinned = PINS.of(root)
    requests = nbytes = wanted = 0
    for path, start, stop in coalesced(ranges, gap_nbytes(root)):
        lacking = pinned.file(path).lacking(start, stop)
        requests, nbytes = requests + lacking[0], nbytes + lacking[1]
        wanted += stop - start
    pace = pace_of(root)
    seconds = pace.seconds(requests, nbytes) if pace and requests else None
    return Egress(root, requests, nbytes, wanted - nbytes, why, seconds=seconds)


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


#: Ranges of about so many bytes change their order, so that neighbours meet.
_SORTED_NBYTES = 32 << 20
#: The part of all bytes that may be fetched besides, to spare requests.
_WASTE = 0.01


def coalesced(ranges: Iterable[FileRange], most_gap_nbytes: int) -> list[FileRange]:
    """Ranges in about their order, those of a file that follow each other closely in one.

    The smallest gaps are closed first, none above `most_gap_nbytes`, all together a hundredth of
    the bytes.
    """
    joined = _joined(_sorted(r for r in ranges if r.start_byte < r.stop_byte))
    left = int(sum(stop - start for _, start, stop in joined) * _WASTE)
    gaps = sorted(
        (after[1] - before[2], number)
        for number, (before, after) in enumerate(pairwise(joined))
        if before[0] == after[0] and 0 < after[1] - before[2] <= most_gap_nbytes
    )
    closed = set()
    for gap, number in gaps:
        if gap > left:
            break
        left -= gap
        closed.add(number)
    requests: list[FileRange] = []
    for number, (path, start, stop) in enumerate(joined):
        if number - 1 in closed:
            requests[-1] = FileRange(path, requests[-1].start_byte, stop)
        else:
            requests.append(FileRange(path, start, stop))
    return requests


def _sorted(ranges: Iterable[FileRange]) -> Iterator[FileRange]:
    """Ranges by file and place, some at a time."""
    some: list[FileRange] = []
    nbytes = 0
    for wanted in ranges:
        some.append(wanted)
        nbytes += wanted.stop_byte - wanted.start_byte
        if nbytes >= _SORTED_NBYTES:
            yield from sorted(some)
            some, nbytes = [], 0
    yield from sorted(some)


def _joined(ranges: Iterable[FileRange]) -> list[FileRange]:
    """Ranges in their order, those that begin in the one before or at its end in one with it."""
    joined: list[FileRange] = []
    for path, start, stop in ranges:
        # A tensor may be read for several others.
        if (
            joined
            and joined[-1].path == path
            and joined[-1].start_byte <= start <= joined[-1].stop_byte
        ):
            joined[-1] = FileRange(path, joined[-1].start_byte, max(stop, joined[-1].stop_byte))
        else:
            joined.append(FileRange(path, start, stop))
    return joined
