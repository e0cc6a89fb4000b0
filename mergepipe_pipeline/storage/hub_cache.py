"""Where a model of the Hugging Face hub lies on this machine, if it was downloaded.

Reads the cache's layout; never asks the network.
Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)?")


def cached_model(name: str, revision: str | None = None) -> Path | None:
    """The snapshot folder of `org/model` at a branch, tag or commit (default `main`), or None."""
    if not _REPO.fullmatch(name):
        return None
    repo = _cache() / f"models--{name.replace('/', '--')}"
    wanted = revision or "main"
    if "/" in wanted or ".." in wanted:
        return None
    ref = repo / "refs" / wanted
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else wanted
    snapshot = repo / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def _cache() -> Path:
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"])
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(home).expanduser() / "hub"
