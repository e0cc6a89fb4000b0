"""What an installation puts beside other people's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mergepipe_pipeline.storage.locks import locked
from tests.test_jit import compiled_by, numbers

ROOT = Path(__file__).parents[2]
SOURCES = [
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
    "mergepipe_pipeline",
    "assets",
    "sensors",
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, testrun_uid: str) -> Path:
    """The wheel of the sources, which one worker builds: its kernels take a core for a minute."""
    root = tmp_path_factory.getbasetemp().parent / f"wheel-{testrun_uid}"
    with locked(root / "lock"):
        if not list(root.glob("*.whl")):
            _build(root)
    (wheel,) = root.glob("*.whl")
    return wheel


def _build(root: Path) -> None:
    (root / "src").mkdir()
    for name in SOURCES:  # a build writes beside the sources
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, root / "src" / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, root / "src" / name)
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(root)]
    subprocess.run([sys.executable, "-m", "pip", *build, str(root / "src")], check=True)


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """A folder with what the wheel holds."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    return tmp_path / "installed"


def test_the_wheel_puts_one_package_at_the_top_level(installed: Path) -> None:
    assert sorted(p.name.partition("-")[0] for p in installed.iterdir()) == [
        "mergepipe_pipeline",
        "mergepipe_pipeline",  # its dist-info
    ]


def test_a_project_with_assets_and_sensors_of_its_own_loads_the_pipeline(
    installed: Path, tmp_path: Path
) -> None:
    for name in ("assets", "sensors"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("MINE = True\n")
    program = (
        "import sys\n"  # without what `pip install -e` finds from anywhere
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]\n"
        "import assets, sensors, mergepipe_pipeline.definitions as d\n"
        "assert assets.MINE and sensors.MINE\n"
        "print(d.__file__, len(list(d.defs.sensors)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{installed}",
            "MERGEPIPE_HOME": str(tmp_path / "warehouse"),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(str(installed))


def test_the_first_merges_and_packs_of_an_installation_compile_nothing(
    wheel: Path, tmp_path: Path
) -> None:
    place, folder, home = tmp_path / "place", tmp_path / "family", tmp_path / "home"
    install = ["install", "--quiet", "--no-deps", "--target", str(place), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    merges = Path(__file__).with_name("kernel_merges.py").read_text()
    folder.mkdir()
    code = f"-c {merges}\nmerge_all(Path({str(folder)!r}))"
    loaded, compiled = compiled_by(place, code, home, is_read_only=True)
    assert (loaded > 40, compiled) == (True, 0)
    assert not [path for path in home.rglob("*") if path.is_file()]


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_carried_kernel_is_left_where_its_sources_are_others(
    installed: Path, *, is_changed: bool
) -> None:
    before = numbers(ROOT)
    path = installed / "mergepipe_pipeline/operators/kernels/splitmix.py"
    if is_changed:
        path.write_text(path.read_text().replace("0xBF58476D1CE4E5B9", "0xBF58476D1CE4E5BB"))
    after = numbers(installed)
    assert after[0]
    assert (after != before) == is_changed


def test_a_carried_kernel_is_left_where_the_processor_lacks_what_it_needs(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "-c import numpy as np; from mergepipe_pipeline.checkpoints.codes import "
    code += "round_to_bfloat16; round_to_bfloat16(np.ones(9, np.uint32), np.ones(9, np.uint16))"
    assert compiled_by(installed, code, tmp_path, is_read_only=False) == (1, 0)
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert compiled_by(installed, code, tmp_path, is_read_only=False) == (0, 1)
