"""MERGEPIPE_EVALUATORS says what recipes may run, and a child sees no secret that is not named."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from mergepipe_pipeline.domain.evaluation import Evaluator, LmEval, Perplexity
from mergepipe_pipeline.errors import EvaluationError, MergePipeError
from mergepipe_pipeline.quality.evaluators import EVALUATORS, refuse_forbidden
from mergepipe_pipeline.quality.measure import evaluate
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.warehouse import Warehouse
from tests.snapshots.tiny import Store

#: Measures what of the environment it sees: 1 for each name that it has.
SEES = """
import json, os
print(json.dumps({name: 1 for name in os.environ if name.startswith("SEEN_") or "TOKEN" in name
      or name.startswith("AWS_") or name == "MERGEPIPE_WEBHOOK"} | {"SEEN": 1}))
"""
SECRETS = {
    "HF_TOKEN",
    "AWS_SESSION_ANYTHING",
    "MERGEPIPE_WEBHOOK",
    "SEEN_API_KEY",
    "SEEN_SECRET",
    "SEEN_DB_PASSWORD_FILE",
    "seen_token",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a recipe, with a program, a module and a folder of tasks."""
    folder = tmp_path / "recipes"
    (folder / "tasks").mkdir(parents=True)
    (folder / "sees.py").write_text(SEES)
    (folder / "quality.py").touch()
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (tmp_path / "link.sh").symlink_to(folder / "run.sh")
    return folder


def test_a_child_sees_tokens_keys_and_passwords_only_if_they_are_named(
    home: Warehouse, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = Store(home.root).commit((1,))
    for name in (*SECRETS, "SEEN_MONKEYS", "SEEN_KEYBOARD"):
        monkeypatch.setenv(name, "x")
    command = ("python", "sees.py")
    plain = evaluate(home, snapshot, Evaluator(command), folder)
    assert plain.metrics.keys() == {"SEEN", "SEEN_MONKEYS", "SEEN_KEYBOARD"}
    named = Evaluator(command, env=("HF_TOKEN", "seen_token", "NOT_THERE"))
    found = evaluate(home, snapshot, named, folder, fresh=True)
    assert found.metrics.keys() - plain.metrics.keys() == {"HF_TOKEN"}  # SEEN_ begins in capitals
    assert found.evaluator_id == plain.evaluator_id


PERPLEXITY, HARNESS = Evaluator(perplexity=Perplexity("t")), Evaluator(lm_eval=LmEval(("a",)))
TASKS = Evaluator(lm_eval=LmEval(("a",), include_path="tasks"))
MODULE, INSTALLED = Evaluator(python="quality:score"), Evaluator(python="json:loads")
SCRIPT, SHELL = Evaluator(("python", "sees.py")), Evaluator(("./run.sh", "x"))


@pytest.mark.parametrize(
    ("allowed", "may", "may_not"),
    [
        ("any", [PERPLEXITY, HARNESS, TASKS, MODULE, INSTALLED, SCRIPT, SHELL], []),
        ("", [PERPLEXITY, SCRIPT, SHELL], []),
        ("off", [], [PERPLEXITY, HARNESS, TASKS, MODULE, INSTALLED, SCRIPT, SHELL]),
        ("perplexity, lm_eval", [PERPLEXITY, HARNESS], [TASKS, MODULE, SCRIPT, SHELL]),
        ("lm_eval,{folder}/tasks", [HARNESS, TASKS], [PERPLEXITY]),
        ("python", [SCRIPT, MODULE, INSTALLED], [SHELL, PERPLEXITY]),
        ("{python}", [SCRIPT, MODULE], [SHELL]),
        ("{folder}/quality.py,json:loads", [MODULE, INSTALLED], [SCRIPT]),
        ("quality:score", [], [MODULE, INSTALLED]),
        ("{folder}/run.sh", [SHELL, Evaluator(("../link.sh",))], [SCRIPT]),
        ("run.sh,sh", [Evaluator(("sh", "-c", "x"))], [SHELL]),
        ("{sh}", [Evaluator(("sh", "-c", "x"))], [SHELL]),
    ],
)
def test_what_may_run_is_told_by_what_is_run_and_not_by_what_lies_beside_a_recipe(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    allowed: str,
    may: list[Evaluator],
    may_not: list[Evaluator],
) -> None:
    text = allowed.format(folder=folder, python=sys.executable, sh=shutil.which("sh"))
    monkeypatch.setenv(EVALUATORS, text)
    for evaluator in may:
        refuse_forbidden(evaluator, folder)
    for evaluator in may_not:
        with pytest.raises(EvaluationError, match="may not run here"):
            refuse_forbidden(evaluator, folder)


@pytest.mark.parametrize("wrong", ["./run.sh", "recipes/run.sh", "python,off", "any,sh", ","])
def test_a_wrong_value_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setenv(EVALUATORS, wrong)
    with pytest.raises(MergePipeError, match="A setting has a wrong value"):
        refuse_forbidden(SHELL, folder)


def test_a_recipe_whose_evaluator_may_not_run_is_refused_before_anything_is_written(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "merge_method: linear\nmodels: [{model: nowhere, parameters: {weight: 1}}]\n"
        "evaluate: {command: [./run.sh]}\n"
    )
    home = Warehouse.at(tmp_path / "w")
    monkeypatch.setenv(EVALUATORS, "perplexity")
    with pytest.raises(EvaluationError, match=r"may not run here.*run\.sh"):
        merge(home, parse(text, name="r", where="r"), relative_to=folder)
    assert not home.root.exists()
