"""Reads a pickle as data that does nothing: names in it are compared with a list, none is imported.

A machine of its own for the few opcodes that torch's files need. It knows no callable: what a
pickle would call becomes a `Thing`, which says what was to be called with what.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Collection
from typing import Any

from mergepipe_pipeline.errors import CheckpointError

#: Steps of one pickle: eight million objects are less than a gigabyte, and far more than needed.
_MOST_STEPS = 1 << 23
#: The kind of what a file has outside its pickle, as tensors have their storages.
OUTSIDE = "outside"
_ORDERED = "collections.OrderedDict"


class Thing:
    """An object as a pickle describes it: of what `kind`, made from what, with what `state`.

    `args` is None for a class or function itself.
    """

    __slots__ = ("args", "kind", "state")

    def __init__(self, kind: str, args: Any = None) -> None:
        self.kind, self.args = kind, args
        self.state: Any = None


def read_pickle(data: bytes, known: Collection[str], where: str) -> object:
    """The object that a pickle describes, whose names are all `known` (`module.name`).

    Raises CheckpointError for another name, and for what is damaged or too large.
    """
    try:
        return _Machine(data, known).run()
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        said = str(error) if isinstance(error, _RefusedError) else "a pickle that is damaged"
        raise CheckpointError(
            "A pickle is not one that torch writes for a checkpoint; nothing of it was run",
            where=where,
            expected="tables of tensors, files and places alone",
            found=said[:200],
            next_step="do not load it with torch before you know who made it; a damaged file: "
            "copy it again",
        ) from error


class _RefusedError(ValueError):
    """What a pickle holds that is not read."""


class _Machine:
    def __init__(self, data: bytes, known: Collection[str]) -> None:
        self._data, self._known, self._at = data, known, 0
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> object:
        for _ in range(_MOST_STEPS):
            code = self.take(1)
            if code == pickle.STOP:
                return self._stack.pop()
            step = _STEPS.get(code)
            if step is None:
                raise _RefusedError(f"the opcode {code!r} at byte {self._at - 1}")
            step(self)
        raise _RefusedError(f"more than {_MOST_STEPS} steps")

    def take(self, nbytes: int) -> bytes:
        piece = self._data[self._at : self._at + nbytes]
        if len(piece) < nbytes:
            raise _RefusedError(f"an end at byte {len(self._data)}, inside of something")
        self._at += nbytes
        return piece

    def number(self, nbytes: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(nbytes), "little", signed=signed)

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def text(self, length_nbytes: int) -> None:
        self.push(self.take(self.number(length_nbytes)).decode())

    def mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def marked(self) -> list[Any]:
        """All since the last mark."""
        items, self._stack = self._stack, self._marks.pop()
        return items

    def tuple_of(self, n: int) -> None:
        if len(self._stack) < n:
            raise IndexError
        self._stack[-n:] = [tuple(self._stack[-n:])]

    def append(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise TypeError
        self._stack[-1].extend(items)

    def set(self, items: list[Any]) -> None:
        """Put keys and values into a dict; tuples, which may take long to hash, are no keys."""
        target = self._stack[-1]
        keys, values = items[::2], items[1::2]
        if type(target) is not dict or not all(type(k) in (str, int, Thing) for k in keys):
            raise TypeError
        target.update(zip(keys, values, strict=True))

    def name(self, module: object, name: object) -> None:
        kind = f"{module}.{name}" if type(module) is type(name) is str else "no text"
        if kind not in self._known:
            raise _RefusedError(f"the name {kind[:120]!r}")
        self.push(Thing(kind))

    def line(self) -> str:
        stop = self._data.index(b"\n", self._at)
        return self.take(stop + 1 - self._at)[:-1].decode()

    def make(self) -> None:
        args, made = self._stack.pop(), self._stack.pop()
        if type(args) is not tuple or type(made) is not Thing or made.args is not None:
            raise TypeError
        self.push({} if made.kind == _ORDERED and not args else Thing(made.kind, args))

    def build(self) -> None:
        state, thing = self._stack.pop(), self._stack[-1]
        if type(thing) is not Thing or thing.args is None or thing.state is not None:
            raise TypeError
        thing.state = state

    def remember(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def memoize(self) -> None:
        self.remember(len(self._memo))

    def recall(self, number: int) -> None:
        self.push(self._memo[number])

    def pops(self, n: int) -> list[Any]:
        if len(self._stack) < n:
            raise IndexError
        items, self._stack[-n:] = self._stack[-n:], []
        return items


_STEPS: dict[bytes, Callable[[_Machine], object]] = {
    pickle.PROTO: lambda m: m.take(1),
    pickle.FRAME: lambda m: m.take(8),
    pickle.NONE: lambda m: m.push(None),
    pickle.NEWTRUE: lambda m: m.push(True),
    pickle.NEWFALSE: lambda m: m.push(False),
    pickle.EMPTY_TUPLE: lambda m: m.push(()),
    pickle.EMPTY_LIST: lambda m: m.push([]),
    pickle.EMPTY_DICT: lambda m: m.push({}),
    pickle.BININT: lambda m: m.push(m.number(4, signed=True)),
    pickle.BININT1: lambda m: m.push(m.number(1)),
    pickle.BININT2: lambda m: m.push(m.number(2)),
    pickle.LONG1: lambda m: m.push(m.number(m.number(1), signed=True)),
    pickle.BINFLOAT: lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    pickle.SHORT_BINUNICODE: lambda m: m.text(1),
    pickle.BINUNICODE: lambda m: m.text(4),
    pickle.SHORT_BINBYTES: lambda m: m.push(m.take(m.number(1))),
    pickle.BINBYTES: lambda m: m.push(m.take(m.number(4))),
    pickle.MARK: _Machine.mark,
    pickle.TUPLE: lambda m: m.push(tuple(m.marked())),
    pickle.TUPLE1: lambda m: m.tuple_of(1),
    pickle.TUPLE2: lambda m: m.tuple_of(2),
    pickle.TUPLE3: lambda m: m.tuple_of(3),
    pickle.APPEND: lambda m: m.append(m.pops(1)),
    pickle.APPENDS: lambda m: m.append(m.marked()),
    pickle.SETITEM: lambda m: m.set(m.pops(2)),
    pickle.SETITEMS: lambda m: m.set(m.marked()),
    pickle.GLOBAL: lambda m: m.name(m.line(), m.line()),
    pickle.STACK_GLOBAL: lambda m: m.name(*m.pops(2)),
    pickle.REDUCE: _Machine.make,
    pickle.NEWOBJ: _Machine.make,
    pickle.BUILD: _Machine.build,
    pickle.BINPERSID: lambda m: m.push(Thing(OUTSIDE, m.pops(1)[0])),
    pickle.MEMOIZE: _Machine.memoize,
    pickle.BINPUT: lambda m: m.remember(m.number(1)),
    pickle.LONG_BINPUT: lambda m: m.remember(m.number(4)),
    pickle.BINGET: lambda m: m.recall(m.number(1)),
    pickle.LONG_BINGET: lambda m: m.recall(m.number(4)),
}
