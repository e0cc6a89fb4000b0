"""What is imported is declared, and what is declared is imported."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = "mergepipe_pipeline"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_HOMES = packages_distributions()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(requirements: Iterable[str]) -> set[str]:
    """The distributions that requirements name."""
    return {_normal(re.split(r"[^\w.-]", text, maxsplit=1)[0]) for text in requirements}


def imported(files: Iterable[Path]) -> set[str]:
    """The distributions of others that files import from, also inside functions."""
    found = set[str]()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    packages = {name.partition(".")[0] for name in found} - {
        OURS,
        "tests",
        *sys.stdlib_module_names,
    }
    return {_normal(_HOMES.get(package, [package])[0]) for package in packages}


EVERYWHERE = {f for name in (OURS, "assets", "sensors") for f in (ROOT / name).rglob("*.py")}
DEMO = {file for file in EVERYWHERE if (ROOT / "mergepipe_pipeline/demo") in file.parents}
# These name the extra, too.
DEMO |= {
    ROOT / "mergepipe_pipeline" / file for file in ("quality/builtin.py", "tools/moe_gates.py")
}
CORE = declared(PROJECT["dependencies"])
EXTRAS = {name: declared(texts) for name, texts in PROJECT["optional-dependencies"].items()}


def test_what_the_product_imports_is_a_dependency_and_each_dependency_is_imported() -> None:
    assert imported(EVERYWHERE - DEMO) == CORE.union(
        *(EXTRAS[name] for name in ("gguf", "remote", "search"))
    )


def test_what_demo_and_evaluators_import_is_a_dependency_or_in_an_extra() -> None:
    assert imported(DEMO) - CORE == EXTRAS["demo"] | EXTRAS["lm-eval"]


def test_what_tests_import_is_a_dependency_or_in_an_extra() -> None:
    assert imported((ROOT / "tests").rglob("*.py")) <= CORE.union(*EXTRAS.values())


def test_a_wheel_is_built_with_the_numba_that_an_installation_gets() -> None:
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    pins = [text.partition(";")[0] for text in required if text.startswith("numba")]
    assert pins == re.findall(r"^numba==.*", (ROOT / "constraints.txt").read_text(), re.M)
