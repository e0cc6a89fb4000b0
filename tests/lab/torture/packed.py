"""Portable packs of which one thing is changed before all is sealed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random
from typing import Any

from mergepipe_pipeline.digest import SEAL_KEY, seal, sha256_hex, unseal
from tests.lab.torture.hostile import VALUES, places

Files = dict[str, bytes]
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


KINDS = ("sound", "claim", "chunks", "frames", "leftover", "beside", "list")
_CLAIM = "expert.json"


class Forger:
    """Changes one thing of a sound pack; `files` are by name, with the one that describes it."""

    def __init__(self, files: Files, draw: Random) -> None:
        self._files, self._draw = dict(files), draw
        self._claim = unseal(self._files.pop(_CLAIM), "")

    def files(self, kind: str) -> tuple[str, Files]:
        """The name of a folder and the files of a pack of which that kind of thing is wrong."""
        draw, claim = self._draw, self._claim
        if kind == "claim":
            odd_leaf(draw, claim)
        elif kind == "list":
            odd_leaf(draw, claim["files"])
        elif kind == "beside":
            name = draw.choice(
                ("beside/x.py", "beside/../x", "beside/a/b", "beside/e0.safetensors")
            )
            self._put(name, draw.randbytes(draw.randint(0, 40)))
            claim["files"].append({"name": name, "nbytes": 0, "sha256": ""})
        elif kind != "sound":
            names = [n for n, data in self._files.items() if kind in n and data]
            name = draw.choice(names)
            changed = bytearray(self._files[name])
            at = draw.choice((0, draw.randrange(len(changed)), len(changed) - 1))
            if draw.random() < 0.3:
                changed = changed[:at]
            else:
                changed[at : at + 4] = draw.randbytes(4)
            self._put(name, bytes(changed))
        if kind not in ("claim", "list"):
            for row in claim["files"]:
                data = self._files[row["name"]]
                row |= {"nbytes": len(data), "sha256": sha256_hex(data)}
        return "f" * 64, {**self._files, _CLAIM: sealed(claim)}

    def _put(self, name: str, data: bytes) -> None:
        """Change a file, and what its weight file says of it if it is a leftover."""
        self._files[name] = data
        if name.endswith(".leftover"):
            self._claim["expert"]["files"][0]["leftover_sha256"] = sha256_hex(data)


def each(draw: Callable[[], int], count: int) -> Iterator[tuple[str, int]]:
    """Kinds in turn with a drawn number each."""
    for number in range(count):
        yield KINDS[number % len(KINDS)], draw()
