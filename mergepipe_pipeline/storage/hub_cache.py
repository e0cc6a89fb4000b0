"""Where a model of the Hugging Face hub lies on this machine, if it was downloaded.

Reads the cache's layout; never asks the network.
Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.storage.regular import read_small

#: The name of a model of the hub.
REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)?")

_COMMIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def cached_model(name: str, revision: str | None = None) -> Path | None:
    """The snapshot folder of `org/model` at a branch, tag or commit (default `main`), or None.

    Raises CheckpointError for a branch whose file in the cache is damaged.
    """
    if not REPO.fullmatch(name):
        return None
    repo = _cache() / f"models--{name.replace('/', '--')}"
    ref_name = revision or "main"
    if "/" in ref_name or ".." in ref_name:
        return None
    ref = repo / "refs" / ref_name
    commit = _commit(ref) if ref.is_file() else ref_name
    snapshot = repo / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def hub_name(folder: Path) -> str | None:
    """The name of the model whose snapshot in a cache of the hub this is; None for another."""
    if folder.parent.name != "snapshots":
        return None
    kind, separator, name = folder.parent.parent.name.partition("models--")
    name = name.replace("--", "/")
    return name if separator and not kind and REPO.fullmatch(name) else None


def _commit(ref: Path) -> str:
    """The commit that a branch or tag of the cache names."""
    text = read_small(ref, 4096).decode("utf-8", "replace").strip()
    if not _COMMIT.fullmatch(text):
        raise CheckpointError(
            "A ref of the hub's cache names no commit",
            where=str(ref),
            expected="a commit's digest",
            found=repr(text[:80]),
            next_step="download the model again",
        )
    return text


def _cache() -> Path:
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"])
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(home).expanduser() / "hub"
