"""`--home` and `--json` before and after a command, and what a machine reads of progress."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mergepipe_pipeline.cli.common import Console, JsonLines, options, verb
from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.warehouse import Warehouse


@click.command()
@verb
def told(console: Console) -> None:
    """Say what was asked for."""
    click.echo(f"{console.home_dir} {console.as_json}")


@click.group()
@options
def outer(**_: object) -> None:
    """A group in the group."""


@pytest.fixture
def with_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(outer.commands, "told", told)
    monkeypatch.setitem(main.commands, "told", told)
    monkeypatch.setitem(main.commands, "outer", outer)


@pytest.mark.usefixtures("with_probe")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--home x --json told", "x True"),
        ("told --home x --json", "x True"),
        ("--json told --home x", "x True"),
        ("--home x told --json", "x True"),
        ("--home x --json outer told", "x True"),
        ("outer --home x --json told", "x True"),
        ("--home y outer --home x told", "x False"),
        ("--home y told --home x", "x False"),
    ],
)
def test_home_and_json_are_the_same_before_a_command_and_after_it(words: str, found: str) -> None:
    result = CliRunner().invoke(main, words.split())
    assert result.stdout == f"{found}\n", result.output


@pytest.mark.parametrize("name", sorted(main.commands))
def test_each_command_takes_home_and_json(name: str) -> None:
    taken = {flag for p in main.commands[name].params for flag in p.opts}
    assert {"--home", "--json"} <= taken


def test_an_error_is_json_when_json_is_asked_for_before_the_command(tmp_path: Path) -> None:
    words = ["--json", "--home", str(tmp_path / "w"), "history", "nothing"]
    result = CliRunner().invoke(main, words)
    assert json.loads(result.stdout)["exit_code"] == result.exit_code == 17


def test_a_merge_for_machines_tells_its_progress_line_by_line_and_one_result(
    tmp_path: Path, recipe_text: Callable[..., str]
) -> None:
    recipe = tmp_path / "r.yml"
    recipe.write_text(recipe_text())
    done = CliRunner().invoke(main, ["--json", "merge", str(recipe), "--home", str(tmp_path / "w")])
    assert json.loads(done.stdout)["snapshot_id"]
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    tasks = {line["task"]: line for line in lines}
    assert any("merg" in task.lower() for task in tasks), done.stderr
    assert all(line.keys() == {"task", "done", "total", "unit"} for line in lines)
    assert all(line["done"] == line["total"] for line in tasks.values()), done.stderr


def test_progress_for_machines_is_told_twice_a_second_at_most_and_at_both_ends() -> None:
    now, out = [0.0], StringIO()
    lines = JsonLines(print, out, clock=lambda: now[0])
    with lines.task("merge\nx", 100) as advance:
        for _ in range(100):
            now[0] += 0.125
            advance(1)
    told = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["done"] for line in told] == [0, *range(4, 101, 4)]
    assert told[0] == {"task": "merge\nx", "done": 0, "total": 100, "unit": "bytes"}


def test_progress_says_how_far_work_came_that_failed() -> None:
    out = StringIO()

    def failing() -> None:
        with JsonLines(print, out).task("merge", 100) as advance:
            advance(7)
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        failing()
    assert json.loads(out.getvalue().splitlines()[-1])["done"] == 7


def test_options_of_mergekit_are_answered_one_by_one_with_what_to_write_here() -> None:
    words = "merge r.yml out --cuda --random-seed 7 --lazy-unpickle --lora-merge-cache=x -j 4"
    result = CliRunner().invoke(main, [*words.split(), "--no-quiet", "--threads", "2"])
    assert result.exit_code == 2
    lines = dict(line.strip().split(": ", 1) for line in result.stderr.splitlines()[-7:])
    assert lines == {
        "out": "write `--out out`",
        "--cuda": "write `--device cuda` after `merge`",
        "--random-seed": "write `seed: N` in the recipe",
        "--lazy-unpickle": "leave it out: safetensors are read in parts, and `mergepipe convert` "
        "makes them of .bin",
        "--lora-merge-cache": "leave it out: adapters are merged as they are read",
        "-j": "write `--threads N` after `merge`",
        "--no-quiet": "leave it out",
    }


@pytest.mark.parametrize("verb_name", ["check", "plan", "merge"])
@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("r.yml out", "`--out out`"),
        ("--allow-crimes r.yml", "architectures"),
        ("r.yml --trust-remote-code", "no code of a model is run"),
    ],
)
def test_each_command_over_recipes_answers_alone(verb_name: str, words: str, answer: str) -> None:
    result = CliRunner().invoke(main, [verb_name, *words.split()])
    assert result.exit_code == 2
    assert answer in result.stderr


def test_every_option_of_mergekit_has_an_answer_or_is_one_here() -> None:
    options_of_merge = pytest.importorskip("mergekit.scripts.run_yaml").main
    own = {name for p in main.commands["merge"].params for name in (*p.opts, *p.secondary_opts)}
    theirs = {
        n for p in options_of_merge.params for n in (*p.opts, *p.secondary_opts) if n[0] == "-"
    }
    for name in sorted(theirs - own - {"--help"}):
        result = CliRunner().invoke(main, ["merge", "r.yml", name])
        assert f"  {name}: " in result.stderr, name


def test_other_slips_are_told_as_before() -> None:
    result = CliRunner().invoke(main, ["merge", "r.yml", "--budgt", "5%"])
    assert "No such option" in result.stderr
    assert "mergekit" not in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("gc", "--older-than", "1e300"),
        ("gc", "--older-than", "nan"),
        ("gc", "--keep-versions", "9" * 400),
        ("gc", "--keep-versions", "9" * 5000),
        ("gc", "--keep-versions", "²"),
        ("sql", "select 1", "--timeout", "9" * 30),
        ("rollback", "live", "--to", "-" + "9" * 30),
        ("merge", "{recipe}", "--memory", "9" * 30),
        ("merge", "{recipe}", "--cache-limit", "9" * 5000),
        ("merge", "{recipe}", "--budget", "9" * 5000),
        ("merge", "{recipe}", "--device", "cuda:" + "9" * 5000),
        ("explain", "live@" + "9" * 5000),
        ("explain", "live@٣"),
    ],
)
def test_no_number_of_an_argument_is_a_defect(
    home: Warehouse, tmp_path: Path, words: tuple[str, ...]
) -> None:
    recipe = tmp_path / "r.yml"
    recipe.write_text("merge_method: linear\nmodels: [{model: a, parameters: {weight: 1}}]\n")
    home.refs.publish("live", "f" * 24, "by hand")
    given = [w.format(recipe=recipe) for w in words]
    done = CliRunner().invoke(main, [*given, "--home", str(home.root)])
    assert done.exit_code not in (0, 1, 70), done.output
