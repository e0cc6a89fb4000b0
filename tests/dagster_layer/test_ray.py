"""dagster-ray over two real nodes: one is killed in the middle of a merge, and the ids are those of
one process.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.soak.cluster import main
from tests.support.ray_cluster import lacking

pytestmark = [
    pytest.mark.skipif(lacking() is not None, reason=str(lacking())),
    pytest.mark.filterwarnings("ignore::Warning"),
    pytest.mark.waits,
]


def test_another_node_of_ray_merges_what_one_that_was_killed_left(tmp_path: Path) -> None:
    assert main(["--layers", "8", "--hidden", "512", "--keep", str(tmp_path), "--shards", "2"]) == 0
