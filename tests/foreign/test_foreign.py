"""mergekit's own tests, run with our command where their source release is at hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.foreign.__main__ import run
from tests.foreign.expected import EXPECTED

RELEASE = os.environ.get("MERGEKIT_RELEASE", "")


@pytest.mark.peer
@pytest.mark.skipif(not RELEASE, reason="MERGEKIT_RELEASE names no source release of mergekit")
def test_its_own_merges_pass_but_for_those_that_assert_what_is_otherwise_here() -> None:
    found = run(Path(RELEASE))
    assert len(found) >= 66
    assert {name for name, passed in found.items() if not passed} == set(EXPECTED)
