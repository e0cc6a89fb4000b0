"""A tensor's digest is over those of its segments, wherever the windows fall."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from mergepipe_pipeline.analysis import digests
from mergepipe_pipeline.analysis.digests import digest_checkpoint
from mergepipe_pipeline.digest import content_digest
from mergepipe_pipeline.errors import CheckpointChangedError
from tests.analysis.conftest import SEGMENT_ELEMS
from tests.support.stored import Stored, content_of, encode, write

TENSORS: dict[str, Stored] = {
    "long": encode(np.arange(10000), "BF16"),
    "fp8": encode(np.arange(100) % 9, "F8_E4M3"),
    "empty": encode(np.zeros(0), "F32"),
    "integers": ("I64", (3,), bytes(range(24))),
}


def test_every_tensor_has_the_digest_of_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_WINDOW_ELEMS", 2 * SEGMENT_ELEMS)
    done: list[int] = []
    levels = (SEGMENT_ELEMS, SEGMENT_ELEMS // 8)
    found = digest_checkpoint(write(tmp_path, "model", TENSORS), done.append, levels=levels)
    for name, stored in TENSORS.items():
        coarse, fine = found[name]
        assert coarse.content == content_of(stored, SEGMENT_ELEMS)
        assert content_digest(fine.digests) == content_of(stored, SEGMENT_ELEMS // 8)
    assert sum(done) == sum(len(data) for _, _, data in TENSORS.values())


def test_a_checkpoint_replaced_meanwhile_is_noticed(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, "model", TENSORS)
    os.utime(checkpoint.root, ns=(1, 1))
    with pytest.raises(CheckpointChangedError, match="changed while it was read"):
        digest_checkpoint(checkpoint)


def test_a_truncated_checkpoint_is_noticed_where_it_ends(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, "model", TENSORS)
    os.truncate(checkpoint.root, 1000)
    with pytest.raises(CheckpointChangedError, match="ended while it was read"):
        digest_checkpoint(checkpoint)
