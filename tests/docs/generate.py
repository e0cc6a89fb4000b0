"""Writes what pages say of commands, exit codes, settings, rooms and measured merges.

    python -m tests.docs.generate

Each generated part stands between two comments of its page, by which it is found and replaced.
"""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from mergepipe_pipeline import errors
from mergepipe_pipeline.cli.main import main as group
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.settings import OF_A_RUN, SETTINGS
from tests.docs.page import DOCS, ROOT
from tests.lab.bench.report import report
from tests.lab.bench.rows import load

BENCH = ROOT / "tests" / "lab" / "bench"


def commands() -> str:
    """Every command with its arguments and the first sentence of its help."""
    rows = [
        f"- `{name}{_arguments(command)}`: {_line(_sentence(command))}"
        for name, command in sorted(group.commands.items())
    ]
    return "\n".join([*rows, ""])


def _arguments(command: click.Command) -> str:
    context = click.Context(command)
    pieces = [p for p in command.collect_usage_pieces(context) if p != "[OPTIONS]"]
    return "".join(f" {piece}" for piece in pieces)


def _sentence(command: click.Command) -> str:
    return inspect.cleandoc(command.help or "").partition("\n\n")[0]


def codes() -> str:
    """The exit code of each class of errors, with what it means."""
    classes = [
        c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, MergePipeError)
    ]
    rows = [
        f"- {c.exit_code} `{c.__name__}`: {(c.__doc__ or '').splitlines()[0]}"
        for c in sorted(classes, key=lambda c: c.exit_code)
    ]
    return "\n".join([*rows, ""])


def settings() -> str:
    """Every variable of the standing pipeline: the launchpad's field, unit, default and meaning."""
    rows = []
    for s in SETTINGS:
        field = f" [`{s.field}`]" if s in OF_A_RUN else ""
        rows.append(f"- `{s.variable}`{field} ({s.unit}, default {s.shown}): {s.meaning}")
    return "\n".join([*rows, ""])


def rooms() -> str:
    """The rooms by storeys, in the order that import-linter judges, with what each says it is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    (layers,) = (c["layers"] for c in contracts if c["name"].startswith("The house"))
    storeys, lines = iter(STOREYS.items()), ["| storey | room | what it is |", "|---|---|---|"]
    storey, lowest = next(storeys)
    for layer in layers:
        names = layer.split(" | ")
        lines += [f"| {storey} | {_room(name)} | {_cell(_told(name))} |" for name in names]
        if any(name.endswith(f".{lowest}") for name in names):
            storey, lowest = next(storeys, ("", ""))
    return "\n".join([*lines, ""])


def merges() -> str:
    """The merges that were measured last, from the rows that `make bench` adds to a file."""
    return report(load(BENCH / "recorded.jsonl")) + "\n"


def _room(name: str) -> str:
    path = ROOT.joinpath(*name.split("."))
    short = name.removeprefix("mergepipe_pipeline.")
    return f"`{short}/`" if path.is_dir() else f"`{short}.py`"


def _told(name: str) -> str:
    path = ROOT.joinpath(*name.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n\n")[0]


def _cell(text: str) -> str:
    return _line(text.replace("|", r"\|"))


def _line(text: str) -> str:
    return " ".join(text.split())


#: The storeys of the house, the uppermost first, each with its lowest room.
STOREYS = {
    "faces": "api",
    "verbs": "execution",
    "facts": "catalog",
    "storage": "storage",
    "domain": "secrets",
}

PARTS: Mapping[str, tuple[Path, Callable[[], str]]] = {
    "commands": (DOCS / "cli.md", commands),
    "codes": (DOCS / "errors.md", codes),
    "settings": (DOCS / "settings.md", settings),
    "rooms": (ROOT / "CONTRIBUTING.md", rooms),
    "merges": (DOCS / "benchmarks.md", merges),
}


def page(name: str) -> str:
    """The page of a part with the part as it is to be. Raises AssertionError without its place."""
    path, make = PARTS[name]
    place = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)
    text, found = place.subn(lambda m: f"{m[1]}\n{make()}\n{m[2]}", path.read_text())
    assert found == 1, f"{path} has no place for {name}"
    return text


if __name__ == "__main__":
    for name, (path, _) in PARTS.items():
        path.write_text(page(name))
