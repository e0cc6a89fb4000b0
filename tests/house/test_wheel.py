"""What an installation puts beside other people's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "mergepipe_pipeline", "assets", "sensors")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds."""
    root = tmp_path_factory.mktemp("wheel")
    (root / "src").mkdir()
    for name in SOURCES:  # a build writes beside the sources
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, root / "src" / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, root / "src" / name)
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(root)]
    subprocess.run([sys.executable, "-m", "pip", *build, str(root / "src")], check=True)
    (wheel,) = root.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(root / "installed")
    return root / "installed"


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
