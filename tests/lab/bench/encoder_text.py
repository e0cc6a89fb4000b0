"""Texts of this machine that a sentence encoder is tuned to tell apart: three tasks with labels.

Lines of source files by language, three words of a program's translation by their language, and
sentences of documentation by the library that they are of. Found below `sys.prefix`, `/usr/lib`
and `/usr/share`, shuffled by a seed; a class that has too few texts is left out.
"""

from __future__ import annotations

import ast
import gettext
import os
import random
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

_ROOTS = (Path(sys.prefix), Path("/usr/lib"), Path("/usr/share"))
_LOCALES = Path("/usr/share/locale")
_SOURCES = ("py", "h", "js", "pl", "cmake", "html", "css", "sh", "rst", "c", "md", "tcl")
_LANGUAGES = ("fr", "uk", "es", "ru", "de", "sv", "it", "tr", "sr", "cs", "pl", "id", "nl", "el")
_LIBRARIES = (
    *("numpy", "torch", "transformers", "dagster", "pyarrow", "sympy", "scipy", "pandas"),
    *("matplotlib", "networkx", "sqlalchemy", "hypothesis", "fontTools", "pydantic", "rich"),
)
_MAX_CLASSES = 16
_FILES_OF_A_CLASS = 200
#: A file gives at most so many texts, so that no single file is a class.
_TEXTS_OF_A_FILE = 40


@dataclass(frozen=True, slots=True)
class Task:
    """Texts and the index of the class of each; `unseen` are for tests only."""

    name: str
    classes: tuple[str, ...]
    seen: tuple[tuple[str, int], ...]
    unseen: tuple[tuple[str, int], ...]

    @staticmethod
    def from_json(task: Mapping[str, Any]) -> Task:
        """What `asdict` made of a task, back from JSON."""
        seen, unseen = (tuple((t, i) for t, i in task[name]) for name in ("seen", "unseen"))
        return Task(task["name"], tuple(task["classes"]), seen, unseen)


def tasks(seen: int, unseen: int, seed: int) -> tuple[Task, ...]:
    """The three tasks, each with `seen` and `unseen` texts, equally many of every class.

    Raises SystemExit where this machine has fewer than four classes of a kind.
    """
    kinds: tuple[tuple[str, tuple[str, ...], Callable[[str], Iterator[list[str]]]], ...] = (
        ("language of a source line", _SOURCES, _source_lines),
        ("language of three words", _LANGUAGES, _translations),
        ("library of a sentence", _LIBRARIES, _sentences),
    )
    return tuple(_task(*kind, seen, unseen, seed) for kind in kinds)


def _task(
    name: str,
    classes: tuple[str, ...],
    texts_of: Callable[[str], Iterator[list[str]]],
    seen: int,
    unseen: int,
    seed: int,
) -> Task:
    draw, found = random.Random(seed), {}
    least = -(-(seen + unseen) // 4)
    for kind in classes:
        texts = {
            text
            for texts in islice(texts_of(kind), _FILES_OF_A_CLASS)
            for text in draw.sample(texts, min(len(texts), _TEXTS_OF_A_FILE))
        }
        if len(texts) >= least:
            found[kind] = sorted(texts)
    if len(found) < 4:
        raise SystemExit(f"{name}: this machine has texts of {sorted(found)} only")
    kinds = tuple(found)[:_MAX_CLASSES]
    each = -(-(seen + unseen) // len(kinds))
    labelled = [(t, i) for i, kind in enumerate(kinds) for t in draw.sample(found[kind], each)]
    draw.shuffle(labelled)
    return Task(name, kinds, tuple(labelled[unseen : unseen + seen]), tuple(labelled[:unseen]))


@cache
def _files(root: Path) -> Mapping[str, Sequence[Path]]:
    """The files below a folder by suffix, each list in an arbitrary order that stays the same."""
    found: dict[str, list[Path]] = defaultdict(list)
    for folder, _, names in os.walk(root):
        for name in names:
            found[name.rpartition(".")[2]].append(Path(folder, name))
    for files in found.values():
        files.sort()
        random.Random(0).shuffle(files)
    return found


def _readable(files: Iterable[Path]) -> Iterator[Path]:
    return (f for f in files if f.is_file() and f.stat().st_size < 1 << 20)


def _source_lines(suffix: str) -> Iterator[list[str]]:
    for file in _readable(f for root in _ROOTS for f in _files(root).get(suffix, ())):
        lines = (line.strip() for line in file.read_text(errors="ignore").splitlines())
        yield [line[:120] for line in lines if len(line) > 24 and " " in line]


def _translations(language: str) -> Iterator[list[str]]:
    for file in _readable(_files(_LOCALES / language).get("mo", ())):
        try:
            with open(file, "rb") as opened:
                catalog: Any = gettext.GNUTranslations(opened)
        except (OSError, UnicodeError):
            continue
        said = (re.findall(r"[^\W\d_]{2,}", str(text)) for text in catalog._catalog.values())
        yield [" ".join(words[at : at + 3]) for words in said for at in range(0, len(words) - 3, 3)]


def _sentences(library: str) -> Iterator[list[str]]:
    folders = (Path(p) / library for p in sys.path)
    for file in _readable(f for folder in folders for f in _files(folder).get("py", ())):
        try:
            tree = ast.parse(file.read_text(errors="ignore"))
        except (SyntaxError, ValueError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docs = (ast.get_docstring(n) or "" for n in ast.walk(tree) if isinstance(n, kinds))
        parts = (part for doc in docs for part in re.split(r"(?<=\.)\s|\n\n", doc))
        lines = (" ".join(part.split())[:160] for part in parts)
        yield [t for t in lines if len(t.split()) > 5 and library.lower() not in t.lower()]
