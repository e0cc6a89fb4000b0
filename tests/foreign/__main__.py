"""Runs mergekit's own tests with our command in place of its merges.

`python -m tests.foreign mergekit-0.1.5.tar.gz`, the source release (`pip download mergekit==0.1.5
--no-deps --no-binary mergekit`). Exits with 1 where a test fails that is not in `EXPECTED`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.foreign.expected import EXPECTED

#: The files whose tests merge by mergekit's command or `run_merge`.
FILES = (
    "basic_merges",
    "chat_template",
    "tokenizer",
    "embedding_truncation",
    "merge_dtypes",
    "vocabulary_axis",
)
_HERE = Path(__file__).parent
_CONFTEST = """
import pytest
import mergekit.merge
from tests import common

mergekit.merge.run_merge = common.run_merge


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if call.when == "call" and item.nodeid in common.MERGING:
        print(f"@@ {report.outcome} {item.nodeid}")


@pytest.fixture(autouse=True)
def _merging(request):
    common.TEST[0] = request.node.nodeid
"""


def run(release: Path) -> dict[str, bool]:
    """Tests that merged, by name: whether they passed."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(release) as archive:
            archive.extractall(folder, filter="data")
        (source,) = Path(folder).glob("mergekit-*/tests")
        target = Path(folder) / "run" / "tests"
        target.mkdir(parents=True)
        for name in FILES:
            shutil.copy(source / f"test_{name}.py", target)
        (target / "__init__.py").touch()
        shutil.copy(_HERE / "common.py", target / "common.py")
        (target / "conftest.py").write_text(_CONFTEST)
        root = str(_HERE.parent.parent)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(target.parent), root))}
        command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "tests"]
        ended = subprocess.run(
            command, cwd=target.parent, env=env, capture_output=True, text=True, timeout=1500
        )
    lines = re.findall(r"@@ (passed|failed) tests/test_(\S+.*)", ended.stdout)
    if not lines:
        sys.exit(ended.stdout[-3000:] + ended.stderr[-3000:])
    if "-v" in sys.argv:
        print(ended.stdout[-20000:])
    return {name: outcome == "passed" for outcome, name in lines}


def main() -> None:
    """Print what failed, and whether it was expected."""
    found = run(Path(sys.argv[1]))
    failed = {name for name, passed in found.items() if not passed}
    for name in sorted(failed):
        print(f"{name}: {EXPECTED.get(name, 'UNEXPECTED')}")
    print(f"{len(found)} tests of mergekit merge here, {len(found) - len(failed)} pass")
    sys.exit(1 if failed ^ EXPECTED.keys() else 0)


if __name__ == "__main__":
    main()
