"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
import pickle
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from mergepipe_pipeline import errors
from mergepipe_pipeline.errors import MergePipeError

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    p
    for folder in ("mergepipe_pipeline", "assets", "sensors")
    for p in (ROOT / folder).rglob("*.py")
)
CLASSES = [
    c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, MergePipeError)
]


def test_each_error_class_has_its_own_exit_code() -> None:
    codes = [c.exit_code for c in CLASSES]
    assert len(codes) == len(set(codes))
    assert not set(codes) & {0, 1, 2}


@pytest.mark.parametrize("error_class", CLASSES)
def test_an_error_says_what_where_expected_found_and_next_and_survives_pickling(
    error_class: type[MergePipeError],
) -> None:
    error = error_class("It broke", where="here", expected="a", found="b", next_step="mend it")
    assert str(error) == "It broke. Where: here. Expected a, found b. Next: mend it."
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is error_class
    assert str(again) == str(error)


def test_no_module_outgrows_its_purpose() -> None:
    long = {
        str(p.relative_to(ROOT)): n for p in SOURCES if (n := len(p.read_text().splitlines())) > 500
    }
    assert long == {}


def test_every_function_can_be_seen_whole() -> None:
    long = {
        f"{path.relative_to(ROOT)}: {node.name}": lines
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > 50
    }
    assert long == {}


def test_only_one_module_renames_links_and_syncs() -> None:
    words = ("os.replace(", "os.rename(", "os.link(", "os.fsync(")
    offenders = [p.name for p in SOURCES if any(w in p.read_text() for w in words)]
    assert offenders == ["atomic.py"]


def test_pickles_are_read_in_one_place_which_runs_nothing_of_them() -> None:
    loads = {p.name: p.read_text().count("torch.load(") for p in SOURCES}
    assert {name: n for name, n in loads.items() if n} == {"unpickle.py": 1}
    script = ROOT / "mergepipe_pipeline/tools/unpickle.py"
    assert 'torch.load(path, map_location="cpu", weights_only=True' in script.read_text()


def test_nothing_else_that_comes_from_outside_is_ever_unpickled() -> None:
    words = ("pickle.load", "yaml.load(", "yaml.unsafe", "eval(")
    offenders = [
        f"{p.name}: {w}"
        for p in SOURCES
        for w in words
        if w in p.read_text().replace(".eval()", "").replace("_eval(", "")
    ]
    # Code of the package itself, as much as its modules: compiled kernels, and their types.
    assert sorted(offenders) == ["carried.py: pickle.load", "kernels.py: eval("]


def test_every_source_has_a_module_docstring_of_a_sentence() -> None:
    for path in SOURCES:
        assert path.read_text().startswith('"""'), path


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = grimp.build_graph("mergepipe_pipeline", exclude_type_checking_imports=True)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert list(TopologicalSorter(imports).static_order())  # raises CycleError and names the cycle
