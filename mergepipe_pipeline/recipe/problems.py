"""How a recipe's problems are collected and placed: line and key path first, then what is wrong.

Every reader of the recipe adds to one `Problems`, so that a user sees all of them at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from mergepipe_pipeline.errors import RecipeError
from mergepipe_pipeline.text import listed

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

KeyPath = tuple[str | int, ...]
Lines = Mapping[KeyPath, int]

_SHOWN_CHARS = 60


class Problems:
    """A growing list of sentences, given back in the order of the recipe's lines.

    In a lenient reading, what mergekit ignores is no problem: `ignored` has a sentence for each.
    """

    def __init__(self, lines: Lines, *, lenient: bool = False) -> None:
        self._lines = lines
        self.lenient = lenient
        self.ignored: list[str] = []
        self._entries: list[tuple[int, str, str]] = []
        self._of_tensors: dict[tuple[KeyPath, str], dict[str, None]] = {}
        self._closed: set[KeyPath] = set()

    def __len__(self) -> int:
        return len(self._entries) + len(self._of_tensors)

    def add(self, path: KeyPath, text: str, line: int | None = None) -> None:
        """Note that `text` is wrong at `path` (keys and list indices from the top).

        `line` is 1-based; None looks it up, 0 is unknown.
        """
        if any(path[:n] in self._closed for n in range(len(path) + 1)):
            return
        line = line_of(path, self._lines) if line is None else line
        self._entries.append((line, shown_place(path, line), text))

    def add_of(self, tensor: str, path: KeyPath, text: str) -> None:
        """Note that `text` is wrong at `path` for a tensor: of many the first is named."""
        self._of_tensors.setdefault((path, text), {})[tensor] = None

    def ignore(self, path: KeyPath, text: str) -> None:
        """Note what mergekit ignores: a problem, or a warning in a recipe read leniently."""
        if self.lenient:
            self.ignored.append(f"{shown_path(path)}: {text}: ignored")
        else:
            self.add(path, text)

    def close(self, path: KeyPath) -> None:
        """Take no more problems at or under `path`: they would follow from one that is noted."""
        self._closed.add(path)

    def placed(self) -> list[tuple[str, str]]:
        """Place and text of each problem, once, in the order of lines."""
        entries = list(self._entries)
        for (path, text), tensors in self._of_tensors.items():
            line = line_of(path, self._lines)
            entries.append((line, shown_place(path, line), f"{text}, tensor {listed(tensors, 1)}"))
        by_line = sorted(entries, key=lambda p: p[0])
        return list(dict.fromkeys((place, text) for _, place, text in by_line))

    def sentences(self) -> tuple[str, ...]:
        """Each problem as one sentence, its place before its text."""
        return tuple(f"{place}: {text}" if place else text for place, text in self.placed())


def recipe_error(problems: Iterable[Problems], where: str, kind: str = "recipe") -> RecipeError:
    """The error with all problems of a `kind` of file; `where` is its path.

    A single problem is the error's own cause.
    """
    several = list(problems)
    sentences = tuple(sentence for file in several for sentence in file.sentences())
    if len(sentences) == 1:
        ((place, text),) = (pair for file in several for pair in file.placed())
        return RecipeError(
            text,
            problems=sentences,
            where=f"{where}, {place}" if place else where,
            next_step="correct this; nothing was read or written",
        )
    return RecipeError(
        f"A {kind} cannot be used",
        problems=sentences,
        where=where,
        expected=f"a {kind} without problems",
        found=f"{len(sentences)} problems",
        next_step="correct all of these; nothing was read or written",
    )


def line_of(path: KeyPath, lines: Lines) -> int:
    """The 1-based line of a key path or of its nearest known parent, 0 if none is known."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 0)


def shown_place(path: KeyPath, line: int) -> str:
    """A line, if it is known, and a key path: `line 4, models[0].model`."""
    return ", ".join(p for p in (f"line {line}" if line else "", shown_path(path)) if p)


def shown_path(path: KeyPath) -> str:
    """A key path as users write it: `models[0].parameters.density`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def shown(value: object) -> str:
    """A value as it may stand in a message: its repr, cut to a line's length."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"


def suggest(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?` for the nearest known word in any case, else an empty text.

    Of several near ones, that of the same letters: fingers swap two more often than they miss one.
    """
    written, words = word[:_SHOWN_CHARS].lower(), {k.lower(): k for k in known}
    near = [k for k in words if sorted(k) == sorted(written)]
    near += difflib.get_close_matches(written, words, n=1)
    return f"; did you mean `{words[near[0]]}`?" if near else ""


def unknown_key(key: str, known: Collection[str], of: str = "") -> str:
    """The text for a key that is not `known`, with the nearest known key or with all."""
    near = suggest(str(key), known) or f"; known are {', '.join(known)}"
    return f"unknown key `{key}`{of}{near}"


def sentence_of(error: ErrorDetails, known_keys: Callable[[KeyPath], Collection[str]]) -> str:
    """The problem that pydantic reports; `known_keys` gives the keys allowed at a path."""
    path, value = tuple(error["loc"]), error["input"]
    if error["type"] == "extra_forbidden":
        return unknown_key(str(path[-1]), known_keys(path))
    if error["type"] == "missing":
        return "this key is required and missing"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return f"{error['msg'].replace('Input should be', 'expected')}, found {shown(value)}"
