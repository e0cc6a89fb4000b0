"""The way into the catalog: names, contents, and how experts differ from bases.

Every write is one immutable file that appears whole; every read is of files, so that any number of
processes may use one catalog at once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from mergepipe_pipeline.catalog import tables
from mergepipe_pipeline.catalog.magnitudes import decode_magnitudes, encode_magnitudes
from mergepipe_pipeline.digest import digest_json, sha256_hex
from mergepipe_pipeline.errors import CorruptionError, MergePipeError, NotFoundError
from mergepipe_pipeline.spec.checkpoint import Checkpoint
from mergepipe_pipeline.spec.stats import ExpertStats, Magnitudes, TensorStats
from mergepipe_pipeline.storage.atomic import write_atomic
from mergepipe_pipeline.storage.chain import VersionChain

if TYPE_CHECKING:
    from mergepipe_pipeline.catalog.queries import Rows

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
#: The numbers of one fact, as its maker orders them.
Fact = tuple[float, ...]


@dataclass(frozen=True)
class Registration:
    """Version `version` of a name: its checkpoint, and the name of its base if it has one."""

    name: str
    version: int
    checkpoint: Checkpoint
    base: str | None


class Content(NamedTuple):
    """All that statistics follow from: the bytes compared, and the name that draws the signs."""

    digest: str
    base_digest: str
    dtype: str
    base_dtype: str
    base_tensor: str


class Source(NamedTuple):
    """An expert's tensor that was analysed, by the ids of base and expert."""

    base_id: str
    checkpoint_id: str
    tensor: str


class Catalog:
    """The folder `catalog` of a warehouse."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def register(self, checkpoint: Checkpoint, base: str | None) -> Registration:
        """Make `checkpoint` the current version of its name; an equal one adds no version.

        Raises MergePipeError for a name that cannot be one.
        """
        if not _NAME.fullmatch(checkpoint.name):
            raise MergePipeError(
                "Not a name for a checkpoint",
                where="name",
                found=repr(checkpoint.name),
                expected="letters, digits, '.', '_' and '-', starting with a letter or digit",
                next_step="choose one with --name",
            )
        chain = self._chain(checkpoint.name)
        value = {"checkpoint_id": checkpoint.checkpoint_id, "root": checkpoint.root, "base": base}
        current = chain.current()
        if current and base is None:
            value["base"] = current[1]["base"]
        path = self._folder / "checkpoints" / f"{checkpoint.checkpoint_id}.parquet"
        if not path.exists():
            write_atomic(path, tables.encode_checkpoint(checkpoint))
        if current and current[1] == value:
            return Registration(checkpoint.name, current[0], checkpoint, value["base"])
        return Registration(checkpoint.name, chain.append(value), checkpoint, value["base"])

    def names(self) -> list[str]:
        """All registered names, sorted."""
        folder = self._folder / "names"
        if not folder.is_dir():
            return []
        # A crash may leave a name's folder without its first version.
        return sorted(p.name for p in folder.iterdir() if VersionChain(p).versions())

    def get(self, name: str) -> Registration:
        """The current version of a name. Raises NotFoundError with the nearest names."""
        current = self._chain(name).current() if _NAME.fullmatch(name) else None
        if current is None:
            near = get_close_matches(name, self.names(), n=3)
            raise NotFoundError(
                "No checkpoint of this name",
                where=str(self._folder),
                found=repr(name),
                expected=", ".join(near or self.names()[:5]) or "none is registered yet",
                next_step=f"did you mean {near[0]!r}?"
                if near
                else "register it: `mergepipe register PATH`",
            )
        return self._registration(name, *current)

    def history(self, name: str) -> list[Registration]:
        """All versions of a name, oldest first. Raises NotFoundError."""
        self.get(name)
        chain = self._chain(name)
        return [self._registration(name, n, chain.get(n)) for n in chain.versions()]

    def registrations(self) -> Iterator[tuple[str, int, str, str | None, str]]:
        """Name, version, checkpoint id, base and root of every version of every name, in order."""
        for name in self.names():
            chain = self._chain(name)
            for n in chain.versions():
                value = chain.get(n)
                yield (name, n, value["checkpoint_id"], value["base"], value["root"])

    def checkpoint(self, checkpoint_id: str, name: str, root: str) -> Checkpoint | None:
        """A checkpoint by its id, whether its files are still there or not; None if not known.

        Name and root are as given. Raises CorruptionError.
        """
        path = self._folder / "checkpoints" / f"{checkpoint_id}.parquet"
        data = _read(path)
        return None if data is None else tables.decode_checkpoint(data, str(path), name, root)

    def put_digests(self, checkpoint_id: str, digests: Mapping[str, str]) -> None:
        """Remember the digest of every tensor of a checkpoint."""
        write_atomic(self._digests(checkpoint_id), tables.encode_digests(digests))

    def digests(self, checkpoint_id: str) -> Mapping[str, str] | None:
        """Tensor name to digest, or None if not known. Raises CorruptionError."""
        path = self._digests(checkpoint_id)
        version = _version(path)
        return None if version is None else _decoded_digests(path, version)

    def content_sha256(self, checkpoint_id: str) -> str:
        """One digest over all tensors' names and digests.

        Raises NotFoundError if they are not known.
        """
        digests = self.digests(checkpoint_id)
        if digests is None:
            raise NotFoundError(
                "A checkpoint's content is not known yet",
                where=checkpoint_id,
                found="no digests",
                next_step="run `mergepipe analyze` on it",
            )
        return digest_json(dict(digests))

    def put_stats(self, stats: ExpertStats) -> None:
        """Remember an analysis; earlier ones of other tensors stay.

        Blocks and magnitudes first: the tensors' file says that it is whole.
        """
        tensors, blocks = tables.encode_stats(stats)
        stem = f"{stats.checkpoint_id}.b{stats.block_elems}.{sha256_hex(tensors)[:12]}"
        folder = self._stats(stats.base_id)
        if any(t.block_magnitudes for t in stats.tensors):
            write_atomic(folder / f"{stem}.magnitudes.parquet", encode_magnitudes(stats))
        write_atomic(folder / f"{stem}.blocks.parquet", blocks)
        write_atomic(folder / f"{stem}.tensors.parquet", tensors)

    def stats(
        self, base_id: str, checkpoint_id: str, block_elems: int, *, without: Collection[str] = ()
    ) -> ExpertStats | None:
        """What is known of an expert against a base but for magnitudes, or None.

        `without` "sketch", "sample" or "hist" these are left empty: they are most of what there is.
        Raises CorruptionError.
        """
        found: dict[tuple[str, str], TensorStats] = {}
        files = self._stats_files(base_id, checkpoint_id, block_elems)
        for path, blocks in files:
            parts = _read(path), _read(blocks)
            if parts[0] is None or parts[1] is None:
                continue
            found |= tables.decode_stats(
                parts[0], parts[1], str(path), str(blocks), without
            ).by_pair
        if not files:
            return None
        return ExpertStats(base_id, checkpoint_id, block_elems, tuple(found.values()))

    def magnitudes(
        self,
        base_id: str,
        checkpoint_id: str,
        block_elems: int,
        pairs: Collection[tuple[str, str]],
    ) -> Iterator[tuple[tuple[str, str], Magnitudes]]:
        """The magnitudes of those of `pairs` (expert's tensor, base's tensor) that have them.

        One is held at a time: all of them are near a hundredth of the expert. Raises
        CorruptionError.
        """
        missing = set(pairs)
        for path, _ in self._stats_files(base_id, checkpoint_id, block_elems):
            beside = path.with_name(path.name.replace(".tensors.", ".magnitudes."))
            if missing and beside.exists():  # catalogs of version 0.1 have none
                with beside.open("rb") as file:
                    for pair, found in decode_magnitudes(file, str(beside), missing):
                        missing.remove(pair)
                        yield pair, found

    def known_pairs(
        self, base_id: str, checkpoint_id: str, block_elems: int
    ) -> set[tuple[str, str]]:
        """The (expert's tensor, base's tensor) that `stats` has. Raises CorruptionError."""
        found: set[tuple[str, str]] = set()
        for path, blocks in self._stats_files(base_id, checkpoint_id, block_elems):
            version = _version(path)
            if version is not None and blocks.exists():
                found |= _decoded_pairs(path, version)
        return found

    def _stats_files(
        self, base_id: str, checkpoint_id: str, block_elems: int
    ) -> list[tuple[Path, Path]]:
        """Files of tensors with those of their blocks."""
        folder = self._stats(base_id)
        pattern = f"{checkpoint_id}.b{block_elems}.*.tensors.parquet"
        paths = sorted(folder.glob(pattern)) if folder.is_dir() else []
        return [(p, p.with_name(p.name.replace(".tensors.", ".blocks."))) for p in paths]

    def known_digests(self, base_id: str, model_id: str, block_elems: int) -> dict[str, str]:
        """Tensor name to digest as analyses of a model (or of experts of this base) saw them."""
        is_base = base_id == model_id
        owner, name = ("*", "base_tensor") if is_base else (model_id, "tensor")
        digest = "base_digest" if is_base else "digest"
        found: dict[str, str] = {}
        for path in sorted(self._stats(base_id).glob(f"{owner}.b{block_elems}.*.tensors.parquet")):
            rows = tables.decode_rows(path.read_bytes(), str(path), [name, digest])
            found |= {tensor: its for tensor, its in rows if its}
        return found

    def contents(self, block_elems: int) -> dict[Content, Source]:
        """Where statistics of a content can be had, of all that was analysed."""
        found: dict[Content, Source] = {}
        columns = ["tensor", *Content._fields]
        for path in sorted(self._all_stats.glob(f"*/*.b{block_elems}.*.tensors.parquet")):
            checkpoint_id = path.name.partition(".")[0]
            for tensor, *fields in tables.decode_rows(path.read_bytes(), str(path), columns):
                content = Content(*fields)
                if content.digest and content.base_digest:
                    found[content] = Source(path.parent.name, checkpoint_id, tensor)
        return found

    def put_fact(self, base_id: str, owner_id: str, key: str, facts: Mapping[str, Fact]) -> None:
        """Remember tensor-scope facts under `key`; earlier ones of the key stay.

        `owner_id` names an expert, or a group of them.
        """
        data = tables.encode_facts(facts, key)
        folder = self._facts(base_id, owner_id)
        write_atomic(folder / f"{key}.{sha256_hex(data)[:12]}.parquet", data)

    def fact(self, base_id: str, owner_id: str, key: str) -> dict[str, Fact]:
        """All facts under `key`, by tensor; empty if none is known. Raises CorruptionError."""
        out: dict[str, Fact] = {}
        folder = self._facts(base_id, owner_id)
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if re.fullmatch(re.escape(key) + r"\.[0-9a-f]{12}\.parquet", path.name):
                out |= tables.decode_facts(path.read_bytes(), str(path))
        return out

    def sql(self, query: str, rows: Rows | None = None) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Column names and rows of a query over the views of `views.VIEWS`.

        `rows` are of the views that the catalog does not know; without, those are empty.
        """
        from mergepipe_pipeline.catalog import queries

        return queries.run(
            self._folder, {"registrations": self.registrations, **(rows or {})}, query
        )

    def export(self, target: Path, rows: Rows | None = None) -> None:
        """Write everything, and `rows` as in `sql`, as tables of one new DuckDB file."""
        from mergepipe_pipeline.catalog import queries

        queries.export(self._folder, {"registrations": self.registrations, **(rows or {})}, target)

    def _registration(self, name: str, version: int, value: dict[str, Any]) -> Registration:
        path = self._folder / "checkpoints" / f"{value['checkpoint_id']}.parquet"
        data = _read(path)
        if data is None:
            raise CorruptionError(
                "A catalog file is missing",
                where=str(path),
                expected=f"the tensors of {name!r}, version {version}",
                found="no such file",
                next_step=f"register it again: `mergepipe register {value['root']}`",
            )
        checkpoint = tables.decode_checkpoint(data, str(path), name, value["root"])
        return Registration(name, version, checkpoint, value["base"])

    def _chain(self, name: str) -> VersionChain:
        return VersionChain(self._folder / "names" / name)

    def _digests(self, checkpoint_id: str) -> Path:
        return self._folder / "digests" / "v2" / f"{checkpoint_id}.parquet"

    @property
    def _all_stats(self) -> Path:
        return self._folder / "block_stats" / "v6"

    def _stats(self, base_id: str) -> Path:
        return self._all_stats / base_id

    def _facts(self, base_id: str, owner_id: str) -> Path:
        return self._folder / "tensor_facts" / "v2" / base_id / owner_id


def _version(path: Path) -> tuple[int, int] | None:
    """What tells a file from one that took its place; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size


# One verb asks for these several times, of every expert.
@lru_cache(maxsize=512)
def _decoded_digests(path: Path, version: tuple[int, int]) -> Mapping[str, str]:
    return MappingProxyType(tables.decode_digests(path.read_bytes(), str(path)))


@lru_cache(maxsize=512)
def _decoded_pairs(path: Path, version: tuple[int, int]) -> frozenset[tuple[str, str]]:
    rows = tables.decode_rows(path.read_bytes(), str(path), ["tensor", "base_tensor"])
    return frozenset((mine, theirs) for mine, theirs in rows)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
