"""Steps of training runs in buckets: read by ranges, with the ids of the same folders here."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from mergepipe_pipeline.execution.run import MergeOutcome
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.warehouse import Warehouse
from tests.checkpoints.runs import save_alone
from tests.remote.servers import ProxyServer, s3_upload


def test_a_step_in_a_bucket_is_merged_as_the_folder_is(
    family: Path, s3: ProxyServer, s3_upstream: str, tmp_path: Path
) -> None:
    found: list[MergeOutcome] = []
    for number in range(2):
        tensors = load_file(family / f"expert_{2 + number:02d}" / "model.safetensors")
        state = {"model": tensors, "optimizer": {n: t.float() for n, t in tensors.items()}}
        folder = save_alone(tmp_path / f"step-{number}", state)
        s3_upload(s3_upstream, "models", f"run/{folder.name}", folder)
    for place in (tmp_path, "s3://models/run"):
        home = Warehouse.at(tmp_path / f"home-{len(found)}").ensure()
        models = "".join(f"- model: {place}/step-{n}\n" for n in range(2))
        recipe = tmp_path / "r.yml"
        recipe.write_text(
            f"merge_method: ties\nbase_model: {family}/base\nmodels:\n{models}"
            "parameters: {weight: 0.5}\nbudget: 25%\n"
        )
        found.append(merge(home, recipe).outcome)
    here, there = found
    assert here.snapshot.snapshot_id == there.snapshot.snapshot_id
    assert here.realised.expert_bytes_read == there.realised.expert_bytes_read
