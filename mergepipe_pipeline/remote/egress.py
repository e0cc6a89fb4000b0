"""What reading at an address costs: bytes that are not on disk yet, and requests for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mergepipe_pipeline.remote.coalesce import coalesced
from mergepipe_pipeline.remote.pace import gap_nbytes, pace_of
from mergepipe_pipeline.remote.sites import PINS
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
