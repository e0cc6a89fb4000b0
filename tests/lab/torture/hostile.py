"""Folders and recipes made to do harm: refused with a named error, or taken and right."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.hostile.corpus import CORPUS
from tests.lab.torture import child, judge
from tests.lab.torture.tally import Outcome, Problem
from tests.lab.torture.world import recipes
from tests.recipe.test_fuzz import TRAPS

_SHORT, _LONG = 8, 1000
#: Seconds after which an answer about a tiny model is a hang.
_HANGS_S = 10.0
_EXAMPLES = sorted((Path(__file__).parents[2] / "recipes" / "valid").glob("*.yml"))
# fmt: off
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 0.5, float("nan"), float("inf"), "",
    "a", "\ud800", "\x1b[31m", "../../x", "/dev/zero", "F32", "BF16", "I64", "x" * 5000, [], {},
    [[]], [0], [-1, 4], [2**62, 2**62], {"a": {}}, "0", "💥", "__metadata__",
)
_TEXTS = (
    *TRAPS, "true", "1:30", "0x10", "1e400", ".nan", "-.inf", "9" * 5000, "[", "{", "*a", "!!x",
    "null", "~", "2020-01-01", "[1, 2", "{a: b}", "a+b", "x@1", "\u202e", "''", "1_000", "0o17",
    "[[[[[[[[", "error=2%", "-5GiB", "10%", "none", "first", "linear", "slerp", "passthrough",
    "0.5", "0.25", "1.5", "1", "base", "false", "bfloat16", "float32", "ties", "[0.1, 0.9]",
)
# fmt: on


@dataclass(frozen=True)
class Try:
    """One input: `kind` of it, and the number of its place in the corpus or of its draw."""

    kind: str
    number: int

    def __str__(self) -> str:
        name = f" ({CORPUS[self.number][0]})" if self.kind == "corpus" else ""
        return f"hostile {self.kind} {self.number}{name}"


class Hostile:
    """The campaign: the corpus of the repository, and mutations of what is sound."""

    def __init__(self, world: Path, folder: Path, *, short: bool) -> None:
        self._world, self._short = world, short

    def tries(self, seed: int) -> Iterator[Try]:
        """The corpus, then drawn mutations of each kind in turn."""
        draw = Random(seed)
        kept = draw.sample(range(len(CORPUS)), 4) if self._short else range(len(CORPUS))
        yield from (Try("corpus", number) for number in kept)
        kinds = sorted(_MUTATIONS)
        for number in range(_SHORT if self._short else _LONG):
            yield Try(kinds[number % len(kinds)], draw.randrange(1 << 40))

    def judge(self, one: Try, folder: Path) -> Outcome:
        """Give it to every verb that takes one; what is refused leaves nothing published."""
        draw, model = Random(one.number), folder / "model"
        recipe = folder / "r.yml"
        recipe.write_text(_over(self._world / "base", model))
        if one.kind == "corpus":
            CORPUS[one.number][1](model)
        elif one.kind == "recipe":
            recipe.write_bytes(_mutated_recipe(draw, self._world))
        else:
            source = self._world / ("adapter" if "adapter" in one.kind else "expert_01")
            shutil.copytree(source, model)
            _MUTATIONS[one.kind](draw, model)
        problems, place = [], folder / "place"
        verbs: list[list[str]] = [["check", str(recipe)], ["merge", str(recipe), "--publish"]]
        if one.kind != "recipe":
            verbs.insert(0, ["register", str(model)])
        codes = []
        for args in verbs:
            done = child.run([*args, "--home", str(place / "w")], folder / "logs", hangs_s=_HANGS_S)
            problems += judge.ending(done, f"{one}, {args[0]}")
            codes.append(done.code)
        now, damage = judge.read(place, str(one))
        problems += damage
        if one.kind == "corpus" and 0 in (codes[0], codes[-1]):
            problems.append(Problem("wrong", str(one), f"accepted: {codes}"))
        if codes[-1] and (now.refs or now.snapshots):
            problems.append(Problem("wrong", str(one), f"refused, but {now.refs} is there"))
        if one.kind == "header" and codes[0] == 0 and not child.call(_library_takes, model):
            problems.append(Problem("wrong", str(one), "the safetensors library refuses it"))
        kind = "corpus" if one.kind == "corpus" else f"{one.kind}, {_told(codes[-1])}"
        return Outcome.of(kind, problems)


def _told(code: int) -> str:
    return "refused" if code else "taken"


def _over(base: Path, model: Path) -> str:
    return (
        f"merge_method: task_arithmetic\nbase_model: {base}\nmodels:\n"
        f"  - model: {model}\n    parameters: {{weight: 1.0}}\ndtype: bfloat16\n"
    )


def _library_takes(model: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        for path in model.glob("*.safetensors"):
            with safe_open(path, "np") as file:
                file.keys()
    except SafetensorError:
        return False
    return True


def _mutated_recipe(draw: Random, world: Path) -> bytes:
    """A sound recipe with one to three of its lines or values changed."""
    ours = list(recipes(world).values())
    text = draw.choice(ours) if draw.random() < 0.8 else draw.choice(_EXAMPLES).read_text()
    for _ in range(draw.choice((1, 1, 2, 3))):
        lines = text.split("\n")
        at = draw.randrange(len(lines))
        line, odd = lines[at], draw.choice(_TEXTS)
        key, colon, _ = line.partition(": ")
        lines[at] = draw.choice(
            (f"{key}{colon}{odd}", odd, "", f"{line}\n{line}", f"  {line}", line.replace(":", ""))
        )
        if draw.random() < 0.1:
            lines[at] = line[: draw.randrange(len(line) + 1)] + odd
        text = "\n".join(lines)
    return text.encode("utf-8", "surrogatepass")


def _mutated_json(draw: Random, value: Any) -> str:
    """One or two values or keys of a JSON value changed, as text that need not be JSON."""
    value = copy.deepcopy(value)
    for _ in range(draw.randint(1, 2)):
        holder, key = draw.choice(list(places(value)) or [({"": value}, "")])
        odd = copy.deepcopy(draw.choice(VALUES))
        how = draw.random()
        with contextlib.suppress(TypeError):
            if how < 0.7:
                holder[key] = odd
            elif how < 0.85:
                del holder[key]
            else:
                holder[str(odd)] = copy.deepcopy(holder[key])
    text = json.dumps(value)
    if draw.random() < 0.15:
        at = draw.randrange(len(text))
        text = (
            text[:at] + draw.choice(("", "{", '"', "[" * 3000, "\\", "NaN", ",")) + text[at + 1 :]
        )
    return text


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


def _header(draw: Random, model: Path) -> None:
    path = draw.choice(sorted(model.glob("*.safetensors")))
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    text = _mutated_json(draw, json.loads(data[8:end])).encode()
    length = len(text)
    if draw.random() < 0.15:
        length = draw.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1))
    path.write_bytes(length.to_bytes(8, "little") + text + data[end:])


def _json_file(*names: str) -> Callable[[Random, Path], None]:
    def mutate(draw: Random, model: Path) -> None:
        path = model / draw.choice(names)
        path.write_text(_mutated_json(draw, json.loads(path.read_text())))

    return mutate


def _bytes(draw: Random, model: Path) -> None:
    """Any file cut off, made longer, or with a run of bytes replaced."""
    path = draw.choice(sorted(model.iterdir()))
    data = bytearray(path.read_bytes())
    at = draw.randrange(len(data))
    how = draw.randrange(3)
    if how == 0:
        del data[at:]
    elif how == 1:
        data += draw.randbytes(draw.randint(1, 100))
    else:
        data[at : at + 16] = draw.randbytes(16)
    path.write_bytes(data)


_MUTATIONS: dict[str, Callable[[Random, Path], None]] = {
    "recipe": lambda draw, model: None,
    "header": _header,
    "header of an adapter": _header,
    "index": _json_file("model.safetensors.index.json"),
    "config": _json_file("config.json"),
    "config of an adapter": _json_file("adapter_config.json"),
    "side file": _json_file("tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    "bytes": _bytes,
}
