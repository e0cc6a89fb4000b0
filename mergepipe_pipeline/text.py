"""Text from outside as it may be shown: harmless in a terminal, in JSON and in Markdown.

Names, reasons and messages may hold what steers a terminal, turns the order of letters around, or
is half of a character (a file name that is not UTF-8).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from mergepipe_pipeline.secrets import discreet

#: Controls (C0 but the newline, DEL, C1), marks and overrides of direction, other ends of lines,
#: halves of characters.
_UNSAFE = re.compile(
    "[\0-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
#: An underscore between letters or digits means nothing to Markdown, and names are full of those.
_MARKDOWN = re.compile(
    r"([\\`|*\[\]<>&~]|(?<![^\W_])_|_(?![^\W_])|(?<=:)//|(?<=www)\.)", re.IGNORECASE
)


def visible(text: str) -> str:
    """Text for a terminal: what steers it is escaped, and lines after the first are indented.

    So no name can look like a line of its own.
    """
    return re.sub(r"\n(?! )", "\n  ", _UNSAFE.sub(_escape, discreet(text)))


def in_one_line(text: str) -> str:
    """Text for a cell of a table: `visible`, with newlines escaped too."""
    return _UNSAFE.sub(_escape, discreet(text)).replace("\n", "\\n")


def whole_number(text: str, most: int) -> int | None:
    """The whole number that a text from outside is; None for another text, or above `most`."""
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most))):
        return None
    return number if (number := int(text)) <= most else None


def size(nbytes: float | None) -> str:
    """Bytes for people: 1.2 GiB."""
    if nbytes is None:
        return "unlimited"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"


def byte_unit(most: float) -> tuple[str, int]:
    """The unit in which figures of at most so many bytes are shown together, and its bytes."""
    units = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
    return next(((name, nbytes) for name, nbytes in units if most >= nbytes), ("B", 1))


def percent(share: float | None) -> str:
    """A share for people: 12.5 %, or `-` where there is none."""
    return "-" if share is None else f"{100 * share:.1f} %"


def four_digits(value: float | None) -> str:
    """A figure for people, to four digits, or `-` where there is none."""
    return "-" if value is None else f"{value:.4g}"


def json_text(data: Any) -> str:
    """JSON for machines: NaN and infinity are null, half characters are escaped, what JSON does not
    know is its text.
    """
    text = json.dumps(plain(data), indent=2, ensure_ascii=False, allow_nan=False, default=str)
    return _UNSAFE.sub(lambda m: f"\\u{ord(m[0]):04x}", text)


def markdown(text: str) -> str:
    """Text as Markdown shows it letter by letter, in a cell of a table too."""
    return _MARKDOWN.sub(r"\\\1", in_one_line(text))


def plain_of_markdown(text: str) -> str:
    """Text that `markdown` made, as it was before but for what steers a terminal."""
    return re.sub(r"\\([\\`|*\[\]<>&~_/.])", r"\1", text)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def plain(data: Any) -> Any:
    """Data as JSON has it: NaN and infinity are None, arrays and tuples are lists."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    return plain(data.tolist()) if hasattr(data, "tolist") else data


def listed(words: Collection[str], most: int, more: str = "more") -> str:
    """The first words, and how many more there are: `a, b and 3 more`."""
    shown = ", ".join(islice(words, most))
    return shown if len(words) <= most else f"{shown} and {len(words) - most} {more}"


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def escaped(text: str) -> str:
    """Text that can be printed though it has a name that is not UTF-8."""
    return text.encode(errors="backslashreplace").decode()
