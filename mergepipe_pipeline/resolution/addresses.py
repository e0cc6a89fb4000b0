"""Finds the checkpoint at an address: what is there now, pinned for all that read it later."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.errors import CheckpointError, RemoteError
from mergepipe_pipeline.remote.address import HUB, Address, is_address, parse_address
from mergepipe_pipeline.resolution.names import free_name
from mergepipe_pipeline.storage.hub_cache import cached_model
from mergepipe_pipeline.storage.open_checkpoint import is_complete, open_checkpoint


def at_address(catalog: Catalog, address: Address, taken: Mapping[str, str]) -> Checkpoint:
    """The checkpoint at an address, opened by its headers.

    A model of the hub that lies whole in the hub's cache on this machine is read there. Raises
    RemoteError for what cannot be reached, and as `open_checkpoint`.
    """
    from mergepipe_pipeline.remote.sites import PINS  # imported late: few merges need it

    if address.scheme == HUB and is_offline():
        folder = cached_model(address.place, address.revision)
        if folder is not None:
            return open_checkpoint(str(folder), free_name(catalog, folder, taken, address.name))
    root = PINS.renewed(address).listing.root
    if address.scheme == HUB:
        cached = cached_model(address.place, root.rpartition("@")[2])
        if cached is not None and is_complete(str(cached)) is None:
            root = str(cached)
    return open_checkpoint(root, free_name(catalog, root, taken, address.name))


def on_hub(
    catalog: Catalog,
    text: str,
    revision: str | None,
    taken: Mapping[str, str],
    near: Callable[[], str],
) -> Checkpoint:
    """The checkpoint of a plain hub name. The CheckpointError says what else it may be.

    `near` gives a path that may be meant, as `suggest` does; it is asked if the hub has no model.
    """
    try:
        return at_address(catalog, Address(HUB, text, revision), taken)
    except RemoteError as error:
        meant = near()
        raise CheckpointError(
            "A model is neither a registered name, nor a path that exists, nor one that the hub "
            "gives",
            where=text if revision is None else f"{text}@{revision}",
            expected="one of the names of `mergepipe ls`, a folder with safetensors, or org/model",
            found=f"no such name, nothing at {text!r}{meant}; the hub: {error.what}: {error.found}",
            next_step=f"correct the path; {error.next_step}" if meant else error.next_step,
        ) from error


def look_again(root: str) -> None:
    """List an address anew; does nothing for folders, and for commits, which never change.

    Raises RemoteError.
    """
    if is_address(root) and not root.startswith(f"{HUB}://"):
        from mergepipe_pipeline.remote.sites import PINS

        PINS.renewed(parse_address(root))


def is_offline() -> bool:
    """Whether the hub is not to be asked, as huggingface_hub understands it."""
    setting = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return setting.upper() in ("1", "ON", "YES", "TRUE")
