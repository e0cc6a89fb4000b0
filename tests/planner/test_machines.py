"""Plans under a budget of blocks, and of packs, are the same on every machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.family import make_family


@pytest.mark.parametrize("budget", [None, "30%"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_cores_of_a_machine_change_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: str | None, is_packed: bool
) -> None:
    family = make_family(tmp_path / "models", 2)
    home = Warehouse.at(tmp_path / "home").ensure()
    for name in ("base", "expert_00", "expert_01"):
        register(home, family / name, name, None if name == "base" else "base")
    if is_packed:
        pack(home, ["expert_00", "expert_01"])
    rows = [f"- {{model: expert_0{n}, parameters: {{weight: 0.5}}}}" for n in range(2)]
    text = "\n".join(["merge_method: ties", "base_model: base", "models:", *rows])
    parsed = parse(text, name="machines", where="machines")
    plans = []
    for cores in (1, 64):
        monkeypatch.setattr(threads, "cores", lambda cores=cores: cores)
        plans.append(make_plan(home, parsed, budget=budget, block_elems=4096))
    assert plans[0] == plans[1]
