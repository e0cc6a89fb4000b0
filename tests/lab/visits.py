"""Count through how many modules one parameter travels: `python -m tests.lab.visits`.

The walk reads source, it runs nothing. From a function it follows one parameter in the order of the
lines: a call that hands on the parameter, an attribute of it or a record made of it enters the
function called. Each entry into another module than the last one is a *stay*; a stay in a higher
room than the one before is a *climb*; a stay in a module that was entered before is a *return*. A
room is a folder of the package or a module at its top, one floor above the highest room that it
imports. A function is followed once. A method is found by its name where one class alone has it:
calls through protocols are not followed, nor are those of literals and of what other packages have.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

PACKAGE = "mergepipe_pipeline"
ROOT = Path(__file__).parents[2]
#: What the house promises: function, parameter, and the most stays, climbs and returns.
PROMISES = (
    ("execution.planning:make_plan", "warehouse", (45, 10, 25)),
    ("verbs.index:index_expert", "warehouse", (50, 12, 30)),
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Place:
    """A function or method of a module."""

    module: str
    name: str


@dataclass
class House:
    """The functions of all modules, what names mean in each, and each module's floor.

    `foreign` are the names in each module of what other packages have.
    """

    functions: dict[Place, Function] = field(default_factory=dict)
    methods: dict[str, list[Place]] = field(default_factory=lambda: defaultdict(list))
    imports: dict[str, dict[str, str]] = field(default_factory=dict)
    foreign: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    floors: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path) -> House:
        """Read all modules under the package."""
        house = cls()
        for path in sorted((root / PACKAGE).rglob("*.py")):
            dotted = ".".join(path.relative_to(root).with_suffix("").parts)
            house._add(dotted.removesuffix(".__init__"), ast.parse(path.read_text()))
        needs: dict[str, set[str]] = defaultdict(set)
        for module, names in house.imports.items():
            rooms = {_room(_module_of(target, house.imports)) for target in names.values()}
            needs[_room(module)] |= rooms - {_room(module), ""}

        @cache
        def floor(room: str) -> int:
            return 1 + max((floor(other) for other in needs[room]), default=0)

        house.floors = {module: floor(_room(module)) for module in house.imports}
        return house

    def _add(self, module: str, tree: ast.Module) -> None:
        names = self.imports.setdefault(module, {})
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                for alias in node.names:
                    names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Import | ast.ImportFrom):
                plain = (alias.asname or alias.name.partition(".")[0] for alias in node.names)
                self.foreign[module].update(plain)
        for node in tree.body:
            if isinstance(node, Function):
                self.functions[Place(module, node.name)] = node
                names.setdefault(node.name, f"{module}.{node.name}")
            elif isinstance(node, ast.ClassDef):
                names.setdefault(node.name, f"{module}.{node.name}")
                for inner in node.body:
                    if isinstance(inner, Function):
                        place = Place(module, f"{node.name}.{inner.name}")
                        self.functions[place] = inner
                        self.methods[inner.name].append(place)

    def called(self, module: str, call: ast.Call) -> Place | None:
        """The function that a call enters, or None where the source does not say."""
        func = call.func
        if isinstance(func, ast.Name):
            target = self.imports[module].get(func.id, "")
            owner, _, name = target.rpartition(".")
            for place in (Place(owner, name), Place(owner, f"{name}.__init__")):
                if place in self.functions:
                    return place
            return None
        if isinstance(func, ast.Attribute):
            receiver = func.value
            while isinstance(receiver, ast.Attribute):
                receiver = receiver.value
            if isinstance(receiver, ast.Constant | ast.JoinedStr):
                return None
            if isinstance(receiver, ast.Name) and receiver.id in self.foreign[module]:
                return None
            if isinstance(func.value, ast.Name):
                owner, _, name = self.imports[module].get(func.value.id, "").rpartition(".")
                for place in (
                    Place(f"{owner}.{name}", func.attr),
                    Place(owner, f"{name}.{func.attr}"),
                ):
                    if place in self.functions:
                        return place
            only = self.methods.get(func.attr, [])
            return only[0] if len(only) == 1 else None
        return None


def _room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def _module_of(target: str, modules: dict[str, dict[str, str]]) -> str:
    if target in modules:
        return target
    owner = target.rpartition(".")[0]
    return owner if owner in modules else ""


@dataclass
class Walk:
    """One trip of a parameter: the modules that it enters, one after another."""

    house: House
    stays: list[tuple[str, str]] = field(default_factory=list)
    _passed: set[Place] = field(default_factory=set)

    def follow(self, place: Place, carried: set[str]) -> None:
        """Enter a function with the parameters that carry what is followed."""
        if not self.stays or self.stays[-1][0] != place.module:
            self.stays.append((place.module, place.name))
        if place in self._passed:
            return
        self._passed.add(place)
        held = set(carried)
        for node in _in_order(self.house.functions[place].body):
            if isinstance(node, ast.Call):
                self._enter(place.module, node, held)
            else:
                held |= _bound(node, held)

    def _enter(self, module: str, call: ast.Call, held: set[str]) -> None:
        target = self.house.called(module, call)
        if target is None:
            return
        arguments = self.house.functions[target].args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        bound = set()
        if "." in target.name and names[:1] in (["self"], ["cls"]):
            if isinstance(call.func, ast.Attribute) and _mentions(call.func.value, held):
                bound.add(names[0])
            names = names[1:]
        bound |= {n for n, a in zip(names, call.args, strict=False) if _mentions(a, held)}
        bound |= {k.arg for k in call.keywords if k.arg and _mentions(k.value, held)}
        if bound:
            self.follow(target, bound)

    def climbs(self) -> int:
        """How often the trip goes to a higher floor."""
        floors = [self.house.floors[module] for module, _ in self.stays]
        return sum(after > before for before, after in pairwise(floors))

    def returns(self) -> int:
        """How often the trip comes to a module where it was before."""
        return len(self.stays) - len({module for module, _ in self.stays})


def _in_order(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Every call and binding of a body, inner ones first, as the program comes to them."""
    for statement in body:
        yield from _inner_first(statement)


def _inner_first(node: ast.AST) -> Iterator[ast.AST]:
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.For):  # each round begins with its target
        yield from _inner_first(node.iter)
        yield node
        children = [*node.body, *node.orelse]
    # What a comprehension runs over is written behind what it makes of it.
    for child in sorted(children, key=lambda c: not isinstance(c, ast.comprehension)):
        yield from _inner_first(child)
    if not isinstance(node, ast.For):
        yield node


def _bound(node: ast.AST, held: set[str]) -> set[str]:
    """The names that a statement binds to what is made of what is held."""
    match node:
        case ast.Assign(targets=targets, value=value):
            pass
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            targets = [target]
        case ast.NamedExpr(target=target, value=value):
            targets = [target]
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            targets = [target]
        case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
            targets = [target]
        case _:
            return set()
    if not _mentions(value, held):
        return set()
    return {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}


def _mentions(node: ast.AST, held: set[str]) -> bool:
    """Whether an expression is what is held, an attribute of it, or a record made of it."""
    match node:
        case ast.Name(id=name):
            return name in held
        case ast.Attribute(value=inner) | ast.Subscript(value=inner) | ast.Starred(value=inner):
            return _mentions(inner, held)
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.BoolOp(values=parts):
            return any(_mentions(part, held) for part in parts)
        case ast.IfExp(body=body, orelse=otherwise):
            return _mentions(body, held) or _mentions(otherwise, held)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name[0].isupper():
            return any(_mentions(a, held) for a in (*args, *(k.value for k in keywords)))
    return False


def walk(house: House, function: str, parameter: str) -> Walk:
    """Follow a parameter of `module:function`."""
    module, _, name = function.partition(":")
    trip = Walk(house)
    trip.follow(Place(f"{PACKAGE}.{module}", name), {parameter})
    return trip


def main(argv: list[str]) -> int:
    """Print the trips that the house promises, or one that is asked for."""
    parser = argparse.ArgumentParser("python -m tests.lab.visits", description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository to read")
    parser.add_argument("--each", action="store_true", help="print each stay")
    args = parser.parse_args(argv)
    house = House.read(args.root)
    kept = True
    for function, parameter, most in PROMISES:
        trip = walk(house, function, parameter)
        found = (len(trip.stays), trip.climbs(), trip.returns())
        kept &= all(a <= b for a, b in zip(found, most, strict=True))
        print(
            f"{function}({parameter}): {found[0]} stays, {found[1]} climbs, {found[2]} returns;"
            f" at most {most[0]}, {most[1]}, {most[2]}"
        )
        for module, name in trip.stays if args.each else ():
            print(f"  {house.floors[module]:>3} {module.removeprefix(PACKAGE)[1:]}: {name}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
