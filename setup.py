"""Compiles the kernels that a wheel carries; all else is said in pyproject.toml."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithKernels(build_py):
    """Adds compiled kernels to a wheel; where they cannot be compiled, the wheel has none."""

    def run(self):
        """Copy the package, and compile what is in the copy."""
        super().run()
        if self.editable_mode or platform.machine() != "x86_64":
            return
        carried = Path(self.build_lib, "mergepipe_pipeline/compiled")
        shutil.rmtree(carried, ignore_errors=True)  # of another build
        if (made := Path("mergepipe_pipeline/compiled")).exists():  # by `make kernels`
            shutil.copytree(made, carried)
        command = [sys.executable, "-B", "-m", "mergepipe_pipeline.demo.kernels", "--carried"]
        if subprocess.run(command, cwd=self.build_lib).returncode:
            shutil.rmtree(carried, ignore_errors=True)
            self.warn("the wheel carries no kernels: the first command will compile them")


setup(cmdclass={"build_py": BuildWithKernels})
