"""Files of a project that a warehouse runs by itself: where they come from, and their copies."""

from collections.abc import Mapping
from pathlib import Path

from mergepipe_pipeline.deploy.recipe_files import yaml_files
from mergepipe_pipeline.domain.bounds import NAME, NAME_FORM
from mergepipe_pipeline.errors import RecipeError
from mergepipe_pipeline.storage.atomic import link_path, write_atomic

#: A file, a folder of files, or texts by name.
Source = str | Path | Mapping[str, str]


#: By file, what this process wrote for each prefix.
_WRITERS: dict[Path, dict[tuple[str, ...], bytes]] = {}


def written(source: Source, folder: Path, prefix: tuple[str, ...]) -> tuple[str, ...]:
    """Write the files of a project into a folder of the warehouse; their names, in order.

    Those that are there as they are stay. Files beside them, as of evaluators, are linked. Raises
    RecipeError where there is none, and for one that stands otherwise under another `prefix`.
    """
    texts = dict(_read(source))
    for name, text in texts.items():
        path = folder / f"{name}.yml"
        writers = _WRITERS.setdefault(path, {})
        other = next((p for p, had in writers.items() if p != prefix and had != text), None)
        if other is not None:
            raise RecipeError(
                "A warehouse gets two recipes or searches of one name",
                where=f"{name}, under the prefixes {'/'.join(other)!r} and {'/'.join(prefix)!r}",
                expected="one text for each name in a warehouse",
                found="two",
                next_step="rename one of them, or give one of the prefixes a warehouse of its own",
            )
        writers[prefix] = text
        if not path.is_file() or path.read_bytes() != text:
            write_atomic(path, text)
    if not isinstance(source, Mapping) and Path(source).is_dir():
        for beside in Path(source).resolve().iterdir():
            if beside.is_file() and beside.suffix not in {".yml", ".yaml"}:
                link_path(beside, folder / beside.name)
    return tuple(texts)


def is_several(source: Source) -> bool:
    """Whether a source may get another file besides those that it has."""
    return len(source) > 1 if isinstance(source, Mapping) else Path(source).is_dir()


def _read(source: Source) -> list[tuple[str, bytes]]:
    if isinstance(source, str | Path):
        path, where = Path(source), str(source)
        files = list(yaml_files(path)) if path.is_dir() else [path] if path.is_file() else []
        found = [(file.stem, file.read_bytes()) for file in files]
    else:
        found = [(name, text.encode()) for name, text in source.items()]
        where = ", ".join(source) or "recipes"
    wrong = next((name for name, _ in found if not NAME.fullmatch(name)), None)
    if found and wrong is None:
        return found
    raise RecipeError(
        "There is no recipe or search that could run",
        where=where,
        expected=f"a file, a folder of them, or texts by name, which is {NAME_FORM}",
        found="none" if wrong is None else repr(wrong),
        next_step="correct the path or the name; paths start from the folder of the process",
    )
