"""`evaluate:` and `gate:` in recipes: what they mean, and what is wrong with them, at its place."""

from __future__ import annotations

import pytest

from mergepipe_pipeline.domain.evaluation import Evaluator, Gate, LmEval, Perplexity, Threshold
from mergepipe_pipeline.errors import RecipeError
from mergepipe_pipeline.recipe.parse import ParsedRecipe, parse_recipes
from tests.recipe.schemas import METHODS

MERGE = "merge_method: linear\nmodels: [{model: a, parameters: {weight: 1}}]\n"


def parsed(text: str) -> ParsedRecipe:
    return parse_recipes(MERGE + text, name="r", where="r.yml", methods=METHODS)[-1]


def problems(text: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parsed(text)
    return [p.partition(", ")[2] for p in caught.value.problems]


def test_a_recipe_without_these_keys_has_neither_evaluator_nor_gate() -> None:
    assert (parsed("").evaluator, parsed("").gate) == (None, None)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("{command: [python, eval.py]}", Evaluator(("python", "eval.py"))),
        (
            "{command: [./e, ''], timeout: 0.5, retries: 0}",
            Evaluator(("./e", ""), timeout_s=0.5, retries=0),
        ),
        ("{python: 'checks.skills:score'}", Evaluator(python="checks.skills:score")),
        ("{command: [e], env: [HF_TOKEN]}", Evaluator(("e",), env=("HF_TOKEN",))),
        ("{perplexity: {text: notes.txt}}", Evaluator(perplexity=Perplexity("notes.txt"))),
        (
            "{perplexity: {text: n.jsonl, field: body, max_tokens: 9}}",
            Evaluator(perplexity=Perplexity("n.jsonl", "body", 9)),
        ),
        (
            "{lm_eval: {tasks: [arc_easy, boolq], limit: 10}, timeout: 60}",
            Evaluator(lm_eval=LmEval(("arc_easy", "boolq"), limit=10), timeout_s=60),
        ),
        (
            "{lm_eval: {tasks: [a], limit: 0.5, num_fewshot: 0, apply_chat_template: true, "
            "batch_size: 4, device: cpu, include_path: tasks}}",
            Evaluator(lm_eval=LmEval(("a",), 0.5, 0, True, 4, "cpu", "tasks")),
        ),
    ],
)
def test_an_evaluator_is_read(written: str, meant: Evaluator) -> None:
    assert parsed(f"evaluate: {written}").evaluator == meant


def test_a_gate_is_read_with_shares_as_they_are_written() -> None:
    text = "gate: {a: {min: 1, max_drop: 0.7%}, b: {max: -2.5, max_rise: 0}, on_failure: bisect}"
    assert parsed(f"evaluate: {{command: [e]}}\n{text}").gate == Gate(
        (
            Threshold("a", "min", 1.0),
            Threshold("a", "max_drop", 0.007, is_share=True),
            Threshold("b", "max", -2.5),
            Threshold("b", "max_rise", 0.0),
        ),
        "bisect",
    )


def test_the_last_stage_gives_evaluator_and_gate_of_a_file() -> None:
    first = f"{MERGE}name: s\nevaluate: {{command: [first]}}\n---\n"
    last = MERGE.replace("model: a", "model: s") + "evaluate: {command: [last]}\n"
    *before, final = parse_recipes(first + last, name="r", where="r.yml", methods=METHODS)
    assert final.evaluator == Evaluator(("last",))
    assert "evaluate has no effect" in before[0].warnings[0]


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("evaluate: eval.py", "evaluate: expected a mapping like"),
        (
            "evaluate: {}",
            "evaluate: expected one of command, python, perplexity, lm_eval, found none",
        ),
        ("evaluate: {comand: [e]}", "evaluate.comand: unknown key `comand`; did you mean"),
        ("evaluate: {command: [e], python: 'a:b'}", "evaluate: expected one of"),
        (
            "evaluate: {command: python eval.py}",
            "evaluate.command: expected a list like [python, eval.py], found 'python eval.py'; "
            "no shell reads it",
        ),
        ("evaluate: {command: []}", "evaluate.command: expected a list"),
        ("evaluate: {command: [e, 5]}", "evaluate.command: expected texts"),
        ("evaluate: {command: ['']}", "evaluate.command: expected texts"),
        ("evaluate: {python: eval.py}", "evaluate.python: expected package.module:function"),
        ("evaluate: {perplexity: notes.txt}", "evaluate.perplexity: expected a mapping"),
        ("evaluate: {perplexity: {field: t}}", "evaluate.perplexity.text: expected a file"),
        (
            "evaluate: {perplexity: {text: t, max_tokens: 1.5}}",
            "evaluate.perplexity.max_tokens: expected a whole number from 2",
        ),
        ("evaluate: {lm_eval: arc_easy}", "evaluate.lm_eval: expected a mapping like {tasks:"),
        ("evaluate: {lm_eval: {limit: 1}}", "evaluate.lm_eval.tasks: expected a list like"),
        ("evaluate: {lm_eval: {tasks: []}}", "evaluate.lm_eval.tasks: expected a list like"),
        (
            "evaluate: {lm_eval: {tasks: [a], fewshot: 5}}",
            "evaluate.lm_eval.fewshot: unknown key `fewshot`; did you mean `num_fewshot`?",
        ),
        (
            "evaluate: {lm_eval: {tasks: [a], model_args: x}}",
            "evaluate.lm_eval.model_args: unknown key `model_args`",
        ),
        ("evaluate: {lm_eval: {tasks: [a], limit: 1.5}}", "evaluate.lm_eval.limit: expected a"),
        ("evaluate: {lm_eval: {tasks: [a], limit: 0}}", "evaluate.lm_eval.limit: expected a"),
        ("evaluate: {lm_eval: {tasks: [a], device: 0}}", "evaluate.lm_eval.device: expected a"),
        (
            "evaluate: {lm_eval: {tasks: [a], apply_chat_template: 1}}",
            "evaluate.lm_eval.apply_chat_template: expected true or false, found 1",
        ),
        ("evaluate: {command: [e], env: HF_TOKEN}", "evaluate.env: expected names of variables"),
        ("evaluate: {command: [e], env: ['A=b']}", "evaluate.env: expected names of variables"),
        ("evaluate: {command: [e], timeout: 0}", "evaluate.timeout: expected seconds above 0"),
        ("evaluate: {command: [e], timeout: .inf}", "evaluate.timeout: expected seconds above 0"),
        ("evaluate: {command: [e], retries: 99}", "evaluate.retries: expected a whole number"),
        ("gate: {a: {min: 0}}", "gate: there is no `evaluate:`"),
        ("evaluate: {command: [e]}\ngate: {}", "gate: expected at least one metric"),
        ("evaluate: {command: [e]}\ngate: {on_failure: bisect}", "gate: expected at least one"),
        ("evaluate: {command: [e]}\ngate: {a: 0.5}", "gate.a: expected a mapping like {min: 0.6}"),
        ("evaluate: {command: [e]}\ngate: {a: {}}", "gate.a: expected at least one of min, max"),
        ("evaluate: {command: [e]}\ngate: {a: {mni: 1}}", "gate.a.mni: unknown key `mni`; did"),
        ("evaluate: {command: [e]}\ngate: {a: {min: 2%}}", "gate.a.min: expected a number like"),
        ("evaluate: {command: [e]}\ngate: {a: {max_drop: -1}}", "gate.a.max_drop: expected a"),
        ("evaluate: {command: [e]}\ngate: {a: {min: true}}", "gate.a.min: expected a number"),
        ("evaluate: {command: [e]}\ngate: {a: {min: 2, max: 1}}", "gate.a.min: it is above"),
        (
            "evaluate: {command: [e]}\ngate: {a: {min: 0}, on_failure: biscet}",
            "gate.on_failure: expected one of none, bisect, found 'biscet'; did you mean `bisect`?",
        ),
        (
            "evaluate: {perplexity: {text: t}}\ngate: {perplexty: {max: 1}}",
            "gate.perplexty: the built-in evaluator has no such metric; did you mean",
        ),
    ],
)
def test_what_is_wrong_is_said_at_its_key(written: str, problem: str) -> None:
    assert problems(written)[0].startswith(problem)
