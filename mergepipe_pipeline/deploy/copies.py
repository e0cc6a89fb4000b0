"""Files of a project that a warehouse runs by itself: where they come from, and their copies.

A record beside a copy says what was written, so that what a person wrote or changed is never lost.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mergepipe_pipeline.deploy.recipe_files import yaml_files
from mergepipe_pipeline.digest import sha256_hex
from mergepipe_pipeline.domain.bounds import NAME, NAME_FORM
from mergepipe_pipeline.errors import RecipeError
from mergepipe_pipeline.resolution.origins import RECORDS, Origin, origin_of, origin_path
from mergepipe_pipeline.storage.atomic import remove_tree, rename, write_atomic
from mergepipe_pipeline.storage.forms import keep_record, kept_record
from mergepipe_pipeline.storage.locks import locked
from mergepipe_pipeline.warehouse import Warehouse

_LOG = logging.getLogger("mergepipe")

#: A file, a folder of files, or texts by name.
Source = str | Path | Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Text:
    data: bytes
    #: Where relative paths start; "" in the warehouse.
    folder: str


@dataclass(frozen=True, slots=True)
class _Location:
    """The copies that a code location asked for last."""

    location: str
    names: tuple[str, ...]


#: By name, what this process wrote for each prefix.
_Copies = dict[str, dict[tuple[str, ...], _Text]]
#: The copies in each folder of a warehouse.
_WRITTEN = dict[Path, _Copies]()
#: By folder of a warehouse, the files and folders that this process read, and what was in them.
_READ = dict[Path, dict[Path, dict[str, _Text]]]()
_SETTLED = set[tuple[Path, str]]()


def written(
    source: Source, folder: Path, prefix: tuple[str, ...], start: str | Path | None = None
) -> tuple[str, ...]:
    """Write the files of a project into a folder of the warehouse; their names, in order.

    Those that are there as they are stay. Relative paths in texts begin at `start`, in files where
    they lie. Raises RecipeError where there is none, and for one that stands otherwise under
    another `prefix`, or was there before.
    """
    texts = _read(source, start)
    if isinstance(source, str | Path):
        _READ.setdefault(folder, {})[Path(source).absolute()] = texts
    writers = _WRITTEN.setdefault(folder, {})
    for name, text in texts.items():
        had = writers.get(name, {}).items()
        other = next((p for p, before in had if p != prefix and before != text), None)
        if other is not None:
            raise RecipeError(
                "A warehouse gets two recipes or searches of one name",
                where=f"{name}, under the prefixes {'/'.join(other)!r} and {'/'.join(prefix)!r}",
                expected="one text and one folder for each name in a warehouse",
                found="two",
                next_step="rename one of them, or give one of the prefixes a warehouse of its own",
            )
    for name, text in texts.items():
        _put(folder / f"{name}.yml", text)
        writers.setdefault(name, {})[prefix] = text
    return tuple(texts)


def texts_of(source: Source) -> dict[str, str]:
    """The texts of a source by name. Raises RecipeError where there is none."""
    return {name: text.data.decode() for name, text in _read(source, None).items()}


def is_several(source: Source) -> bool:
    """Whether a source may get another file besides those that it has."""
    return len(source) > 1 if isinstance(source, Mapping) else Path(source).is_dir()


def are_changed(warehouse: Warehouse) -> bool:
    """Whether a file or folder that this process read for a warehouse has other texts now.

    Raises RecipeError for one that could not be read any more.
    """
    read = [_READ.get(folder, {}) for folder in (warehouse.recipes, warehouse.searches)]
    return any(_read(at, None) != texts for sources in read for at, texts in sources.items())


def settle(warehouse: Warehouse, location: str) -> None:
    """Remove copies that a code location asked for before, and does not in this process.

    Only those that are as they were written, and that no other location asks for. To be called when
    all definitions are loaded; the first call does it.
    """
    for folder in (warehouse.recipes, warehouse.searches):
        if (folder, location) not in _SETTLED:
            _settle(folder, location, _WRITTEN.get(folder, {}))
            _SETTLED.add((folder, location))


def _settle(folder: Path, location: str, mine: _Copies) -> None:
    path = folder / RECORDS / f"@{sha256_hex(location.encode())[:16]}.json"
    if not mine and not path.exists():
        return
    with locked(folder / RECORDS / "@lock"):
        known = {p: kept_record(p, _Location) for p in path.parent.glob("@*.json")}
        before = known.pop(path, None)
        keep_record(path, _Location(location, tuple(sorted(mine))))
        others = {name for other in known.values() if other for name in other.names}
        for name in set(before.names if before else ()).difference(mine, others):
            copy = folder / f"{name}.yml"
            with suppress(FileNotFoundError):
                if origin_of(copy) is not None:
                    remove_tree(copy)
            remove_tree(origin_path(copy))
        for name, texts in mine.items():  # another location may have removed its own
            if not (folder / f"{name}.yml").exists():
                _put(folder / f"{name}.yml", next(iter(texts.values())))


def _put(path: Path, text: _Text) -> None:
    """Write a copy. What a person made of the one before is kept beside it, under another name."""
    found = path.read_bytes() if path.is_file() else None
    if found not in (None, text.data):
        known, digest = kept_record(origin_path(path), Origin), sha256_hex(found or b"")
        if known is None:
            raise RecipeError(
                "The warehouse has a recipe or search of this name that no project wrote",
                where=str(path),
                expected="no file, or the text that the project has for it",
                found="another text",
                next_step="rename the project's, or move this file away",
            )
        if known.text_sha256 != digest:
            kept = path.with_name(f"{path.name}.{digest[:8]}.edited")
            with suppress(FileNotFoundError):  # another process does the same
                rename(path, kept)
            _LOG.warning("%s was changed in the warehouse; that is %s now", path, kept)
    if found != text.data:
        write_atomic(path, text.data)
    origin = Origin(sha256_hex(text.data), text.folder)
    if kept_record(origin_path(path), Origin) != origin:
        keep_record(origin_path(path), origin)


def _read(source: Source, start: str | Path | None) -> dict[str, _Text]:
    if isinstance(source, str | Path):
        path, where = Path(source), str(source)
        files = list(yaml_files(path)) if path.is_dir() else [path] if path.is_file() else []
        found = {f.stem: _Text(f.read_bytes(), str(f.absolute().parent)) for f in files}
    else:
        folder = "" if start is None else str(Path(start).resolve())
        found = {name: _Text(text.encode(), folder) for name, text in source.items()}
        where = ", ".join(source) or "recipes"
    wrong = next((name for name in found if not NAME.fullmatch(name)), None)
    if found and wrong is None:
        return found
    raise RecipeError(
        "There is no recipe or search that could run",
        where=where,
        expected=f"a file, a folder of them, or texts by name, which is {NAME_FORM}",
        found="none" if wrong is None else repr(wrong),
        next_step="correct the path or the name; paths start from the folder of the process",
    )
