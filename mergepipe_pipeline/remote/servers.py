"""From an address to its server and to what lies there, which is found out once and then pinned.

Whoever begins to look for a checkpoint asks `PINS.renewed`; all that read it later ask `PINS.of`
and get the same listing. Each read compares its answer with that, so a pin that is old does no
harm.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial

from mergepipe_pipeline.remote.address import BUCKETS, HUB, Address, parse_address
from mergepipe_pipeline.remote.clients import IN_FLIGHT
from mergepipe_pipeline.remote.downloads import DownloadedFile
from mergepipe_pipeline.remote.fetch import fetch
from mergepipe_pipeline.remote.listing import Listing, Site
from mergepipe_pipeline.remote.ranges import downloads


class Pin:
    """A server, what lay at its address when it was asked, and what was downloaded since.

    All sources of one address share the files, so that no byte is asked for twice. Safe for several
    threads.
    """

    def __init__(self, site: Site, listing: Listing) -> None:
        self.site, self.listing = site, listing
        self._lock = threading.Lock()
        self._files: dict[str, DownloadedFile] = {}

    def file(self, path: str) -> DownloadedFile:
        """A file by its path below the address. Raises CheckpointError if there is none."""
        file = self.listing.file(path)
        with self._lock:
            if path not in self._files:
                get = partial(fetch, self.site, self.listing, file)
                where, key = f"{self.listing.root}, {path}", self.listing.key(file)
                stated = file if file.content else None
                self._files[path] = DownloadedFile(
                    where, key, get, downloads(), requests(), stated, PINS.drop_unproved
                )
            return self._files[path]

    def drop_unproved(self) -> None:
        """Let all go that was not compared yet with what the server states."""
        with self._lock:
            files = list(self._files.values())
        for file in files:
            file.drop_unproved()


def site_of(address: Address) -> Site:
    """The server of an address."""
    if address.scheme == HUB:
        from mergepipe_pipeline.remote.hub import HubSite

        return HubSite(address)
    if address.scheme in BUCKETS:
        from mergepipe_pipeline.remote.bucket import BucketSite

        return BucketSite(address)
    from mergepipe_pipeline.remote.web import WebSite

    return WebSite(address)


class Pins:
    """The pins of addresses, as this process found them. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, Pin] = {}

    def of(self, root: str) -> Pin:
        """The pin of an address from before, or a new one. Raises RemoteError."""
        with self._lock:
            known = self._known.get(root)
        return known or self.renewed(parse_address(root))

    def renewed(self, address: Address) -> Pin:
        """A new pin of an address, for all that read it from here on. Raises RemoteError."""
        listing = site_of(address).listing()
        # The commit has a server of its own: links and files are those of that commit.
        pinned = Pin(site_of(parse_address(listing.root)), listing)
        with self._lock:
            self._known[listing.root] = pinned
        return pinned

    def drop_unproved(self) -> None:
        """Believe nothing that servers which state digests sent, and that was not compared yet.

        One of them lies, or somebody on the way.
        """
        with self._lock:
            known = list(self._known.values())
        for pinned in known:
            pinned.drop_unproved()

    def forget(self, root: str) -> None:
        """Let the next one who asks look again."""
        with self._lock:
            self._known.pop(root, None)


@lru_cache(maxsize=1)
def requests() -> ThreadPoolExecutor:
    """The threads of all requests of this process."""
    return ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="download")


#: Of the whole process.
PINS = Pins()
