"""Which name a checkpoint gets that nobody has named: its folder's, if that is free."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.digest import sha256_hex
from mergepipe_pipeline.remote.address import is_address, parse_address


def free_name(
    catalog: Catalog, root: Path | str, taken: Mapping[str, str], text: str | None = None
) -> str:
    """The folder's name (or `text`), or with a digest of the path if another checkpoint has it.

    The path is the recorded one: names are part of ids, which are the same on all machines. A model
    of the hub keeps its name whatever the commit, but for two of them in one recipe (`taken`).
    A name has letters A to Z, digits and `._-`, as models of the hub: letters lose their accents.
    """
    path = Path(root)
    stem = text or (path.stem if os.path.isfile(path) else path.name)
    plain = _plain(stem)
    owner, own_root = taken.get(plain), str(root)
    if owner is None and plain in catalog:
        owner, own_root = _unpinned(catalog.root(plain)), _unpinned(own_root)
    if owner not in (None, own_root):
        return f"{plain}-{sha256_hex(catalog.roots.recorded(str(root)).encode())[:6]}"
    return plain


def _plain(text: str) -> str:
    letters = "".join(
        c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c)
    )
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", letters).lstrip(".-_")
    return plain or f"checkpoint-{sha256_hex(os.fsencode(text))[:6]}"


def _unpinned(root: str) -> str:
    """An address without its commit; any other root as it is."""
    if not is_address(root):
        return root
    address = parse_address(root)
    return f"{address.scheme}://{address.place}"
