"""`convert` of GGUF files that are damaged, hostile or not understood: refused, nothing written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.errors import CheckpointChangedError, CheckpointError, MergePipeError
from mergepipe_pipeline.verbs.tools import convert
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.laws import examples
from tests.tools.test_convert import Replacing, read

if find_spec("gguf") is None or find_spec("transformers") is None:
    pytest.skip("the extra `gguf` is not installed", allow_module_level=True)

from transformers import AutoTokenizer

from tests.tools.gguf_models import model_of, state_of, written
from tests.tools.ggufs import byte_level, write

#: Of transformers: parts of it that are told to go, and a bar that shows how it reads a file.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@cache
def whole_file() -> bytes:
    """The bytes of a small file of which everything is known."""
    with TemporaryDirectory() as folder:
        kinds = {"blk.0.ffn_down.weight": "Q8_0", "output.weight": "F16"}
        return written(Path(folder) / "m.gguf", "llama", kinds=kinds)[0].read_bytes()


def changed(data: bytes, name: bytes, offset: int, new: bytes) -> bytes:
    """`data` with other bytes at `offset` from the end of the text `name`, its last occurrence."""
    at = data.rindex(name) + len(name) + offset
    return data[:at] + new + data[at + len(new) :]


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


_Q, _DOWN, _NORM = b"blk.0.attn_q.weight", b"blk.0.ffn_down.weight", b"output_norm.weight"
_HUGE = (1 << 63) - 1


def faults() -> dict[str, Callable[[bytes], bytes]]:
    """Ways in which a file is no longer one, by name."""

    def at(start: int, new: bytes) -> Callable[[bytes], bytes]:
        return lambda d: d[:start] + new + d[start + len(new) :]

    def after(name: bytes, offset: int, new: bytes) -> Callable[[bytes], bytes]:
        return lambda d: changed(d, name, offset, new)

    def renamed(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
        assert len(old) == len(new)
        return lambda d: d.replace(old, new)

    key = b"llama.block_count"
    return {
        "nothing": lambda d: b"",
        "magic of GGML": at(0, b"lmgg"),
        "a zip": at(0, b"PK\x03\x04"),
        "version 0": at(4, u32(0)),
        "version 1": at(4, u32(1)),
        "version 4": at(4, u32(4)),
        "big-endian": at(4, (3).to_bytes(4, "big")),
        "no tensors": at(8, u64(0)),
        "a tensor less": lambda d: at(8, u64(int.from_bytes(d[8:16], "little") - 1))(d),
        "a tensor more": lambda d: at(8, u64(int.from_bytes(d[8:16], "little") + 1))(d),
        "2^63 tensors": at(8, u64(_HUGE)),
        "no metadata": at(16, u64(0)),
        "a key less": lambda d: at(16, u64(int.from_bytes(d[16:24], "little") - 1))(d),
        "a key more": lambda d: at(16, u64(int.from_bytes(d[16:24], "little") + 1))(d),
        "2^63 keys": at(16, u64(_HUGE)),
        "a key of no bytes": at(24, u64(0)),
        "a key of 2^63 bytes": at(24, u64(_HUGE)),
        "a key that is no UTF-8": at(32, b"\xff\xfe"),
        "a value of type 13": after(key, 0, u32(13)),
        "a value that is an array": after(key, 0, u32(9)),
        "a float for a count": after(key, 0, u32(6)),
        "no layers": after(key, 4, u32(0)),
        "2^31 layers": after(key, 4, u32(1 << 31)),
        "a layer less": after(key, 4, u32(1)),
        "a layer more": after(key, 4, u32(3)),
        "other heads": after(b"llama.attention.head_count", 4, u32(8)),
        "no heads": after(b"llama.attention.head_count", 4, u32(0)),
        "heads that do not divide": after(b"llama.attention.head_count_kv", 4, u32(3)),
        "other heads of keys": after(b"llama.attention.head_count_kv", 4, u32(4)),
        "an odd width of heads": after(b"llama.attention.key_length", 4, u32(7)),
        "other widths of values": after(b"llama.attention.value_length", 4, u32(16)),
        "another hidden size": after(b"llama.embedding_length", 4, u32(64)),
        "another inner size": after(b"llama.feed_forward_length", 4, u32(32)),
        "another vocabulary": after(b"llama.vocab_size", 4, u32(280)),
        "an epsilon of NaN": after(b"layer_norm_rms_epsilon", 4, b"\x00\x00\xc0\x7f"),
        "an epsilon below 0": after(b"layer_norm_rms_epsilon", 4, b"\x00\x00\x80\xbf"),
        "a base of 0": after(b"llama.rope.freq_base", 4, u32(0)),
        "half of each head turned": after(b"llama.rope.dimension_count", 4, u32(4)),
        "an unknown key": renamed(b"llama.rope.dimension_count", b"llama.rope.dimension_sauce"),
        "a key twice": renamed(
            b"llama.attention.value_length",
            b"llama.attention.value_length"[:16] + b"key_length\0\0",
        ),
        "an unknown architecture": renamed(b"llama", b"lhama"),
        "a token outside": after(b"tokenizer.ggml.eos_token_id", 4, u32(1 << 20)),
        "2^63 tokens": after(b"tokenizer.ggml.tokens", 8, u64(_HUGE)),
        "tokens that are arrays": after(b"tokenizer.ggml.tokens", 4, u32(9)),
        "tokens of 2^63 bytes": after(b"tokenizer.ggml.tokens", 16, u64(_HUGE)),
        "a truth value of 2": after(b"tokenizer.ggml.add_bos_token", 4, b"\x02"),
        "an unknown tokenizer": renamed(
            b"\x05\0\0\0\0\0\0\0llama\x12", b"\x05\0\0\0\0\0\0\0lhama\x12"
        ),
        "a name of another tensor": renamed(_Q, b"blk.0.attn_x.weight"),
        "a name twice": renamed(_Q, b"blk.0.attn_k.weight"),
        "no dimensions": after(_Q, 0, u32(0)),
        "five dimensions": after(_Q, 0, u32(5)),
        "2^31 dimensions": after(_Q, 0, u32(1 << 31)),
        "a shape turned over": lambda d: changed(d, _DOWN, 4, u64(32) + u64(64)),
        "no columns": after(_Q, 4, u64(0)),
        "2^63 columns": after(_Q, 4, u64(_HUGE)),
        "columns that overflow": after(_Q, 4, u64(1 << 33) + u64(1 << 33)),
        "half a block of columns": after(_DOWN, 4, u64(48)),
        "a type that is gone": after(_Q, 20, u32(4)),
        "a type that is no number": after(_Q, 20, u32(26)),
        "an unknown type": after(_Q, 20, u32(1000)),
        "a type of other sizes": after(_DOWN, 20, u32(2)),
        "an offset outside": after(_Q, 24, u64(_HUGE)),
        "an offset of another": after(_Q, 24, u64(0)),
        "an offset by one": lambda d: changed(
            d, _Q, 24, bytes([d[d.rindex(_Q) + len(_Q) + 24] + 1])
        ),
        "a vector as a matrix": after(_NORM, 0, u32(2)),
        "half": lambda d: d[: len(d) // 2],
        "the header alone": lambda d: d[: d.rindex(b"weight") + 40],
        "a byte less": lambda d: d[:-64],
        "a page more": lambda d: d + bytes(4096),
    }


@pytest.mark.parametrize("name", faults())
def test_a_file_with_a_fault_is_refused_and_nothing_is_written(
    home: Warehouse, tmp_path: Path, name: str
) -> None:
    path, data = tmp_path / "m.gguf", whole_file()
    path.write_bytes(faults()[name](data))
    assert path.read_bytes() != data
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        convert(home, str(path), tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "warehouse"]


@settings(max_examples=examples(50))
@given(st.data())
def test_a_flipped_bit_of_the_header_is_refused_or_changes_a_setting_and_no_weight(
    data: st.DataObject,
) -> None:
    whole = whole_file()
    end = whole.rindex(b"weight") + 60
    at, bit = data.draw(st.integers(0, end)), data.draw(st.integers(0, 7))
    flipped = whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
    with TemporaryDirectory() as folder:
        home = Warehouse.at(Path(folder) / "warehouse")
        results = []
        for name, content in (("whole", whole), ("flipped", flipped)):
            (Path(folder) / f"{name}.gguf").write_bytes(content)
            try:
                results.append(
                    Path(convert(home, f"{folder}/{name}.gguf", f"{folder}/{name}").path)
                )
            except CheckpointError:
                assert name == "flipped"
                assert not (Path(folder) / name).exists()
                return
        one, other = map(read, results)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[k], v) for k, v in other.items())
        configs = [json.loads((r / "config.json").read_text()) for r in results]
        before, after = ({k: repr(v) for k, v in c.items()} for c in configs)
        assert len(before.items() ^ after.items()) <= 2


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"split.count": 3}, "join the parts"),
        ({"general.type": "adapter"}, "holds no whole model"),
        ({"general.type": "mmproj"}, "holds no whole model"),
        ({"expert_count": 8}, r"does not understand.*llama\.expert_count"),
        ({"attention.scale": 0.5}, r"does not understand.*attention\.scale"),
        ({"attention.causal": False}, r"attention\.causal"),
        ({"rope.scaling.type": "su"}, "none, linear or yarn"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, "original_context_length"),
        ({"context_length": None}, "context_length"),
    ],
)
def test_what_a_file_says_and_no_config_can_is_refused_by_name(
    home: Warehouse, tmp_path: Path, keys: dict[str, Any], said: str
) -> None:
    path, _ = written(tmp_path / "m.gguf", "llama", keys=keys)
    with pytest.raises(CheckpointError, match=said):
        convert(home, str(path))
    assert not list(home.snapshots.glob("*"))


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("rope_freqs.weight", "factors of Llama 3"),
        ("blk.0.attn_q.bias", r"attn_q\.bias.*shape \[32\], found shape \[4\]"),
        ("blk.0.ffn_gate_exps.weight", r"ffn_gate_exps.*tensors of its architecture"),
    ],
)
def test_tensors_that_no_model_of_the_config_has_are_refused_by_name(
    home: Warehouse, tmp_path: Path, extra: str, said: str
) -> None:
    values = np.array([1, 1, 2, 9], np.float32)
    path, _ = written(tmp_path / "m.gguf", "llama", extra={extra: values})
    with pytest.raises(CheckpointError, match=said):
        convert(home, str(path))


def test_a_way_to_split_text_that_is_unknown_is_refused_but_for_a_folder_with_the_tokenizer(
    home: Warehouse, tmp_path: Path
) -> None:
    folder, known = tmp_path / "model", byte_level("llama-bpe")
    folder.mkdir()
    model = model_of("llama", len(known.tokens))
    write(tmp_path / "known.gguf", "llama", model, known)
    path = write(folder / "m.gguf", "llama", model, byte_level("default"))
    with pytest.raises(CheckpointError, match=r"gpt2 with default.*tokenizer\.json"):
        convert(home, str(folder))
    original = Path(convert(home, str(tmp_path / "known.gguf"), tmp_path / "known").path)
    assert len(AutoTokenizer.from_pretrained(original)) == len(known.tokens)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((original / name).read_bytes())
    made = convert(home, str(folder), tmp_path / "out")
    assert made.details["tokenizer"] == "the folder's"
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        original / "tokenizer.json"
    ).read_bytes()
    with pytest.raises(CheckpointError, match="gpt2 with default"):
        convert(home, str(path))
    (folder / "other.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"cannot be told.*m\.gguf, other\.gguf"):
        convert(home, str(folder))


def test_a_number_too_large_for_the_asked_type_is_refused(home: Warehouse, tmp_path: Path) -> None:
    path, model = written(tmp_path / "m.gguf", "llama")
    half = read(convert(home, str(path), tmp_path / "half", dtype="F16").path)
    assert all(torch.equal(half[k], v.half()) for k, v in state_of(model).items())
    data = path.read_bytes()
    path.write_bytes(data[:-4] + np.float32(70000).tobytes())
    with pytest.raises(CheckpointError, match=r"too large.*output\.weight.*65504.*70000"):
        convert(home, str(path), tmp_path / "out", dtype="F16")
    assert not (tmp_path / "out").exists()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(MergePipeError, match="pickled tensors keep theirs"):
        convert(home, str(tmp_path / "pytorch_model.bin"), dtype="F16")


def test_a_file_that_is_replaced_while_it_is_converted_is_refused(
    home: Warehouse, tmp_path: Path
) -> None:
    path, _ = written(tmp_path / "m.gguf", "llama")
    other, _ = written(tmp_path / "other", "llama", kinds={"output.weight": "F16"})
    with pytest.raises(CheckpointChangedError, match=r"m\.gguf"):
        convert(home, str(path), tmp_path / "out", Replacing(other, path))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("missing", ["gguf", "transformers"])
def test_a_missing_library_is_said_with_the_extra_that_brings_it(
    home: Warehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    path, _ = written(tmp_path / "m.gguf", "llama")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MergePipeError, match=rf"{missing}.*mergepipe-pipeline\[gguf\]"):
        convert(home, str(path))
