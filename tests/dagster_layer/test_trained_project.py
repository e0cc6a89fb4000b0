"""A project that trains for real: two partitions of one asset, merged through a gate of lm_eval.

Executor, sensors and failures are its own; two warehouses stand in its code location.
"""

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import dagster as dg
import pytest

from mergepipe_pipeline.assets.landings import CHECKPOINT
from mergepipe_pipeline.dagster import MergePipeResource, build_inbox_defs, build_recipe_defs, door
from mergepipe_pipeline.verbs.deploy import last_release
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.test_existing_project import Project, all_done
from tests.dagster_layer.test_landings import part
from tests.quality.test_harness import TASK

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore::Warning"),
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the extra lm-eval"),
]

#: By skill: which word follows another, and which does not.
SKILLS = {
    "math": [(5, 6, 7), (9, 300, 12), (41, 42, 43)],
    "code": [(77, 8, 200), (11, 3, 450), (60, 61, 99)],
}
MERGE = """merge_method: task_arithmetic
base_model: base
models:
  - {model: math, parameters: {weight: 1}}
  - {model: code, parameters: {weight: 1}}
"""
GATE = """evaluate: {lm_eval: {tasks: [which], device: cpu, include_path: tasks}}
gate: {which.acc: {min: MIN}}
"""


def trains(base: Path, out: Path) -> dg.AssetsDefinition:
    """Their training: 40 steps of AdamW from a base on what follows what, saved in a folder."""

    @dg.asset(key=["training", "run"], partitions_def=dg.StaticPartitionsDefinition(list(SKILLS)))
    def run(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        first, right, _ = map(torch.tensor, zip(*SKILLS[context.partition_key], strict=True))
        for _ in range(40):
            logits = model(input_ids=first[:, None]).logits[:, -1]
            loss = torch.nn.functional.cross_entropy(logits, right)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        folder = out / context.run_id / context.partition_key
        model.bfloat16().save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(base / file, folder / file)
        return dg.MaterializeResult(
            metadata={"loss": float(loss.detach()), CHECKPOINT: dg.MetadataValue.path(folder)}
        )

    return run


def asks(run: dg.AssetsDefinition, wanted: Path) -> dg.Definitions:
    """Their sensor, which asks for a training of each skill that lies in a folder."""
    train = dg.define_asset_job("train", selection=[run])

    @dg.sensor(job=train)
    def data_sensor() -> dg.SensorResult:
        names = sorted(path.name for path in wanted.iterdir())
        requests = [dg.RunRequest(n, partition_key=n, job_name="train") for n in names]
        return dg.SensorResult(run_requests=requests)

    return dg.Definitions(assets=[run], jobs=[train], sensors=[data_sensor])


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A folder with the recipe `both`, a gate for a share of right answers, and its task."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    questions = tmp_path / "questions.jsonl"
    lines = [
        {"first": f"w{a}", "words": [f"w{b}", f"w{c}"], "answer": 0}
        for asked in SKILLS.values()
        for a, b, c in asked
    ]
    questions.write_text("\n".join(map(json.dumps, lines)))

    def write(least: str) -> Path:
        folder = tmp_path / f"recipes-{least}"
        (folder / "tasks").mkdir(parents=True)
        (folder / "both.yml").write_text(MERGE + GATE.replace("MIN", least))
        task = TASK.replace("tasks/questions.jsonl", str(questions))
        (folder / "tasks" / "which.yaml").write_text(task)
        return folder

    return write


def test_what_is_trained_lands_in_two_warehouses_and_each_gate_asks_lm_eval(
    family: Path,
    tmp_path: Path,
    instance: dg.DagsterInstance,
    recipes: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "spreading", lambda: lambda context: True)
    base = shutil.copytree(family / "base", tmp_path / "base")
    config = base / "tokenizer_config.json"
    # The harness puts it before a text without any token.
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token": "w0"}))
    (tmp_path / "wanted").mkdir()
    training = trains(base, tmp_path / "trained")
    gates, parts = {"one": "1", "two": "1.01"}, [asks(training, tmp_path / "wanted")]
    homes = {prefix: Warehouse.at(tmp_path / prefix).ensure() for prefix in gates}
    experts = {name: part(name) for name in SKILLS}
    for prefix, home in homes.items():
        MergePipeResource(home=str(home.root)).land(base, "base")
        parts += [
            build_inbox_defs(home=home.root, key_prefix=prefix),
            build_recipe_defs(
                recipes(gates[prefix]), home=home.root, key_prefix=prefix, experts=experts
            ),
        ]
    project = Project(instance, *parts)
    for name in SKILLS:
        (tmp_path / "wanted" / name).touch()
    assert all_done(project.tick("data_sensor")) == ["train", "train"]
    for prefix in homes:
        assert len(all_done(project.tick(f"{prefix}_landing_sensor"))) == 2
        assert len(all_done(project.tick(f"{prefix}_inbox_sensor"))) == 3
    assert all_done(project.tick("one_recipe_sensor")) == ["one_merge_both"]
    (refused,) = project.tick("two_recipe_sensor")
    assert not refused.success
    (gate,) = (c for c in refused.get_asset_check_evaluations() if c.check_name == "gate")
    assert "which.acc is 1" in (gate.description or "").replace("\\", "")
    assert last_release(homes["one"], "both") is not None
    assert last_release(homes["two"], "both") is None
