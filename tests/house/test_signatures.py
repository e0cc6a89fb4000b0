"""What a wheel compiles ahead; that merges compile nothing besides is for `test_wheel`."""

from __future__ import annotations

import pytest
from numba.core.dispatcher import Dispatcher

from mergepipe_pipeline.demo.kernels import SIGNATURES, parsed


@pytest.mark.parametrize("line", SIGNATURES.read_text().splitlines(), ids=lambda x: x[:60])
def test_every_kernel_that_is_compiled_ahead_exists(line: str) -> None:
    kernel, types = parsed(line)
    assert isinstance(kernel, Dispatcher)
    assert types
