"""Decoded values have the bits that compressed-tensors and transformers give them."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.checkpoints.reader import BlockReader, Tally, open_reader
from mergepipe_pipeline.checkpoints.stored import read_stored
from mergepipe_pipeline.domain.blocks import coalesce
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.decoding import logical_parts
from mergepipe_pipeline.domain.view import Part, view_of_part
from mergepipe_pipeline.dtypes import TORCH_NAME, itemsize
from mergepipe_pipeline.storage.read_batch import ReadBatch
from mergepipe_pipeline.storage.source import open_source
from tests.support.codes import FORMS, GPT_OSS_SETTINGS, Tensors, gpt_oss
from tests.support.laws import examples

pytest.importorskip("compressed_tensors")


def written(folder: Path, tensors: Tensors, quantisation: object) -> Checkpoint:
    """A checkpoint of these tensors, as it is opened."""
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantisation}))
    return open_checkpoint(str(folder), "coded")


def values(
    reader: BlockReader, part: Part, start: int, stop: int, *, batched: bool
) -> torch.Tensor:
    """Values [start, stop) of a part, alone or in a batch of reads."""
    raw = np.empty((stop - start) * itemsize(part.dtype), np.uint8)
    view = view_of_part(part, "w")
    if batched:
        with ReadBatch() as batch:
            read_stored(lambda _: reader, view, start, stop, raw.data, batch=batch)
    else:
        read_stored(lambda _: reader, view, start, stop, raw.data)
    return torch.from_numpy(raw).view(getattr(torch, TORCH_NAME[part.dtype]))


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours.isnan(), theirs.isnan())
    number = ~theirs.isnan()
    assert torch.equal(
        ours[number].view(torch.uint8), theirs[number].contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=examples(20))
@given(data=st.data())
def test_every_range_of_values_has_the_bits_of_the_library_that_writes_the_form(
    name: str, data: st.DataObject
) -> None:
    form = FORMS[name]
    rows = data.draw(st.integers(form.least_rows, 70))
    cols = data.draw(st.integers(1, 80 // form.col_multiple + 1)) * form.col_multiple
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    stored = form.stored(g, rows, cols)
    theirs = form.meant(stored, rows, cols).reshape(-1)
    with TemporaryDirectory() as folder:
        named = {f"l.up_proj.{n}": t for n, t in stored.items()}
        checkpoint = written(Path(folder), named, form.settings)
        parts = logical_parts(checkpoint)
        assert list(parts) == ["l.up_proj.weight"]
        part = parts["l.up_proj.weight"]
        assert part.shape == (rows, cols)
        assert part.nbytes == sum(t.nbytes for t in stored.values())
        a = data.draw(st.integers(0, rows * cols - 1))
        b = data.draw(st.integers(a + 1, rows * cols))
        with open_reader(checkpoint) as reader:
            ours = values(reader, part, a, b, batched=data.draw(st.booleans()))
    assert_same_bits(ours, theirs[a:b])


@settings(max_examples=examples(40))
@given(data=st.data())
def test_turned_blocks_of_a_mixture_are_what_transformers_makes_of_them(
    data: st.DataObject,
) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    experts, rows, groups = (data.draw(st.integers(1, n)) for n in (4, 20, 5))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    stored = gpt_oss(g, experts, rows, groups)
    theirs = convert_moe_packed_tensors(*stored.values())
    with TemporaryDirectory() as folder:
        checkpoint = written(Path(folder), stored, GPT_OSS_SETTINGS)
        (part,) = logical_parts(checkpoint).values()
        assert part.shape == tuple(theirs.shape) == (experts, groups * 32, rows)
        a = data.draw(st.integers(0, theirs.numel() - 1))
        b = data.draw(st.integers(a + 1, theirs.numel()))
        with open_reader(checkpoint) as reader:
            ours = values(reader, part, a, b, batched=False)
    assert_same_bits(ours, theirs.reshape(-1)[a:b])


@pytest.mark.parametrize("name", [*FORMS, "gpt-oss"])
@settings(max_examples=examples(20))
@given(data=st.data())
def test_reading_takes_the_stored_bytes_that_were_announced_and_no_other(
    name: str, data: st.DataObject
) -> None:
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    if name == "gpt-oss":
        stored, quantisation = gpt_oss(g, 3, 40, 128), GPT_OSS_SETTINGS
    else:
        form = FORMS[name]
        quantisation = dict(form.settings)
        stored = {f"w.{n}": t for n, t in form.stored(g, 200, 256).items()}
    with TemporaryDirectory() as folder:
        checkpoint = written(Path(folder), stored, quantisation)
        (part,) = logical_parts(checkpoint).values()
        blocks = data.draw(
            st.sets(st.integers(0, (part.numel - 1) // 4096), min_size=1, max_size=5)
        )
        ranges = coalesce((n * 4096, min(part.numel, (n + 1) * 4096)) for n in blocks)
        allowed: dict[str, list[tuple[int, int]]] = {}
        for entry, a, b in part.stored_ranges(ranges):
            allowed.setdefault(entry.name, []).append((a, b))
        tally = Tally()
        with open_source(str(folder), "exact") as source:
            gate = {n: coalesce(r) for n, r in allowed.items()}
            reader = BlockReader(source, checkpoint, gate, tally)
            for a, b in ranges:
                for start in range(a, b, 1024):
                    values(reader, part, start, min(b, start + 1024), batched=start % 2048 == 0)
        assert tally.nbytes == part.read_nbytes(ranges)
        n_allowed = sum(
            (b - a) * itemsize(checkpoint.by_name[n].dtype) for n, r in gate.items() for a, b in r
        )
        assert tally.nbytes == n_allowed
        alone = sum(part.read_nbytes((r,)) for r in ranges)
        assert tally.nbytes <= alone
