"""Hypothesis strategies and makers of catalog facts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.domain.checkpoint import Checkpoint, CheckpointKind, FileEntry, TensorEntry
from mergepipe_pipeline.domain.segments import COARSE_ELEMS, Segments
from mergepipe_pipeline.domain.stats import SAMPLE_WIDTH, ExpertStats, TensorStats

TENSOR_NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
SHA = st.text("0123456789abcdef", min_size=64, max_size=64)


def checkpoint(name: str = "m", mtime_ns: int = 1, config: str | None = "{}") -> Checkpoint:
    """Two tensors in one file that does not exist: the catalog never opens it."""
    return Checkpoint(
        name,
        f"/models/{name}",
        (FileEntry("model.safetensors", 124, mtime_ns, "0" * 64, "1" * 64),),
        (
            TensorEntry("w", "F32", (2, 3), "model.safetensors", 100),
            TensorEntry("s", "BF16", (), "model.safetensors", 124),
        ),
        config,
    )


@st.composite
def checkpoints(draw: st.DrawFn) -> Checkpoint:
    """Any checkpoint of up to four tensors."""
    names = draw(st.lists(TENSOR_NAMES, max_size=4, unique=True))
    shapes = st.lists(st.integers(0, 1 << 20), max_size=3).map(tuple)
    tensors = tuple(
        TensorEntry(n, draw(st.sampled_from(["F32", "BF16", "I8"])), draw(shapes), "f", 8 * i)
        for i, n in enumerate(names)
    )
    file = FileEntry(
        "f", draw(st.integers(0, 1 << 50)), draw(st.integers(0, 1 << 62)), draw(SHA), draw(SHA)
    )
    config = draw(st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=5))
    name = draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,6}", fullmatch=True))
    kind = draw(st.sampled_from(get_args(CheckpointKind)))
    adapter_config = draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=5))
    return Checkpoint(
        name,
        "/models/x",
        (file,),
        tensors,
        config,
        kind,
        adapter_config if kind == "adapter" else None,
    )


@st.composite
def expert_stats(draw: st.DrawFn) -> ExpertStats:
    """Any statistics that analysis could give, tensors without blocks included."""
    pairs = draw(st.lists(st.tuples(TENSOR_NAMES, TENSOR_NAMES), max_size=3, unique=True))
    return ExpertStats("b" * 24, "c" * 24, 4096, tuple(draw(tensor_stats(*p)) for p in pairs))


@st.composite
def tensor_stats(draw: st.DrawFn, name: str, base_name: str) -> TensorStats:
    """Statistics of one pair of tensors, of blocks of 4096 elements."""
    numel = draw(st.integers(0, 4 * 4096))
    n = -(-numel // 4096)
    bins = sorted(draw(st.sets(st.integers(0, 65535), max_size=4)))
    finite = st.floats(0, allow_nan=False, allow_infinity=False)
    wide = st.floats(allow_nan=False, allow_infinity=False)
    narrow = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return TensorStats(
        name,
        base_name,
        draw(SHA | st.just("")),
        draw(SHA | st.just("")),
        draw(st.sampled_from(["BF16", "F32"])),
        draw(st.sampled_from(["BF16", "F32"])),
        numel,
        draw(finite),
        draw(finite),
        draw(finite),
        draw(st.integers(0, 1 << 40)),
        np.array(bins, np.uint16),
        np.array([draw(st.integers(1, 1 << 40)) for _ in bins], np.int64),
        draw(hnp.arrays(np.float64, n, elements=wide)),
        draw(hnp.arrays(np.float32, n, elements=narrow)),
        draw(hnp.arrays(np.int64, n, elements=st.integers(0, 4096))),
        draw(hnp.arrays(np.uint16, (n, SAMPLE_WIDTH))),
    )


def put_contents(catalog: Catalog, checkpoint_id: str, **tensors: str) -> None:
    """Let a catalog know what all tensors of a checkpoint hold, each by a letter."""
    taken = {t: (Segments(COARSE_ELEMS, 16 * which.encode()),) for t, which in tensors.items()}
    catalog.contents(checkpoint_id).put(taken, list(tensors))


def some_stats(
    block_elems: int = 4096, seed: int = 0, blocks: int = 3, names: Sequence[str] = ("w", "v")
) -> ExpertStats:
    """Statistics from a seed, of tensors against those of the same name."""
    rng = np.random.default_rng(seed)

    def one(name: str) -> TensorStats:
        return TensorStats(
            name,
            name,
            "1" * 64,
            "2" * 64,
            "BF16",
            "F32",
            blocks * block_elems,
            1.0,
            2.0,
            3.0,
            4,
            np.array([1, 2], np.uint16),
            np.array([3, 4], np.int64),
            rng.random(blocks),
            rng.random(blocks).astype(np.float32),
            rng.integers(0, 9, blocks),
            rng.integers(0, 1 << 16, (blocks, SAMPLE_WIDTH), np.uint16),
        )

    return ExpertStats("b" * 24, "c" * 24, block_elems, tuple(one(n) for n in names))


def same(a: ExpertStats, b: ExpertStats) -> bool:
    """Equality to the bit and to the dtype."""

    def plain(t: TensorStats) -> list[object]:
        return [
            (v.dtype.str, v.tobytes()) if isinstance(v, np.ndarray) else v for v in vars(t).values()
        ]

    keys = (a.base_id, a.checkpoint_id, a.block_elems) == (
        b.base_id,
        b.checkpoint_id,
        b.block_elems,
    )
    return keys and [plain(t) for t in a.tensors] == [plain(t) for t in b.tensors]
