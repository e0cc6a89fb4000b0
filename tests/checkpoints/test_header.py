"""The header is the library's byte for byte, and files are accepted as the library does."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.torch import save_file

from mergepipe_pipeline.checkpoints.header import build_header, header_nbytes, parse_header
from mergepipe_pipeline.checkpoints.writer import ShardWriter
from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.errors import CheckpointError, IncompleteCheckpointError
from tests.storage.files import described, raw_file
from tests.support.laws import examples

TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
}
NAMES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.sampled_from(['a"b', "a\\b", "a\nb", "\x7f", "\u2028", "\x01", "层.0", "😀", "model.w"]),
).filter(lambda name: name != "__metadata__")
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
TENSORS = st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(TORCH)), SHAPES), max_size=6)
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]


def parse(data: bytes) -> list[TensorEntry]:
    length = header_nbytes(data[:8], len(data), "x.safetensors")
    return parse_header(data[8 : 8 + length], len(data), "x.safetensors")[0]


def random_tensors(shapes: Shapes) -> dict[str, torch.Tensor]:
    return {
        name: torch.randint(0, 2 if code == "BOOL" else 100, shape).to(TORCH[code])
        for name, (code, shape) in shapes.items()
    }


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


@settings(max_examples=examples(40), deadline=None)
@given(TENSORS)
def test_a_written_shard_is_the_library_s_file_byte_for_byte(shapes: Shapes) -> None:
    tensors = random_tensors(shapes)
    with tempfile.TemporaryDirectory() as tmp:
        theirs, ours = Path(tmp, "theirs"), Path(tmp, "ours")
        save_file(tensors, theirs, metadata={"format": "pt"})
        with ShardWriter(
            ours, [(n, code, shape) for n, (code, shape) in shapes.items()], {"format": "pt"}
        ) as writer:
            for name in writer.order:
                writer.write(memoryview(bytes_of(tensors[name])))
            sha256, nbytes = writer.finish()
        data = theirs.read_bytes()
        assert ours.read_bytes() == data
        assert (sha256, nbytes) == (hashlib.sha256(data).hexdigest(), len(data))


@settings(max_examples=examples(40), deadline=None)
@given(TENSORS)
def test_a_parsed_header_finds_each_tensor_s_own_bytes(shapes: Shapes) -> None:
    tensors = random_tensors(shapes)
    with tempfile.TemporaryDirectory() as tmp:
        path = Path(tmp, "x")
        save_file(tensors, path, metadata={"format": "pt"})
        data = path.read_bytes()
    entries = parse(data)
    assert {e.name: (e.dtype, e.shape) for e in entries} == shapes
    for e in entries:
        assert data[e.start_byte : e.start_byte + e.nbytes] == bytes_of(tensors[e.name])


@settings(max_examples=examples(40), deadline=None)
@given(TENSORS, st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3))
def test_a_header_is_aligned_and_keeps_its_metadata(
    shapes: Shapes, metadata: dict[str, str]
) -> None:
    header = build_header([(n, code, shape) for n, (code, shape) in shapes.items()], metadata)
    data = sum(e.nbytes for e in _described_only(header))
    assert len(header) % 8 == 0
    assert parse_header(header[8:], len(header) + data, "x")[1] == metadata


def _described_only(header: bytes) -> list[TensorEntry]:
    value = {k: v for k, v in json.loads(header[8:]).items() if k != "__metadata__"}
    return [TensorEntry(k, v["dtype"], tuple(v["shape"]), "x", 0) for k, v in value.items()]


DATA = bytes(8)
GOOD = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'

ACCEPTED = {
    "one tensor": raw_file({"a": described()}, DATA),
    "no tensor": raw_file({}),
    "blanks after the header": raw_file(b"{}      "),
    "metadata of null": raw_file({"__metadata__": None, "a": described()}, DATA),
    "an empty tensor first": raw_file(
        {"z": described(shape=[0], offsets=[0, 0]), "a": described()}, DATA
    ),
    "an empty tensor last": raw_file(
        {"a": described(), "z": described(shape=[0], offsets=[8, 8])}, DATA
    ),
    "a name with NUL": raw_file({"a\0": described()}, DATA),
}

REFUSED = {
    "an empty file": (b"", "too short"),
    "two bytes": (b"\1\2", "too short"),
    "an absurd length": (raw_file(GOOD, DATA, 1 << 63), "absurd length"),
    "a length just over the limit": (raw_file(GOOD, DATA, 100_000_001), "absurd length"),
    "a length beyond the file": (raw_file(GOOD, DATA, 4000), "shorter than its"),
    "no JSON": (raw_file(b"{nope", DATA), "not valid JSON"),
    "a list": (raw_file(b"[]"), "does not start with '{'"),
    "bytes that are no UTF-8": (raw_file(b'{"\xff":1}'), "not valid JSON"),
    "half a surrogate pair": (raw_file(GOOD.replace(b"a", b"\\ud800", 1), DATA), "not valid JSON"),
    "a control character": (raw_file(GOOD.replace(b"a", b"\n", 1), DATA), "not valid JSON"),
    "junk after the header": (raw_file(b"{} x"), "not valid JSON"),
    "a field twice": (raw_file(GOOD.replace(b'"shape"', b'"dtype":"F32","shape"'), DATA), "twice"),
    "NaN": (raw_file(b'{"a":NaN}'), "NaN is not JSON"),
    "deep nesting": (raw_file(b'{"a":' + b"[" * 200_000), "not valid JSON"),
    "a number of 5000 digits": (raw_file(GOOD.replace(b"[2", b"[" + b"9" * 5000), DATA), "JSON"),
    "a zero with a sign": (
        raw_file(GOOD.replace(b"[0,8]", b"[-0,8]"), DATA),
        "-0 is no natural number",
    ),
    "a negative offset": (raw_file({"a": described(offsets=[-8, 0])}, DATA), "ascending offsets"),
    "descending offsets": (raw_file({"a": described(offsets=[8, 0])}, DATA), "ascending offsets"),
    "three offsets": (raw_file({"a": described(offsets=[0, 8, 8])}, DATA), "ascending offsets"),
    "an offset that is a float": (raw_file({"a": described(offsets=[0, 8.0])}, DATA), "offsets"),
    "an offset that is a bool": (raw_file({"a": described(offsets=[False, 8])}, DATA), "offsets"),
    "overlapping tensors": (
        raw_file({"a": described(), "b": described(offsets=[4, 12])}, bytes(12)),
        r"x\.safetensors, b\. Expected data at byte",
    ),
    "two tensors at one place": (
        raw_file({"a": described(), "b": described()}, DATA),
        "after its neighbour",
    ),
    "a hole between tensors": (
        raw_file({"a": described(), "b": described(offsets=[12, 20])}, bytes(20)),
        "after its neighbour",
    ),
    "a hole at the start": (
        raw_file({"a": described(offsets=[4, 12])}, bytes(12)),
        "after its neighbour",
    ),
    "an empty tensor inside another": (
        raw_file(
            {"a": described(shape=[4], offsets=[0, 16]), "z": described("F32", [0], [8, 8])},
            bytes(16),
        ),
        "after its neighbour",
    ),
    "trailing bytes": (raw_file({"a": described()}, bytes(9)), "bytes after its last tensor"),
    "truncated data": (raw_file({"a": described()}, bytes(7)), "truncated"),
    "a shape of another size": (raw_file({"a": described(shape=[3])}, DATA), "12 bytes for F32"),
    "a shape whose product overflows": (
        raw_file({"a": described(shape=[1 << 33, 1 << 33])}, DATA),
        "product fits the tensor's byte range",
    ),
    "an overflow times zero": (
        raw_file({"a": described(shape=[1 << 40, 1 << 40, 0], offsets=[0, 0])}),
        "product fits the tensor's byte range",
    ),
    "a shape of a million huge dimensions": (
        raw_file({"a": described(shape=[1 << 61] * 100_000)}, DATA),
        "product fits the tensor's byte range",
    ),
    "a dimension past 64 bits": (raw_file({"a": described(shape=[1 << 70])}, DATA), "natural"),
    "a negative dimension": (raw_file({"a": described(shape=[-2])}, DATA), "natural numbers"),
    "an unknown dtype": (raw_file({"a": described("F33")}, DATA), "'F33'"),
    "a very long dtype": (raw_file({"a": described("F" * 9999)}, DATA), r"FFF\. Next"),
    "a dtype that is a list": (raw_file({"a": described(["F32"])}, DATA), "whole bytes"),
    "metadata of numbers": (raw_file({"__metadata__": {"x": 1}}), "strings only"),
    "metadata that is a list": (raw_file({"__metadata__": []}), "strings only"),
    "a missing field": (raw_file({"a": {"dtype": "F32", "shape": [2]}}, DATA), "data_offsets"),
    "a tensor of null": (raw_file({"a": None}), "data_offsets"),
}

#: The library accepts these; we do not, since each lets two readers see two different files.
STRICTER = {
    "a blank before the brace": (raw_file(b" " + GOOD, DATA), "does not start with"),
    "a tensor twice": (raw_file(b"{" + GOOD[1:-1] + b"," + GOOD[1:], DATA), "occurs twice"),
    "a metadata key twice": (raw_file(b'{"__metadata__":{"a":"1","a":"2"}}'), "occurs twice"),
    "an unknown field": (raw_file({"a": described(more=1)}, DATA), "data_offsets"),
    "a tensor as a list": (raw_file(b'{"a":["F32",[2],[0,8]]}', DATA), "data_offsets"),
    "a dtype below one byte": (raw_file({"a": described("F4", [16])}, DATA), "whole bytes"),
}


@pytest.mark.parametrize("what", ACCEPTED)
def test_what_the_library_accepts_is_accepted(what: str) -> None:
    names = [name for name, _ in deserialize(ACCEPTED[what])]
    assert sorted(e.name for e in parse(ACCEPTED[what])) == sorted(names)


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_library_refuses_is_refused_with_the_file_s_name(what: str) -> None:
    data, message = REFUSED[what]
    with pytest.raises(SafetensorError, match="Error while deserializing"):
        deserialize(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        parse(data)
    assert "x.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
            r"Git LFS pointer, not the weights.*x\.safetensors.*`git lfs pull`",
        ),
        (b"<!DOCTYPE html><html></html>", r"web page.*x\.safetensors.*download the file again"),
        (b"\n<HTML><body>Sign in</body></HTML>", "web page was saved in place of the file"),
    ],
)
def test_what_a_download_left_in_a_file_s_place_is_named(data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse(data)


def test_a_dtype_that_is_not_read_is_no_damage() -> None:
    with pytest.raises(CheckpointError, match=r"dtype that is not read.*F64.*'Q4_K'.*convert") as e:
        parse(raw_file({"a": described("Q4_K")}, DATA))
    assert "damaged" not in str(e.value)


@pytest.mark.parametrize("what", STRICTER)
def test_ambiguous_files_are_refused_although_the_library_reads_them(what: str) -> None:
    data, message = STRICTER[what]
    deserialize(data)
    with pytest.raises(CheckpointError, match=message):
        parse(data)


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_a_header_with_random_damage_is_refused_cleanly_or_read_as_the_library_reads_it(
    data: st.DataObject,
) -> None:
    file = bytearray(raw_file({"a": described(), "b": described("I8", [3], [8, 11])}, bytes(11)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(file) - 12))
        file[at] = data.draw(st.integers(0, 255))
    try:
        entries = parse(bytes(file))
    except CheckpointError:
        return
    theirs = {n: (v["dtype"], tuple(v["shape"])) for n, v in deserialize(bytes(file))}
    assert {e.name for e in entries} == set(theirs)
    assert {e.name: e.shape for e in entries} == {n: shape for n, (_, shape) in theirs.items()}


#: What a header is written with, and what looks like it.
TOKENS = [
    *(
        "0",
        "1",
        "2",
        "4",
        "8",
        "-0",
        "-8",
        "8.0",
        "8e0",
        "0.8e1",
        "08",
        "+8",
        "0x8",
        "0.0",
        "1e400",
    ),
    *("true", "null", "Infinity", "NaN", str(1 << 63), str(1 << 64), "9" * 4400),
    *("{", "}", "[", "]", ":", ",", " ", "\n", "\t", "\f", "\0", "\u00a0", "\ufeff", "//", "'a'"),
    *('"a"', '"b"', '""', r'"\u0061"', r'"\ud83d\ude00"', r'"\ud800"', r'"\/"', r'"\x"', '"\x01"'),
    *('"F32"', '"I8"', '"F4"', '"f32"', r'"F3\u0032"', '"dtype"', '"shape"', '"data_offsets"'),
    '"__metadata__"',
]
SOUND = [
    ({"a": described(), "b": described("I8", [], [8, 9])}, 9),
    ({"__metadata__": {"x": "1"}, "a": described(shape=[2, 0], offsets=[0, 0])}, 0),
]


def pieces_of(header: object) -> list[str]:
    """The header's text, cut where an edit may change its meaning."""
    return re.findall(r'"[^"]*"|\d+|[^"\d]', json.dumps(header, separators=(",", ":")))


def is_as_strict_as_the_library(header: str, nbytes: int) -> bool:
    """Refused, or accepted by both with the same tensors."""
    file = raw_file(header.encode(), bytes(nbytes))
    try:
        found = {e.name: (e.dtype, list(e.shape)) for e in parse(file)}
    except CheckpointError:
        return True
    try:
        return found == {n: (v["dtype"], v["shape"]) for n, v in deserialize(file)}
    except SafetensorError:
        return False


@pytest.mark.parametrize(("header", "nbytes"), SOUND)
def test_no_edit_of_a_header_is_accepted_that_the_library_refuses(
    header: object, nbytes: int
) -> None:
    pieces = pieces_of(header)
    assert is_as_strict_as_the_library("".join(pieces), nbytes)
    edits = [
        "".join([*pieces[:at], token, *pieces[at + gone :]])
        for at in range(len(pieces) + 1)
        for token in ["", *TOKENS]
        for gone in (0, 1)
    ]
    assert [e for e in edits if not is_as_strict_as_the_library(e, nbytes)] == []


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(SOUND), st.lists(st.tuples(st.integers(0, 99), st.sampled_from(TOKENS))))
def test_nor_are_several(sound: tuple[object, int], edits: list[tuple[int, str]]) -> None:
    pieces = pieces_of(sound[0])
    for at, token in edits:
        pieces[at % len(pieces)] = token
    assert is_as_strict_as_the_library("".join(pieces), sound[1])


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 200))
def test_every_truncation_is_an_incomplete_checkpoint(cut: int) -> None:
    file = raw_file({"a": described(shape=[32], offsets=[0, 128])}, bytes(128))
    with pytest.raises(IncompleteCheckpointError, match=r"x\.safetensors"):
        parse(file[: min(cut, len(file) - 1)])
