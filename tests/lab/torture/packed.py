"""A pack as it travels, taken apart and put together again, with seals that agree as an author's.

Whoever makes a pack seals it too: what is changed here before it is sealed gets that far.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mergepipe_pipeline.catalog.arrow_tables import FACTS_KEY, encode
from mergepipe_pipeline.catalog.seals import place_of, seal_of, sealed_path
from mergepipe_pipeline.digest import SEAL_KEY, digest_json, seal, sha256_hex, unseal
from mergepipe_pipeline.domain.pack import TensorContent
from mergepipe_pipeline.packs.index import CHECKSUMS, CHUNKS, INDEX, pack_id_of
from tests.lab.torture.hostile import VALUES, places

Files = dict[str, bytes]
_PARTS = {"chunks": CHUNKS, "sums": CHUNKS, "checksums": CHECKSUMS}
_BOMB_ROWS = 1_500_000
_DEEP: Any = 0
for _ in range(200):
    _DEEP = [_DEEP]
_ODD: tuple[Any, ...] = (
    *VALUES, _DEEP, "0" * 64, "f" * 64, "0" * 32, "0" * 24, "../" * 9 + "etc/passwd", "/etc/passwd",
    "a/../../b", ".", "..", 1 << 40, (1 << 53) - 1, (1 << 63) - 1, -(1 << 63), 0o4755, 1e308,
    "base",
)  # fmt: skip


def odd_leaf(draw: Random, value: Any) -> None:
    """Change one value or key of a JSON value in place."""
    holder, key = draw.choice(list(places(value)))
    how = draw.random()
    with suppress(TypeError):
        if how < 0.75:
            holder[key] = copy.deepcopy(draw.choice(_ODD))
        elif how < 0.9:
            del holder[key]
        elif isinstance(holder, dict):
            holder[str(draw.choice(_ODD))] = copy.deepcopy(draw.choice(_ODD))
        else:
            holder.append(copy.deepcopy(draw.choice(_ODD)))


def sealed(value: dict[str, Any]) -> bytes:
    """As `seal`, of anything: what cannot be sealed gets a seal all the same."""
    try:
        return seal(value)
    except (ValueError, RecursionError):
        text = json.dumps({**value, SEAL_KEY: "0" * 64}, sort_keys=True, indent=1)
        return f"{text}\n".encode()


@dataclass
class PackParts:
    """The parts of a pack that travels; `tables` are (key, columns) by file and row group."""

    told: dict[str, Any]
    rows: list[dict[str, Any]]
    meta: dict[str, Any]
    tables: dict[str, list[tuple[list[str], pa.Table]]]
    frames: Files
    rests: Files

    @staticmethod
    def of(files: Files) -> PackParts:
        """The parts of sound files."""
        index = next(data for name, data in files.items() if name.startswith("index."))
        table = pq.read_table(pa.BufferReader(index))
        tables = {}
        for stem in _PARTS:
            data = next(d for name, d in files.items() if name.startswith(f"{stem}."))
            parquet = pq.ParquetFile(pa.BufferReader(data))
            groups = (parquet.read_row_group(n) for n in range(parquet.num_row_groups))
            tables[stem] = [(group["tensor"].to_pylist(), group) for group in groups]
        return PackParts(
            unseal(files["expert.json"], ""),
            table.to_pylist(),
            json.loads(table.schema.metadata[FACTS_KEY]),
            tables,
            {n: d for n, d in files.items() if n.endswith(".frames")},
            {n: d for n, d in files.items() if n.endswith(".rest")},
        )


class Forger:
    """Makes files of a pack of which one thing is wrong: `kind` of it, as `draw` says."""

    def __init__(self, parts: PackParts, draw: Random) -> None:
        self._parts, self._draw = copy.copy(parts), draw
        self._parts = PackParts(
            copy.deepcopy(parts.told),
            copy.deepcopy(parts.rows),
            copy.deepcopy(parts.meta),
            dict(parts.tables),
            dict(parts.frames),
            dict(parts.rests),
        )

    def files(self, kind: str) -> tuple[str, Files]:
        """The pack's id, and its files."""
        parts, draw = self._parts, self._draw
        if kind in ("frames", "rests"):
            self._odd_bytes(parts.frames if kind == "frames" else parts.rests)
        elif kind == "index":
            odd_leaf(draw, parts.rows)
        pack_id = self._pack_id()
        place = Path("packs") / pack_id
        out = {**parts.frames, **parts.rests}
        part = draw.choice(list(_PARTS)) if kind == "tables" else ""
        for stem, groups in parts.tables.items():
            data = self._table(stem, groups, is_odd=stem == part)
            parts.meta[stem] = seal_of(data, place_of(place, stem))
            out[sealed_path(place, stem, parts.meta[stem]).name] = data
        if kind == "meta":
            odd_leaf(draw, parts.meta)
        data = self._index(bomb=kind == "bomb")
        if kind == "index bytes":
            held = {"index": data}
            self._odd_bytes(held)
            data = held["index"]
        out[sealed_path(place, "index", seal_of(data, place_of(place, "index"))).name] = data
        told = parts.told
        told["record"]["pack_id"] = pack_id
        for number, file in enumerate(told["record"]["files"]):
            file["rest_sha256"] = sha256_hex(out[f"{number:06d}.rest"])
        listed = {n: {"name": n, "nbytes": len(d), "sha256": sha256_hex(d)} for n, d in out.items()}
        told["files"] = list(listed.values())
        if kind == "record":
            odd_leaf(draw, told)
        return pack_id, {**out, "expert.json": sealed(told)}

    def _pack_id(self) -> str:
        """That of the contents of the rows, as far as these have any."""
        keys = ("tensor", "base_tensor", "dtype", "shape", "digest", "base_digest")
        with suppress(TypeError, KeyError, ValueError):
            return pack_id_of([TensorContent(*(row[k] for k in keys)) for row in self._parts.rows])
        return digest_json(self._draw.random())

    def _index(self, *, bomb: bool) -> bytes:
        rows = self._parts.rows
        if bomb:
            texts = ("tensor", "base_tensor", "dtype", "digest", "base_digest")
            table = pa.table(
                [
                    pa.repeat(pa.scalar(rows[0][n] if n in texts else None, field.type), _BOMB_ROWS)
                    for n, field in zip(INDEX.names, INDEX, strict=True)
                ],
                INDEX,
            )
            return encode(table, self._parts.meta)
        for schema in (INDEX, None):  # else the columns are of other types
            with suppress(pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
                table = pa.Table.from_pylist(rows, schema)
                return encode(table, self._parts.meta)
        return encode(pa.table({"x": [1]}), self._parts.meta)

    def _table(self, stem: str, groups: list[tuple[list[str], pa.Table]], *, is_odd: bool) -> bytes:
        """A file of row groups; an odd one has other bytes, columns, places or compression."""
        draw, schema, codec = self._draw, _PARTS[stem], "none"
        placed: list[list[Any]] = []
        sink, stop = io.BytesIO(), 0
        how = draw.choice(("arrays", "schema", "places", "bomb", "cut")) if is_odd else ""
        if how == "schema":
            schema = pa.schema([("tensor", pa.string()), ("x", pa.list_(pa.int64()))])
            groups = [(key, pa.table([key, [[1]] * len(key)], schema=schema)) for key, _ in groups]
        elif how in ("arrays", "bomb"):
            codec = "zstd" if how == "bomb" else "none"
            groups = [(key, self._odd_arrays(table, bomb=how == "bomb")) for key, table in groups]
        named = schema.with_metadata({FACTS_KEY: b"{}"})
        with pq.ParquetWriter(sink, named, compression=codec, use_dictionary=False) as writer:
            for key, table in groups:
                writer.write_table(table, row_group_size=max(1, len(table)))
                start, stop = stop, sink.tell()
                placed.append([list(key), start, stop, seal_of(sink.getbuffer()[start:stop])])
            if how == "places":
                odd_leaf(draw, placed)
            value = json.dumps(placed).encode(errors="replace")
            writer.add_key_value_metadata({b"mergepipe.row_groups": value})
        data = sink.getvalue()
        return data[draw.randrange(len(data) // 2) :] if how == "cut" else data

    def _odd_arrays(self, table: pa.Table, *, bomb: bool) -> pa.Table:
        columns = [column.to_pylist() for column in table.columns]
        column = self._draw.randrange(1, len(columns))
        row = self._draw.randrange(len(columns[column]))
        data = bytearray(columns[column][row])
        if bomb:
            data = bytearray(300 << 20)
        elif self._draw.random() < 0.3:
            del data[self._draw.randrange(len(data)) :]
        elif data:
            data[self._draw.randrange(len(data))] ^= 1 << self._draw.randrange(8)
        columns[column][row] = bytes(data)
        return pa.table(columns, schema=table.schema)

    def _odd_bytes(self, files: Files) -> None:
        """One file cut off, made longer, or with a run of bytes replaced."""
        draw = self._draw
        name = draw.choice(sorted(n for n, data in files.items() if data))
        data, how = bytearray(files[name]), draw.randrange(3)
        at = draw.randrange(len(data))
        if how == 0:
            del data[at:]
        elif how == 1:
            data += draw.randbytes(draw.randint(1, 100))
        else:
            data[at : at + 8] = draw.randbytes(min(8, len(data) - at))
        files[name] = bytes(data)


KINDS = ("record", "index", "meta", "tables", "frames", "rests", "index bytes", "sound", "bomb")


def each(draw: Callable[[], int], count: int) -> Iterator[tuple[str, int]]:
    """Kinds in turn with a drawn number each; bombs are few."""
    frequent = [k for k in KINDS if k != "bomb"]
    for number in range(count):
        yield ("bomb" if number % 40 == 20 else frequent[number % len(frequent)]), draw()
