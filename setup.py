"""Compiles the kernels that a wheel carries; all else is said in pyproject.toml."""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

#: Processors since 2013, or 2015 of AMD. `mergepipe_pipeline/carried.py` looks for their features.
KIND = {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": "", "NUMBA_DISABLE_INTEL_SVML": "1"}


class BuildWithKernels(build_py):
    """Adds compiled kernels to a wheel; where they cannot be compiled, the wheel has none."""

    def run(self):
        """Copy the package, and compile what is in the copy."""
        super().run()
        if self.editable_mode or platform.machine() != "x86_64":
            return
        carried = Path(self.build_lib, "mergepipe_pipeline/carried")
        shutil.rmtree(carried, ignore_errors=True)  # of another build
        command = [sys.executable, "-B", "-m", "mergepipe_pipeline.demo.carry"]
        with tempfile.TemporaryDirectory() as cache:  # of kernels that others are compiled from
            env = {**os.environ, **KIND, "NUMBA_CACHE_DIR": cache}
            if subprocess.run(command, cwd=self.build_lib, env=env).returncode:
                shutil.rmtree(carried, ignore_errors=True)
                self.warn("the wheel carries no kernels: the first command will compile them")


setup(cmdclass={"build_py": BuildWithKernels})
