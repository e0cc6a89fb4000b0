"""A page of Markdown whose code blocks are run, and the outputs it shows compared with real ones.

A block of YAML or Python with a file's name behind that is written there. Each line of a block of
`sh` that begins with `mergepipe` is run. A block of `text` after it shows output: each of its lines
comes out in this order, with other lines between them where the page has a line of `…`. What
differs from run to run (seconds, ids, free space, folders) is not compared.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_BLOCK = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_VARIES = (
    (r"\b\d+(\.\d+)? s\b", "S s"),
    (r"\(.{1,12} free\)", "(FREE)"),
    (r"(?<![\w.])/\S*/", "/"),
)
Commands = Callable[[str], str]


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the word behind that, and its text."""

    language: str
    title: str
    text: str


def blocks(path: Path) -> list[Block]:
    """The blocks of a page that name a language, in order."""
    return [Block(*found) for found in _BLOCK.findall(path.read_text())]


def mergepipe(line: str) -> str:
    """Run one command line in this process; what it printed. Raises AssertionError if it fails."""
    words = shlex.split(line, comments=True)
    result = CliRunner().invoke(main, words[1:])
    assert result.exit_code == 0, f"{line}\n{result.output}"
    return result.output


def run_page(path: Path, run: Commands = mergepipe) -> None:
    """Run a page in the working directory. Raises AssertionError where it is not as it says."""
    output = ""
    for block in blocks(path):
        if block.language in {"yaml", "python"} and block.title:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.text)
        elif block.language == "sh" and is_run(block):
            output = "".join(map(run, block.text.splitlines()))
        elif block.language == "text":
            missing = list(unlike(block.text, output))
            assert not missing, f"{path.name} shows {missing}, the commands print\n{output}"


def is_run(block: Block) -> bool:
    """Whether a block consists of lines that `mergepipe` runs."""
    return all(line.startswith("mergepipe ") for line in block.text.splitlines())


def unlike(shown: str, output: str) -> Iterator[str]:
    """Lines of `shown` that do not come in `output`, after those before them."""
    printed = iter(_common(output).splitlines())
    exact = True
    for line in _common(shown).splitlines():
        if line == "…":
            exact = False
            continue
        if line not in ([next(printed, "")] if exact else printed):
            yield line
            return
        exact = True


def _common(text: str) -> str:
    """The text with what differs from run to run replaced."""
    for pattern, word in _VARIES:
        text = re.sub(pattern, word, text.replace(os.getcwd(), ""))
    return "\n".join(line.rstrip() for line in text.strip().splitlines())
