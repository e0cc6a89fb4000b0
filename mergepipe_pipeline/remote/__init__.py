"""Checkpoints at addresses: the hub, buckets and web servers, read by ranges and kept on disk."""

from __future__ import annotations

from collections.abc import Callable

from mergepipe_pipeline.remote.address import SCHEMES as _SERVED
from mergepipe_pipeline.storage.source import SCHEMES, CheckpointSource, Reading


def _opener(scheme: str) -> Callable[[str, Reading], CheckpointSource]:
    def remote_files(rest: str, reading: Reading) -> CheckpointSource:
        from mergepipe_pipeline.remote.source import RemoteSource  # few read from elsewhere

        return RemoteSource(f"{scheme}://{rest}", reading)

    return remote_files


#: Whoever finds out that a text is an address has this room loaded.
SCHEMES.update((scheme, _opener(scheme)) for scheme in _SERVED)
