"""Builds a complete snapshot folder in staging: shards first, manifest last."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mergepipe_pipeline.digest import seal
from mergepipe_pipeline.domain.plan import ENGINE_VERSION
from mergepipe_pipeline.domain.snapshot import MANIFEST, PROVENANCE, Manifest
from mergepipe_pipeline.snapshots.objects import ObjectStore
from mergepipe_pipeline.storage.atomic import adopt_file, link_file, write_atomic
from mergepipe_pipeline.text import now


def made_here() -> dict[str, Any]:
    """The part of every provenance: by what, when and where it is made, which no id covers."""
    return {
        "engine_version": ENGINE_VERSION,
        "created": now(),
        "host": platform.node(),
        "python": platform.python_version(),
        "versions": {p: version(p) for p in ("mergepipe-pipeline", "torch", "numpy")},
    }


def stage_snapshot(
    staging: Path,
    manifest: Manifest,
    objects: ObjectStore,
    side_files: Mapping[str, bytes | Path],
    provenance: dict[str, Any],
) -> Path:
    """The folder `staging/<snapshot_id>`: hard-linked shards, side files, provenance, manifest.

    A side file is its bytes, or a file in staging, which is moved.
    Raises StorageFullError; FileNotFoundError if an object of the manifest is not in the store.
    """
    folder = staging / manifest.snapshot_id
    folder.mkdir(parents=True)
    for shard in manifest.shards:
        link_file(objects.path_of(shard.sha256), folder / shard.file)
    for name, data in side_files.items():
        if isinstance(data, bytes):
            write_atomic(folder / name, data)
        else:
            adopt_file(data, folder / name)
    write_atomic(folder / PROVENANCE, seal(provenance))
    write_atomic(folder / MANIFEST, seal(manifest.to_json()))
    return folder
