"""Which version of the codec wrote a pack, as its index says; a release reads its own alone.

A pack of another version is whole, and so is its expert: it is written again, not repaired.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mergepipe_pipeline.catalog.arrow_tables import FACTS_KEY, corruption_named
from mergepipe_pipeline.catalog.seals import find_sealed, read_sealed
from mergepipe_pipeline.domain.pack import CODEC_VERSION
from mergepipe_pipeline.errors import PackVersionError
from mergepipe_pipeline.packs.damage import damaged_pack

#: By the path of an index, whose name seals its content.
_codecs: dict[Path, str] = {}


def index_path(root: Path) -> Path:
    """The index of the pack in a folder. Raises CorruptionError if there is not one."""
    paths = find_sealed(root, "index")
    if len(paths) != 1:
        raise damaged_pack(root, "one sealed index", f"{len(paths)}")
    return paths[0]


def codec_of(root: Path) -> str:
    """The version of the codec that wrote the pack in a folder. Raises CorruptionError."""
    path = index_path(root)
    if path not in _codecs:
        _codecs[path] = codec_in(read_sealed(path), path)
    return _codecs[path]


def codec_in(data: bytes, path: Path) -> str:
    """As `codec_of`, of the bytes of the index at `path`."""
    with corruption_named(str(path)):  # its columns are those of its version: they may be others
        meta = json.loads(pq.read_schema(pa.BufferReader(data)).metadata[FACTS_KEY])
        return str(meta["codec"])


def refuse_other_codec(root: Path, codec: str) -> None:
    """Raise PackVersionError unless this release reads what a version of the codec wrote."""
    if codec != CODEC_VERSION:
        raise PackVersionError(
            "A pack was written by another version of the codec; nothing is wrong with the expert",
            pack_id=root.name,
            where=str(root),
            expected=f"version {CODEC_VERSION} of the codec",
            found=f"version {codec}",
            next_step="write it again: `mergepipe pack` and the expert's name; until then merges "
            "read the original",
        )
