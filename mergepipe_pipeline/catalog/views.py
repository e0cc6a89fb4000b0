"""What can be asked of the catalog by SQL: every view with the meaning of every column.

A view's columns are its SELECT list, so that nothing here can be out of date. How files become
rows, and who may read what, is in `queries`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from mergepipe_pipeline.catalog import arrow_tables as tables
from mergepipe_pipeline.catalog.contents import SEGMENTS
from mergepipe_pipeline.catalog.formats import CHECKPOINTS, CONTENTS, FACTS
from mergepipe_pipeline.catalog.stats_tables import PAIR_STATS

_PAIR_FOLDER = r"/(?P<base_id>[^/]+)/(?P<checkpoint_id>[^/]+)/"
_CHECKPOINT = r"/(?P<checkpoint_id>[^/.]+)"
_SEALED = r"\.[0-9a-f]{32}\.parquet$"


@dataclass(frozen=True, slots=True)
class Files:
    """Parquet files of one schema; the groups of `path` are further columns, equal in a file."""

    schema: pa.Schema
    pattern: str
    path: re.Pattern[str]

    @property
    def columns(self) -> pa.Schema:
        """The schema with the columns that come from paths; `block_elems` is a whole number."""
        types = {name: pa.int64() if name == "block_elems" else pa.string() for name in self.groups}
        return pa.schema([*self.schema, *types.items()])

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the columns that come from paths."""
        return tuple(self.path.groupindex)


@dataclass(frozen=True, slots=True)
class View:
    """`what` one row is, and column name to meaning; rows are of the files `source`.

    Without a source, rows are handed to the query by whoever knows them, in the order of `types`.
    `of_lists` gives the columns that are one row for each entry of a list.
    """

    what: str
    columns: Mapping[str, str]
    source: str | None = None
    types: tuple[pa.DataType, ...] = ()
    of_lists: Mapping[str, str] = field(default_factory=dict)

    @property
    def select(self) -> str:
        """The columns as a SELECT list."""
        lists = {name: f"unnest({of}) AS {name}" for name, of in self.of_lists.items()}
        return ", ".join(lists.get(name, name) for name in self.columns)


FILES = {
    "tensor_files": Files(
        tables.TENSORS, f"{CHECKPOINTS}/*.parquet", re.compile(_CHECKPOINT + _SEALED)
    ),
    "digest_files": Files(SEGMENTS, f"{CONTENTS}/*.parquet", re.compile(_CHECKPOINT + _SEALED)),
    "stat_files": Files(
        PAIR_STATS,
        f"{FACTS}/*/*/b*.parquet",
        re.compile(_PAIR_FOLDER + r"b(?P<block_elems>\d+)" + _SEALED),
    ),
    "fact_files": Files(
        tables.FACTS,
        f"{FACTS}/*/*/*.parquet",
        re.compile(_PAIR_FOLDER + r"(?!b\d+\.)(?P<key>[^/]+)" + _SEALED),
    ),
}

_PAIR = {
    "base_id": "the base, by the id of its checkpoint",
    "checkpoint_id": "the expert, by the id of its checkpoint (see registrations)",
}
_BLOCK = _PAIR | {
    "block_elems": "elements per block",
    "tensor": "the expert's tensor",
    "base_tensor": "the base's tensor",
    "block": "number of the block, from 0",
}
_BLOCKS = {"block": "range(len(block_l2sq))"}
_TEXT, _INT, _REAL, _FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()

VIEWS = {
    "registrations": View(
        "one row per name and version",
        {
            "name": "the checkpoint's name",
            "version": "1, 2, …; the highest is current",
            "checkpoint_id": "what the files were then: names, sizes, times, headers",
            "base": "name of the base it was tuned from, or null",
            "root": "its folder or address",
        },
        types=(_TEXT, _INT, _TEXT, _TEXT, _TEXT),
    ),
    "tensors": View(
        "one row per tensor of a registered checkpoint",
        {
            "checkpoint_id": "the checkpoint (see registrations)",
            "tensor": "its name",
            "dtype": "safetensors code, such as BF16",
            "shape": "sizes as a list",
            "numel": "elements",
            "nbytes": "bytes",
            "file": "the file it is in",
            "start_byte": "where in the file",
        },
        "tensor_files",
    ),
    "digests": View(
        "one row per tensor whose content is known",
        {
            "checkpoint_id": "the checkpoint (see registrations)",
            "tensor": "its name",
            "digest": "BLAKE3 of its bytes",
        },
        "digest_files",
    ),
    "tensor_stats": View(
        "one row per tensor of an analysed expert; δ is expert − base",
        _PAIR
        | {
            "block_elems": "elements per block of this analysis",
            "tensor": "the expert's tensor",
            "base_tensor": "the base's tensor",
            "dtype": "safetensors code of the expert's tensor",
            "base_dtype": "the same of the base's",
            "numel": "elements",
            "l1": "Σ|δ|",
            "l2sq": "Σδ²",
            "max_abs": "max |δ|",
            "nonzero": "elements with δ ≠ 0",
            "digest": "BLAKE3 of the expert's bytes, empty if not seen whole",
            "base_digest": "the same of the base's",
        },
        "stat_files",
    ),
    "tensor_histograms": View(
        "one row per tensor of an analysed expert: how large its δ are",
        _PAIR
        | {
            "block_elems": "elements per block of this analysis",
            "tensor": "the expert's tensor",
            "base_tensor": "the base's tensor",
            "hist_bins": "occupied bins, ascending: the upper 16 bits of float32 |δ|",
            "hist_counts": "elements in each",
        },
        "stat_files",
    ),
    "block_stats": View(
        "one row per block of an analysed expert",
        _BLOCK
        | {
            "l2sq": "Σδ² over the block",
            "max_abs": "max |δ|",
            "nonzero": "elements with δ ≠ 0; 0 for a block that need not be read",
        },
        "stat_files",
        of_lists=_BLOCKS | {name: f"block_{name}" for name in ("l2sq", "max_abs", "nonzero")},
    ),
    "block_samples": View(
        "one row per block of an analysed expert: what conflicts and errors are estimated from",
        _BLOCK
        | {
            "sample": "δ at fixed elements: bfloat16, little-endian bytes",
        },
        "stat_files",
        of_lists=_BLOCKS | {"sample": "block_sample"},
    ),
    "facts": View(
        "one row per tensor and fact that an operator asked for, or that `compare` measured",
        {
            "base_id": "the base, by the id of its checkpoint; of realised-error the full plan",
            "checkpoint_id": "the expert, or group of experts, it is about; of realised-error the "
            "plan",
            "key": "which fact",
            "tensor": "of which tensor",
            "numbers": "the fact, as its operator orders it; of realised-error the squared "
            "distance to the full merge, and the full merge's to the base",
        },
        "fact_files",
    ),
    "plans": View(
        "one row per stored plan",
        {
            "plan_id": "the plan",
            "recipe": "name of the recipe",
            "method": "merge method",
            "strategy": "how the budget was spent",
            "ref": "where the result is published",
            "budget_bytes": "the limit on expert bytes, null for none",
            "expert_bytes_total": "expert bytes of a full merge",
            "expert_bytes_planned": "expert bytes this plan reads",
            "blocks_total": "blocks of all experts",
            "blocks_bought": "blocks it reads",
            "blocks_zero": "blocks known to equal the base",
            "reads": "runs of blocks that lie together",
            "predicted_error": "expected distance (L2) from the full merge, null without a base",
            "error_bound": "at most this far (L2) from the full merge, null if no bound is known",
            "update_norm": "predicted distance (L2) of the full merge from the base",
        },
        types=(*[_TEXT] * 5, *[_INT] * 7, *[_REAL] * 3),
    ),
    "snapshots": View(
        "one row per snapshot",
        {
            "snapshot_id": "the snapshot",
            "created": "when, in UTC (ISO 8601)",
            "recipe": "name of the recipe",
            "ref": "where the recipe publishes",
            "method": "merge method",
            "plan_id": "the plan it was made by",
            "strategy": "how the budget was spent",
            "nbytes": "bytes of weights",
            "budget_bytes": "the limit on expert bytes, null for none",
            "expert_bytes_total": "expert bytes of a full merge",
            "expert_bytes_planned": "expert bytes the plan reads",
            "expert_bytes_read": "expert bytes read; fewer where layers were reused",
            "error_bound": "at most this far (L2) from the full merge, null if no bound is known",
            "seconds": "time spent on layers",
        },
        types=(*[_TEXT] * 7, *[_INT] * 5, _REAL, _REAL),
    ),
    "snapshot_inputs": View(
        "one row per checkpoint that a snapshot was made of",
        {
            "snapshot_id": "the snapshot",
            "role": "base or expert",
            "name": "the checkpoint's name",
            "version": "its first version with this checkpoint_id, null if it has none",
            "checkpoint_id": "what its files were",
            "content_sha256": "digest over its tensors' digests",
            "root": "its folder or address",
            "selector": "the recipe's selector that took it, null if the recipe names it",
        },
        types=(_TEXT, _TEXT, _TEXT, _INT, _TEXT, _TEXT, _TEXT, _TEXT),
    ),
    "refs": View(
        "one row per version of a published name",
        {
            "ref": "the name",
            "version": "1, 2, …",
            "is_current": "whether readers load it now",
            "snapshot_id": "what it stands for",
            "reason": "why it was published",
        },
        types=(_TEXT, _INT, _FLAG, _TEXT, _TEXT),
    ),
}
