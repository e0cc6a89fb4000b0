"""YAML text to plain values with the line of every key: safe, limited, and without surprises.

PyYAML's composer is used, its tag constructors are not: duplicate keys are problems, and aliases
and `<<` cannot blow a small text up. `schema` knows what the keys mean.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from typing import Any

import yaml
from yaml.constructor import SafeConstructor
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from mergepipe_pipeline.recipe.problems import KeyPath, Lines, Problems, shown

MAX_NBYTES = 1 << 20
#: Nodes after aliases are followed: far above any recipe, far below what would take time.
MAX_NODES = 50_000
MAX_DEPTH = 24
#: Stages of one recipe.
MAX_DOCUMENTS = 64

_CORE = "tag:yaml.org,2002:"
#: The tag of the key `<<`.
_MERGE = f"{_CORE}merge"
_CONSTRUCTORS = {
    "null": SafeConstructor.construct_yaml_null,
    "bool": SafeConstructor.construct_yaml_bool,
    "int": SafeConstructor.construct_yaml_int,
    "float": SafeConstructor.construct_yaml_float,
}
#: How a number may be written: other forms (1:30, 0x10, 017, 1_000) mean one thing in YAML 1.1,
#: another in 1.2.
_DECIMAL = {
    "int": re.compile("[-+]?(0|[1-9][0-9]*)"),
    "float": re.compile(
        r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|[-+]?\.inf|\.nan", re.IGNORECASE
    ),
}
#: Dates and the odd `=` stay the text they are written as.
_TEXTS = {"str", "timestamp", "value", "merge"}


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML document as dict, list, str, int, float, bool and None; `lines` are 1-based.

    With problems, `value` holds what could be read in spite of them. `text` is the document's own,
    `line` where it begins.
    """

    value: object
    lines: Lines
    problems: Problems
    text: str
    line: int = 1


def read_yaml(text: str) -> Document:
    """Read one YAML document. Never raises: what is wrong is in the document's problems."""
    documents = read_documents(text)
    if len(documents) > 1:
        documents[0].problems.add(
            (),
            f"one document is wanted here, and the file has {len(documents)} documents; "
            "put each in its own file",
            documents[1].line,
        )
    return documents[0]


def read_documents(text: str) -> tuple[Document, ...]:
    """Read all documents of a file, at least one; lines count from the file's start.

    Never raises: what is wrong is in the documents' problems.
    """
    empty = Document(None, {}, Problems({}), text)
    nbytes = len(text.encode("utf-8", "surrogatepass"))
    if nbytes > MAX_NBYTES:
        empty.problems.add(
            (),
            f"a recipe may have {MAX_NBYTES} bytes, this one has {nbytes}; is it the right file?",
        )
        return (empty,)
    try:
        nodes = list(islice(yaml.compose_all(text, yaml.SafeLoader), MAX_DOCUMENTS + 1))
    # ValueError: PyYAML lets it through for escapes and directives out of range.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        _add_syntax(empty.problems, error)
        return (empty,)
    if not nodes:
        return (empty,)
    if len(nodes) > MAX_DOCUMENTS:
        empty.problems.add((), f"more than {MAX_DOCUMENTS} documents in one file")
        return (empty,)
    if len(nodes) == 1:
        return (_document(nodes[0], text),)
    return tuple(_document(n, text[n.start_mark.index : n.end_mark.index]) for n in nodes)


def said(text: str, without: Collection[str]) -> list[dict[str, Any]]:
    """What the documents of a file say, without some of their keys."""
    values = (document.value for document in read_documents(text))
    return [
        {k: v for k, v in value.items() if k not in without}
        for value in values
        if isinstance(value, dict)
    ]


def _document(node: Node, text: str) -> Document:
    lines: dict[KeyPath, int] = {}
    problems = Problems(lines)
    value = _Reader(lines, problems).read(node, ())
    return Document(value, lines, problems, text, node.start_mark.line + 1)


def _add_syntax(problems: Problems, error: Exception) -> None:
    if isinstance(error, RecursionError):
        problems.add((), "the YAML is nested too deeply")
        return
    mark = getattr(error, "problem_mark", None)
    message = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    hint = "; indent with blanks, not tabs" if "\\t" in message else ""
    problems.add((), f"not valid YAML: {message}{hint}", mark.line + 1 if mark else 0)


class _Reader:
    """Turns nodes into values, noting each key's line."""

    def __init__(self, lines: dict[KeyPath, int], problems: Problems) -> None:
        self._lines = lines
        self._problems = problems
        self._constructor = SafeConstructor()
        self._n_nodes = 0

    def read(self, node: Node, path: KeyPath) -> Any:
        if self._is_too_much(path, len(path)):
            return None
        kind = node.tag.removeprefix(_CORE)
        if isinstance(node, MappingNode) and kind == "map":
            return self._mapping(node, path)
        if isinstance(node, SequenceNode) and kind == "seq":
            return self._sequence(node, path)
        if isinstance(node, ScalarNode) and (kind in _TEXTS or kind in _CONSTRUCTORS):
            return self._scalar(node, kind, path)
        return self._refuse(
            node, path, f"the YAML tag {shown(node.tag)} is refused; write the plain value"
        )

    def _is_too_much(self, path: KeyPath, level: int) -> bool:
        """Count a node, and refuse it beyond the limits."""
        self._n_nodes += 1
        if self._n_nodes <= MAX_NODES and level <= MAX_DEPTH:
            return False
        # Said once: the text is the same for every node beyond the limit.
        self._problems.add(
            path[:1], f"more than {MAX_NODES} values or {MAX_DEPTH} levels; simplify it"
        )
        self._problems.close(path[:1])
        return True

    def _add(self, node: Node, path: KeyPath, text: str) -> None:
        self._problems.add(path, text, node.start_mark.line + 1)

    def _refuse(self, node: Node, path: KeyPath, text: str) -> None:
        self._add(node, path, text)
        self._problems.close(path)

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        value: dict[str, Any] = {}
        self._fill(value, node, path, 0)
        return value

    def _fill(self, value: dict[str, Any], node: MappingNode, path: KeyPath, level: int) -> None:
        """Read keys that are not there yet: a mapping's own, then those that `<<` takes over.

        `level`: through how many `<<` the mapping was reached.
        """
        own: set[str] = set()
        merged_nodes: list[Node] = []
        for key_node, value_node in node.value:
            key = key_node.value
            key_path = (*path, key)
            self._n_nodes += level > 0  # counts even if it is not taken over
            if key_node.tag == _MERGE and not merged_nodes:
                merged_nodes = (
                    value_node.value if isinstance(value_node, SequenceNode) else [value_node]
                )
            elif key_node.tag == _MERGE:
                self._add(key_node, path, "`<<` stands twice; give it a list of mappings")
            elif key_node.tag != f"{_CORE}str" or not isinstance(key, str):
                self._add(key_node, path, _bad_key(key_node))
            elif _has_surrogate(key):
                self._add(key_node, path, f"the key {shown(key)} is no Unicode text")
            elif key in own:
                self._add(
                    key_node,
                    key_path,
                    f"the key stands twice, first in line {self._lines[key_path]}",
                )
            elif key not in value:
                own.add(key)
                self._lines[key_path] = key_node.start_mark.line + 1
                value[key] = self.read(value_node, key_path)
            if self._n_nodes > MAX_NODES:
                return
        for merged in merged_nodes:
            if not isinstance(merged, MappingNode):
                self._add(merged, path, "`<<` takes a mapping or a list of mappings")
            elif not self._is_too_much(path, level + 1):
                self._fill(value, merged, path, level + 1)

    def _sequence(self, node: SequenceNode, path: KeyPath) -> list[Any]:
        value: list[Any] = []
        for i, item in enumerate(node.value):
            key_path = (*path, i)
            self._lines[key_path] = item.start_mark.line + 1
            value.append(self.read(item, key_path))
            if self._n_nodes > MAX_NODES:
                break
        return value

    def _scalar(self, node: ScalarNode, kind: str, path: KeyPath) -> Any:
        if _has_surrogate(node.value):
            return self._refuse(node, path, f"{shown(node.value)} is no Unicode text")
        if kind in _TEXTS:
            return node.value
        if kind in _DECIMAL and not _DECIMAL[kind].fullmatch(node.value):
            return self._refuse(
                node,
                path,
                f"{shown(node.value)} is a number to some readers of YAML and a text to others; "
                "write a number in decimal digits, a text in quotes",
            )
        try:
            value = _CONSTRUCTORS[kind](self._constructor, node)
        except (ValueError, LookupError, OverflowError):
            return self._refuse(node, path, f"expected a YAML {kind}, found {shown(node.value)}")
        if isinstance(value, int) and abs(value) >= 2**64:
            return self._refuse(
                node, path, f"the integer {shown(node.value)} needs more than 64 bits"
            )
        return value


def _bad_key(node: Node) -> str:
    if isinstance(node, ScalarNode):
        return f"the key {shown(node.value)} is not read as text; put it in quotes"
    return "a key must be text, not a list or a mapping"


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= c <= "\udfff" for c in text)
