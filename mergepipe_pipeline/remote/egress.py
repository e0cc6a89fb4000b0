"""The cost of reading at an address: which ranges go into one request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from mergepipe_pipeline.remote.servers import PINS
from mergepipe_pipeline.storage.source import FileRange


@dataclass(frozen=True, slots=True)
class Egress:
    """The requests to one address, and their reason; headers come besides.

    `nbytes` and `requests` are what is left to fetch, `kept_nbytes` what was fetched before.
    `at_most`: a plan may need less.
    """

    address: str
    requests: int
    nbytes: int
    kept_nbytes: int
    why: str
    at_most: bool = False


def egress_of(root: str, ranges: Iterable[FileRange], why: str) -> Egress:
    """The cost of fetching ranges of the files at an address. Raises RemoteError."""
    pinned = PINS.of(root)
    requests = nbytes = wanted = 0
    for path, start, stop in coalesced(ranges):
        lacking = pinned.file(path).lacking(start, stop)
        requests, nbytes = requests + lacking[0], nbytes + lacking[1]
        wanted += stop - start
    return Egress(root, requests, nbytes, wanted - nbytes, why)


#: Bytes between two ranges that are fetched rather than asked around: what comes in the 20 ms of a
#: request at 150 MB/s that twelve share.
_GAP_NBYTES = 256 << 10
#: Ranges of about so many bytes change their order, so that neighbours meet.
_SORTED_NBYTES = 32 << 20
#: The part of all bytes that may be fetched besides, to spare requests.
_WASTE = 0.01


def coalesced(ranges: Iterable[FileRange], most_gap_nbytes: int = _GAP_NBYTES) -> list[FileRange]:
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
