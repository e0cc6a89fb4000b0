"""Pickled checkpoints as safetensors: one file in, one file out, nothing of them is run."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from mergepipe_pipeline.checkpoints.adapter_config import CONFIG as ADAPTER_CONFIG
from mergepipe_pipeline.checkpoints.open_checkpoint import ADAPTER_WEIGHTS
from mergepipe_pipeline.domain.layers import is_post, tied_partner
from mergepipe_pipeline.dtypes import ITEMSIZE
from mergepipe_pipeline.errors import IncompleteCheckpointError
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.snapshots.model_folder import shard_name
from mergepipe_pipeline.storage.json_text import load_object
from mergepipe_pipeline.storage.side_files import CONFIG
from mergepipe_pipeline.tools.pickled import Pickled, unpickled
from mergepipe_pipeline.tools.result import Draft


@dataclass(frozen=True, slots=True)
class Converted:
    """What became of the tensors: how many, which share memory, and what is no tensor."""

    tensors: int
    shared: dict[str, str]
    tied: tuple[str, ...]
    left_out: tuple[str, ...]


def convert_files(
    draft: Draft, folder: Path, files: Sequence[str], named: Set[str], progress: Progress
) -> Converted:
    """Write each pickled file as a weight file of the draft, whose side files are there already.

    Raises CheckpointError for a file that is not weights alone, IncompleteCheckpointError if the
    files lack a tensor that is `named`.
    """
    is_adapter = ADAPTER_CONFIG in draft.side_files
    is_tied = _config(draft).get("tie_word_embeddings") is True
    shared: dict[str, str] = {}
    tied: list[str] = []
    left_out: list[str] = []
    names: set[str] = set()
    for number, file in enumerate(files, 1):
        whole = ADAPTER_WEIGHTS if is_adapter else "model.safetensors"
        name = whole if len(files) == 1 else shard_name(number, len(files))
        with unpickled(folder / file) as pickled:
            heads = _tied_heads(pickled) if is_tied else []
            tensors = [t for t in pickled.tensors if t[0] not in heads]
            total = sum(prod(shape) * ITEMSIZE[dtype] for _, dtype, shape in tensors)
            with progress.task(f"convert {file}", total) as advance:
                draft.shard(name, tensors, pickled.read, advance)
            shared |= {t: first for t, first in pickled.shared.items() if t not in heads}
            tied += heads
            left_out += pickled.left_out
            names |= {t[0] for t in tensors}
    if lost := sorted(named - names - set(tied)):
        raise IncompleteCheckpointError(
            "The files lack a tensor that their index names",
            where=f"{folder}, tensor {lost[0]}",
            expected=f"all {len(named)} tensors of the index",
            found=f"{len(lost)} of them in no file",
            next_step="let the copy finish, or get the checkpoint again",
        )
    return Converted(len(names), shared, tuple(tied), tuple(left_out))


def _config(draft: Draft) -> dict[str, Any]:
    return load_object(draft.side_files.get(CONFIG, b"{}"), CONFIG, "A model's config")


def _tied_heads(pickled: Pickled) -> list[str]:
    """Heads with the memory of the embedding: the config ties them, so that they are not stored."""
    pairs = pickled.shared.items()
    embedding_first = [sorted(pair, key=is_post) for pair in pairs]
    return [
        head
        for embedding, head in embedding_first
        if is_post(head) and tied_partner(head, [embedding]) == embedding
    ]
