"""Hostile checkpoint folders: each builder makes one that must be refused where it enters.

`CORPUS` is a list of (name, build). `build(folder)` makes the folder; what a link of it leads to
lies beside it under a name that starts with "_", which the inbox passes over.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.checkpoints.test_header import REFUSED, STRICTER

Build = Callable[[Path], None]
MODEL, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
ADAPTER_MODEL, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TOKENIZER_JSON = b'{"model": {"type": "WordLevel", "vocab": {"a": 0}}}'
#: Files beside the weights that a merge reads or copies.
SIDE = {
    "tokenizer.json": TOKENIZER_JSON,
    "tokenizer_config.json": b"{}",
    "special_tokens_map.json": b"{}",
    "added_tokens.json": b"{}",
    "generation_config.json": b"{}",
    "preprocessor_config.json": b"{}",
    "vocab.json": b'{"a": 0}',
    "vocab.txt": b"a\n",
    "merges.txt": b"#version: 0.2\n",
    "chat_template.jinja": b"{{ messages }}",
    "tokenizer.model": b"\n\x0e",
    "spiece.model": b"\n\x0e",
}
WEIGHTS = {"model.norm.weight": np.ones(4, np.float32)}


def write_full(folder: Path) -> Path:
    """A sound checkpoint of one file."""
    folder.mkdir(parents=True)
    save_file(WEIGHTS, folder / MODEL)
    (folder / CONFIG).write_text('{"model_type": "x"}')
    for name, data in SIDE.items():
        (folder / name).write_bytes(data)
    return folder


def write_sharded(folder: Path) -> Path:
    """A sound checkpoint of two shards with an index."""
    write_full(folder)
    (folder / MODEL).unlink()
    save_file(WEIGHTS, folder / ONE)
    save_file({"lm_head.weight": np.ones(4, np.float32)}, folder / TWO)
    write_map(folder, {"model.norm.weight": ONE, "lm_head.weight": TWO})
    return folder


def write_adapter(folder: Path) -> Path:
    """A sound adapter."""
    write_full(folder)
    (folder / MODEL).unlink()
    save_file({"q.lora_A.weight": np.ones((1, 4), np.float32)}, folder / ADAPTER_MODEL)
    (folder / ADAPTER_CONFIG).write_text('{"peft_type": "LORA", "r": 1}')
    return folder


def write_map(folder: Path, weight_map: object) -> None:
    """A shard index with this weight map."""
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def outside(folder: Path) -> Path:
    """A private place beside the folder."""
    place = folder.parent / f"_private-{folder.name}"
    place.mkdir(exist_ok=True)
    return place


#: Every file that is read or copied, with a sound checkpoint that has it.
ROLES: list[tuple[str, Callable[[Path], Path]]] = [
    (CONFIG, write_full),
    (MODEL, write_full),
    (INDEX, write_sharded),
    (TWO, write_sharded),
    (ADAPTER_CONFIG, write_adapter),
    (ADAPTER_MODEL, write_adapter),
    *((name, write_full) for name in SIDE),
    ("tokenizer.json", write_adapter),
]


def _leaving_link(folder: Path, file: str, write: Callable[[Path], Path]) -> None:
    write(folder)
    (folder / file).rename(outside(folder) / "id_rsa")
    (folder / file).symlink_to(Path("..") / outside(folder).name / "id_rsa")


def _link(folder: Path, file: str, write: Callable[[Path], Path], target: str) -> None:
    write(folder)
    (folder / file).unlink()
    (folder / file).symlink_to(target)


def _chain_of_links(folder: Path) -> None:
    write_full(folder)
    (folder / "tokenizer.json").rename(outside(folder) / "id_rsa")
    (folder / "second").symlink_to(outside(folder) / "id_rsa")
    (folder / "tokenizer.json").unlink(missing_ok=True)
    (folder / "tokenizer.json").symlink_to("second")


def _linked_subfolder(folder: Path) -> None:
    write_sharded(folder)
    (folder / TWO).rename(outside(folder) / TWO)
    (folder / "sub").symlink_to(outside(folder))
    write_map(folder, {"model.norm.weight": ONE, "lm_head.weight": f"sub/{TWO}"})


def _blobs_of_another_repo(folder: Path) -> None:
    """The folder is one of a hub cache's kind, its link leads into another model's blobs."""
    blobs = outside(folder) / "models--other" / "blobs"
    blobs.mkdir(parents=True)
    write_full(folder)
    (folder / CONFIG).rename(blobs / "abc")
    (folder / CONFIG).symlink_to(blobs / "abc")


def _fifo(folder: Path, file: str, write: Callable[[Path], Path]) -> None:
    write(folder)
    (folder / file).unlink()
    os.mkfifo(folder / file)


def _socket(folder: Path, file: str, write: Callable[[Path], Path]) -> None:
    write(folder)
    (folder / file).unlink()
    here = os.open(folder, os.O_RDONLY)  # a socket's path may have 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{here}/{file}")
    finally:
        os.close(here)


def _directory(folder: Path, file: str, write: Callable[[Path], Path]) -> None:
    write(folder)
    (folder / file).unlink()
    (folder / file).mkdir()


def _sparse(folder: Path, file: str, write: Callable[[Path], Path], nbytes: int) -> None:
    write(folder)
    with open(folder / file, "r+b") as out:
        out.truncate(nbytes)


def _text(folder: Path, file: str, write: Callable[[Path], Path], data: bytes) -> None:
    write(folder)
    (folder / file).write_bytes(data)


def _index_names(folder: Path, shard: object) -> None:
    write_sharded(folder)
    save_file({"lm_head.weight": np.ones(4, np.float32)}, folder.parent / f"_{folder.name}")
    write_map(folder, {"model.norm.weight": ONE, "lm_head.weight": shard})


def _weight_map(folder: Path, weight_map: object) -> None:
    write_sharded(folder)
    write_map(folder, weight_map)


def _header(folder: Path, data: bytes) -> None:
    write_full(folder)
    (folder / MODEL).write_bytes(data)


def _name_of_bytes(folder: Path, file: bytes) -> None:
    write_full(folder)
    os.rename(folder / MODEL, os.path.join(os.fsencode(folder), file))


def _only(folder: Path, file: str) -> None:
    folder.mkdir(parents=True)
    (folder / file).write_bytes(b"\x80\x04")


def _two_copies(folder: Path) -> None:
    write_full(folder)
    (folder / MODEL).rename(folder / "one.safetensors")
    save_file(WEIGHTS, folder / "other.safetensors")


#: JSON that one reader accepts, and that no reader should.
TEXTS = {
    "half a surrogate pair in a value": b'{"x": "\\ud800"%s}',
    "half a surrogate pair in a key": b'{"\\udfff": 1%s}',
    "half a surrogate pair deep down": b'{"x": [{"y": ["\\uD83D"]}]%s}',
    "NaN": b'{"x": NaN%s}',
    "an integer of 5000 digits": b'{"x": ' + b"9" * 5000 + b"%s}",
    "nesting of 100000": b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"%s}",
    "nesting of 500": b'{"x": ' + b"[" * 500 + b"]" * 500 + b"%s}",
    "a key twice": b'{"x": 1, "x": 2%s}',
    "bytes that are no UTF-8": b'{"x": "\xff\xfe"%s}',
    "UTF-16": '{"x": 1}'.encode("utf-16"),
    "nothing": b"",
    "zeros": bytes(4096),
    "half of it": b'{"x": 1',
    "more behind it": b'{"x": 1%s} {}',
    "a list": b"[]",
    "null": b"null",
    "a string": b'"text"',
}
#: What makes the texts above sound for their reader, but for what is wrong with them.
_FITTING = {
    CONFIG: b"",
    ADAPTER_CONFIG: b', "peft_type": "LORA"',
    INDEX: f', "weight_map": {{"model.norm.weight": "{ONE}", "lm_head.weight": "{TWO}"}}'.encode(),
}
_GIB = 1 << 30


def _all() -> Iterator[tuple[str, Build]]:
    for file, write in ROLES:
        what = f"{file} of {'an adapter' if write is write_adapter else 'a model'}"
        yield f"a link that leaves: {what}", partial(_leaving_link, file=file, write=write)
        yield f"a FIFO: {what}", partial(_fifo, file=file, write=write)
        yield f"a folder: {what}", partial(_directory, file=file, write=write)
        for target in ("gone", file):  # the second leads to itself
            yield (
                f"a link to {'itself' if target == file else 'nothing'}: {what}",
                partial(_link, file=file, write=write, target=target),
            )
    for file, write in ((CONFIG, write_full), (MODEL, write_full), ("tokenizer.json", write_full)):
        yield f"a socket: {file}", partial(_socket, file=file, write=write)
        for target in ("/dev/zero", "/dev/null", "/proc/self/environ", "/etc/passwd"):
            yield (
                f"a link to {target}: {file}",
                partial(_link, file=file, write=write, target=target),
            )
    for file, write, nbytes in (
        ("tokenizer.model", write_full, 3 * _GIB // 2),
        ("tokenizer.json", write_full, 3 * _GIB // 2),
        ("merges.txt", write_full, _GIB),
        ("chat_template.jinja", write_full, _GIB),
        ("generation_config.json", write_full, _GIB),
        (CONFIG, write_full, _GIB),
        (INDEX, write_sharded, 2 * _GIB),
        (ADAPTER_CONFIG, write_adapter, _GIB),
        (MODEL, write_full, _GIB),
    ):
        yield f"{nbytes} bytes: {file}", partial(_sparse, file=file, write=write, nbytes=nbytes)
    for file, write in ((CONFIG, write_full), (ADAPTER_CONFIG, write_adapter)):
        for what, data in TEXTS.items():
            text = data.replace(b"%s", _FITTING[file])
            yield f"{what}: {file}", partial(_text, file=file, write=write, data=text)
    for what, data in TEXTS.items():
        text = data.replace(b"%s", _FITTING[INDEX])
        yield f"{what}: {INDEX}", partial(_text, file=INDEX, write=write_sharded, data=text)
    for shard in (
        "../_hostile",
        "/etc/passwd",
        "/dev/zero",
        f"sub/../{TWO}",
        f"{TWO}\0",
        "x" * 5000,
        "x/" * 3000,
        "",
        ".",
        "gone.safetensors",
        "gone/gone.safetensors",
        CONFIG,
        f"{TWO}/x",
        "\udcff.safetensors",
        1,
        None,
        [TWO],
    ):
        yield (
            f"an index that names {repr(shard)[:16]}…{repr(shard)[-4:]}",
            partial(_index_names, shard=shard),
        )
    maps: tuple[object, ...] = (None, [], "x", {"gone": ONE})
    for weight_map in maps:
        yield f"a weight map {weight_map!r}", partial(_weight_map, weight_map=weight_map)
    for what, (data, _) in (REFUSED | STRICTER).items():
        yield f"a header: {what}", partial(_header, data=data)
    for name in (b"\xff.safetensors", b"model\xc3.safetensors"):
        yield f"a weight file called {name!r}", partial(_name_of_bytes, file=name)
    for file in ("pytorch_model.bin", "model.pt", "model.gguf", "notes.txt"):
        yield f"{file} alone", partial(_only, file=file)
    yield "a tensor in two files", _two_copies
    yield "a chain of links that leaves", _chain_of_links
    yield "a linked subfolder with a shard", _linked_subfolder
    yield "blobs of another repository", _blobs_of_another_repo


CORPUS: list[tuple[str, Build]] = list(_all())
