"""EleutherAI's harness measures a snapshot: the tasks that a recipe names, by its own numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from mergepipe_pipeline.domain.evaluation import Evaluator, LmEval
from mergepipe_pipeline.errors import EvaluationError, GateError
from mergepipe_pipeline.quality.builtin import metrics
from mergepipe_pipeline.quality.evaluators import evaluator_id
from mergepipe_pipeline.resolution.recipe_text import load_recipe
from mergepipe_pipeline.verbs.check import check
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.warehouse import Warehouse

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

needs_harness = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="needs the extra lm-eval: pip install -e .[lm-eval]"
)
#: Each asks which of two words follows another.
QUESTIONS = [(5, 6, 7), (9, 300, 12), (41, 42, 43), (77, 8, 200), (11, 3, 450), (60, 61, 99)]
TASK = """\
task: which
dataset_path: json
dataset_kwargs: {data_files: {test: tasks/questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{first}}"
doc_to_choice: "{{words}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a recipe, with a task of its own, without a network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "which.yaml").write_text(TASK)
    lines = (
        json.dumps({"first": f"w{a}", "words": [f"w{b}", f"w{c}"], "answer": i % 2})
        for i, (a, b, c) in enumerate(QUESTIONS)
    )
    (tmp_path / "tasks" / "questions.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.fixture
def recipe(folder: Path, family: Path, recipe_text: Callable[..., str]) -> Callable[[str], Path]:
    """A recipe that is measured by the task of its folder, with a gate."""
    base = shutil.copytree(family / "base", folder / "base")
    config = base / "tokenizer_config.json"
    # The harness puts it before a text without any token.
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token": "w0"}))

    def build(gate: str) -> Path:
        chosen = "{tasks: [which], limit: 4, device: cpu, include_path: tasks}"
        text = recipe_text(extra=f"evaluate: {{lm_eval: {chosen}}}\n{gate}\n")
        path = folder / "measured.yml"
        path.write_text(text.replace(str(family / "base"), str(base)))
        return path

    return build


def accuracy_of(model: str, questions: list[tuple[int, int, int]]) -> float:
    """How often the word that should follow has the larger logit, as transformers gives it."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    right = 0
    for i, (first, *words) in enumerate(questions):
        with torch.no_grad():
            logits = loaded(input_ids=torch.tensor([[first]])).logits[0, -1].float()
        right += int(logits[words].argmax()) == i % 2
    return right / len(questions)


@needs_harness
def test_the_harness_measures_what_transformers_does_and_its_names_are_metrics(
    home: Warehouse, folder: Path, recipe: Callable[[str], Path]
) -> None:
    path = recipe("gate: {which.acc: {min: 0}}")
    merged = merge(home, path, relative_to=folder)
    assert merged.judged is not None
    found = merged.judged.evaluation.metrics
    acc = accuracy_of(merged.outcome.snapshot.path, QUESTIONS[:4])
    assert (found["which.acc"], found["which.acc_norm"]) == (acc, acc)
    assert found.keys() == {f"which.acc{n}{e}" for n in ("", "_norm") for e in ("", "_stderr")}
    recipe("gate: {which.acc: {min: 1.1}}")
    with pytest.raises(GateError, match=r"which\.acc is .*; the gate asks for at least 1\.1"):
        merge(home, path, relative_to=folder)


@needs_harness
def test_a_task_that_changes_makes_another_evaluator(folder: Path) -> None:
    evaluator = Evaluator(lm_eval=LmEval(("which",), include_path="tasks"))
    first = evaluator_id(evaluator, folder)
    (folder / "tasks" / "which.yaml").write_text(f"{TASK}num_fewshot: 2\n")
    assert evaluator_id(evaluator, folder) != first
    lost = Evaluator(lm_eval=LmEval(("which",), include_path="no"))
    with pytest.raises(EvaluationError, match="found no such folder"):
        evaluator_id(lost, folder)


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="the harness is installed")
def test_without_the_harness_check_refuses_and_says_what_to_install(
    home: Warehouse, folder: Path, recipe: Callable[[str], Path]
) -> None:
    parsed = load_recipe(recipe(""), home)
    with pytest.raises(EvaluationError, match="needs the package lm_eval") as caught:
        check(home, parsed, relative_to=folder)
    install = "pip install 'mergepipe-pipeline[lm-eval]'"
    assert str(caught.value.next_step).startswith(install)


def test_numbers_of_tasks_are_metrics_by_name_and_texts_are_none() -> None:
    results = {
        "arc_easy": {"alias": "arc_easy", "sample_len": 10, "acc,none": 0.5, "acc_norm,none": 0.25},
        "gsm8k": {"exact_match,strict-match": 0.125, "exact_match_stderr,strict-match": "N/A"},
    }
    assert metrics(results) == {
        "arc_easy.acc": 0.5,
        "arc_easy.acc_norm": 0.25,
        "gsm8k.exact_match,strict-match": 0.125,
    }
