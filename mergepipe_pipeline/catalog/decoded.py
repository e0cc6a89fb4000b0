"""Records of the catalog that are decoded once, while their file stays as it is.

One verb reads these several times for every expert, and sensors at each tick.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from mergepipe_pipeline.catalog import arrow_tables as tables
from mergepipe_pipeline.catalog.seals import read_facts
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.storage.side_files import SideStamp

#: Size and time of last change of a file (`seals.version`).
Version = tuple[int, int] | None


@lru_cache(maxsize=512)
def side_digests(path: Path, version: Version) -> Mapping[SideStamp, str] | None:
    """SHA-256 of side files; None for a file that is gone or damaged."""
    return read_facts(path, lambda data: tables.decode_side_files(data, str(path)))


@lru_cache(maxsize=512)
def checkpoint(path: Path, version: Version, name: str, root: str) -> Checkpoint | None:
    """A checkpoint, under a name and root as given; None for a file that is gone or damaged."""
    return read_facts(path, lambda data: tables.decode_checkpoint(data, str(path), name, root))


@lru_cache(maxsize=512)
def digests(path: Path, version: Version) -> Mapping[str, str] | None:
    """Tensor to the digest of its content; None for a file that is gone or damaged."""
    by_tensor = read_facts(path, lambda data: tables.decode_digests(data, str(path)))
    return None if by_tensor is None else MappingProxyType(by_tensor)


@lru_cache(maxsize=1 << 14)
def content_sha256(path: Path, version: Version) -> str | None:
    """The digest of a checkpoint's content; None for a file that is gone or damaged."""
    by_tensor = digests(path, version)
    return None if by_tensor is None else digest_json(dict(by_tensor))
