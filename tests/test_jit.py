"""Compiled kernels are never older than what they are compiled from."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite.binding import get_host_cpu_features

import mergepipe_pipeline
from mergepipe_pipeline import jit
from mergepipe_pipeline.demo.kernels import SIGNATURES

PACKAGE = Path(mergepipe_pipeline.__file__).parent
NARROW = "checkpoints.codes.round_to_bfloat16"
#: Random numbers, of a kernel and as NumPy has them from the same function of another module.
NUMBERS = """
import numpy as np
from mergepipe_pipeline.operators.kernels.splitmix import GAMMA, mixed
from mergepipe_pipeline.operators.kernels.uniforms import fill_uniforms

compiled, states = np.empty(8, np.uint32), np.arange(1, 5, dtype=np.uint64) * GAMMA
fill_uniforms(np.uint64(0), 0, compiled)
print(compiled.tolist() == mixed(states).view(np.uint32).tolist(), compiled.tolist())
"""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with a copy of the package, without what was compiled of it."""
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "mergepipe_pipeline", ignore=skip)
    return tmp_path


def numbers(folder: Path, **environment: str) -> tuple[bool, str]:
    """Whether the kernel's numbers are those of NumPy, and the kernel's."""
    environment = {**os.environ, "PYTHONPATH": str(folder), **environment}
    command = [sys.executable, "-c", NUMBERS]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder, check=True
    )
    alike, _, text = done.stdout.partition(" ")
    return alike == "True", text


def test_a_kernel_is_compiled_anew_when_a_file_that_it_imports_has_changed(copied: Path) -> None:
    before = numbers(copied)
    path = copied / "mergepipe_pipeline/operators/kernels/splitmix.py"
    path.write_text(path.read_text().replace("0xBF58476D1CE4E5B9", "0xBF58476D1CE4E5BB"))
    after = numbers(copied)
    assert before[0]
    assert after[0]
    assert before[1] != after[1]


def test_what_was_compiled_is_found_again_also_in_a_folder_that_the_user_names(
    copied: Path, tmp_path: Path
) -> None:
    for environment in ({}, {"NUMBA_CACHE_DIR": str(tmp_path / "named")}):
        numbers(copied, **environment)
        kept = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.nb[ic]")}
        assert kept
        numbers(copied, **environment)
        assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.nb[ic]")} == kept
    assert any(p.is_relative_to(tmp_path / "named") for p in kept)


def read_only(package: Path, command: list[str]) -> list[str]:
    """A command that finds a package on a mount that is read-only, which it alone sees."""
    mounts = f"mount --bind {package} {package} && mount -o remount,bind,ro {package}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mounts], capture_output=True).returncode:
        pytest.skip("this user may not mount here")
    return ["unshare", "-rm", "sh", "-c", f'{mounts} && exec "$@"', "sh", *command]


def compiled_by(root: Path, code: str, home: Path, *, is_read_only: bool) -> tuple[int, int]:
    """How many kernels a process loads, and how many it compiles."""
    command = [sys.executable, *code.split(maxsplit=1)]
    if is_read_only:
        command = read_only(root / "mergepipe_pipeline", command)
    own = {"PYTHONPATH": str(root), "XDG_CACHE_HOME": str(home), "NUMBA_DEBUG_CACHE": "1"}
    env = {k: v for k, v in os.environ.items() if k not in ("NUMBA_CACHE_DIR", "MERGEPIPE_HOME")}
    done = subprocess.run(
        command, capture_output=True, text=True, env={**env, **own}, cwd=root, check=True
    )
    return done.stdout.count("data loaded from"), done.stdout.count("data saved to")


@pytest.mark.parametrize("place", ["users", "/proc/none"])
def test_what_was_compiled_beside_a_package_is_found_where_the_package_is_read_only(
    copied: Path, tmp_path: Path, place: str
) -> None:
    home, code = tmp_path / place, f"-c {NUMBERS}"
    assert compiled_by(copied, code, home, is_read_only=False)[1] > 0
    loaded, compiled = compiled_by(copied, code, home, is_read_only=True)
    assert (loaded > 0, compiled) == (True, 0)


def test_what_is_compiled_for_this_processor_is_preferred_to_what_is_carried(copied: Path) -> None:
    package = copied / "mergepipe_pipeline"
    shutil.rmtree(package / "compiled", ignore_errors=True)
    lines = [x for x in SIGNATURES.read_text().splitlines() if x.startswith(NARROW)]
    (package / "demo/signatures.txt").write_text("\n".join(lines))
    code = (
        f"from mergepipe_pipeline.{NARROW.rpartition('.')[0]} import round_to_bfloat16; "
        "import numpy as np; round_to_bfloat16(np.ones(9, np.uint32), np.ones(9, np.uint16))"
    )
    env = {**os.environ, "PYTHONPATH": str(copied), "NUMBA_DEBUG_CACHE": "1"}
    for compiles, place in ((["--carried"], "compiled"), ([], "__pycache__")):
        compiled = [sys.executable, "-m", "mergepipe_pipeline.demo.kernels", *compiles]
        subprocess.run(compiled, check=True, cwd=copied, env=env, capture_output=True)
        ran = [sys.executable, "-c", code]
        done = subprocess.run(ran, check=True, cwd=copied, env=env, capture_output=True, text=True)
        assert re.findall(f"data loaded from '{package}/(\\w+)/", done.stdout) == [place]


def test_a_kernel_is_taken_of_the_best_kind_that_the_processor_is_of(copied: Path) -> None:
    package, kernel = copied / "mergepipe_pipeline", "operators.kernels.bits.subtract"
    shutil.rmtree(package / "compiled", ignore_errors=True)
    lines = [x for x in SIGNATURES.read_text().splitlines() if x.startswith(kernel)]
    (package / "demo/signatures.txt").write_text("\n".join(lines))
    code = (
        "import numpy as np; from mergepipe_pipeline.operators.kernels.bits import subtract; "
        "a = np.ones(9, np.uint16); subtract(a, a, np.ones(9, np.float32))"
    )
    compiles = [sys.executable, "-m", "mergepipe_pipeline.demo.kernels", "--carried"]
    env = {**os.environ, "PYTHONPATH": str(copied), "NUMBA_DEBUG_CACHE": "1"}
    subprocess.run(compiles, check=True, cwd=copied, env=env, capture_output=True)
    host = {name for name, has in get_host_cpu_features().items() if has}
    for kind, features in jit.KINDS.items():
        if host >= set(features.split()):
            env["NUMBA_CPU_FEATURES"] = ",".join(f"+{feature}" for feature in features.split())
            ran = [sys.executable, "-c", code]
            done = subprocess.run(ran, cwd=copied, env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            loaded = re.findall(f"data loaded from '{package}/compiled/.*/(.*)/", done.stdout)
            assert loaded == [kind]


def test_every_cached_kernel_lies_where_its_freshness_is_looked_after() -> None:
    with_cache = {p for p in PACKAGE.rglob("*.py") if re.search(r"^@.*njit", p.read_text(), re.M)}
    assert with_cache <= jit.kernel_sources()
    for path in with_cache:
        assert not re.search(r"numba\.(njit|jit)\(.*cache=True", path.read_text()), path
    named = {str(p.relative_to(PACKAGE)) for p in jit.kernel_sources()}
    assert {"bfloat16.py", "operators/kernels/splitmix.py", "domain/stats.py"} <= named


def test_kernels_are_found_whatever_encoding_the_locale_has() -> None:
    code = "from mergepipe_pipeline import jit; print(jit.kernel_cache())"
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **plain})
    assert done.stdout.strip() == str(jit.kernel_cache()), done.stderr
