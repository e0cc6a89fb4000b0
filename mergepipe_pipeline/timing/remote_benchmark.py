"""What requests to an address take: until the first byte, and for bytes with several under way."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.remote.address import parse_address
from mergepipe_pipeline.remote.clients import IN_FLIGHT
from mergepipe_pipeline.remote.downloads import REQUEST_NBYTES
from mergepipe_pipeline.remote.egress import Pace, put_pace
from mergepipe_pipeline.remote.fetch import WANTED, fetch
from mergepipe_pipeline.remote.listing import RemoteFile
from mergepipe_pipeline.remote.servers import PINS, Pinned
from mergepipe_pipeline.text import now

#: Requests of next to nothing, one after the other; bytes that are fetched several at a time.
_PROBES, _PROBE_NBYTES = 9, 1024
_MOST_NBYTES = 256 << 20
_LEAST_NBYTES = 64 << 10


def measure_address(text: str, progress: Progress | None = None) -> Pace:
    """Measure requests for the largest weight file at an address, and remember what they took.

    What was downloaded before takes no part. Raises RemoteError, MergePipeError without a file that
    is large enough.
    """
    pinned = PINS.renewed(parse_address(text))
    weights = [f for f in pinned.listing.files.values() if f.path.endswith(".safetensors")]
    file = max(weights, key=lambda f: f.nbytes, default=None)
    if file is None or file.nbytes < _LEAST_NBYTES:
        raise MergePipeError(
            "There is no file to measure an address on",
            where=text,
            expected=f"a weight file of at least {_LEAST_NBYTES} bytes",
            found="none",
            next_step="give the address of a model",
        )
    WANTED.open()
    try:
        latency_s = _latency_s(pinned, file)
        rate = _bytes_per_s(pinned, file, progress or Silent())
    finally:
        WANTED.close()
    pace = Pace(latency_s, rate, now())
    put_pace(pinned.listing.root, pace)
    return pace


def _latency_s(pinned: Pinned, file: RemoteFile) -> float:
    """The median of small requests; the first one, which connects, is left out."""
    taken = []
    for number in range(_PROBES + 1):
        start = (file.nbytes - _PROBE_NBYTES) * number // _PROBES
        began = time.perf_counter()
        fetch(pinned.site, pinned.listing, file, start, start + _PROBE_NBYTES)
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def _bytes_per_s(pinned: Pinned, file: RemoteFile, progress: Progress) -> float:
    nbytes = min(_MOST_NBYTES, file.nbytes)
    starts = range(0, nbytes, REQUEST_NBYTES)
    with (
        progress.task(f"fetch {file.path}", nbytes) as advance,
        ThreadPoolExecutor(IN_FLIGHT) as pool,
    ):

        def get(start: int) -> None:
            stop = min(nbytes, start + REQUEST_NBYTES)
            advance(len(fetch(pinned.site, pinned.listing, file, start, stop)))

        began = time.perf_counter()
        list(pool.map(get, starts))
        return nbytes / (time.perf_counter() - began)
