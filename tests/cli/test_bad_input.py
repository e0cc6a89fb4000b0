"""Bad input gets one clear answer before any weight is read, and nothing is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mergepipe_pipeline.checkpoints.reader import BlockReader
from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.family import tensors_of, write_model


def call(*words: object) -> Result:
    return CliRunner().invoke(main, [str(w) for w in words])


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs `merge` on recipe text; asserts that it fails having read and written nothing."""

    def run(text: str, *options: str) -> Result:
        def never(*args: object) -> None:
            raise AssertionError("a weight was read")

        monkeypatch.setattr(BlockReader, "_start_byte", never)
        home, out = tmp_path / "w", tmp_path / "out"
        recipe = tmp_path / "r.yml"
        recipe.write_text(text)
        result = call("merge", recipe, "--home", home, "--out", out, *options)
        assert result.exit_code not in (0, 1, 70), result.output
        assert not out.exists()
        for folder in ("catalog", "objects", "snapshots", "plans", "staging", "refs"):
            assert not any((home / folder).glob("*")), folder
        return result

    return run


def test_a_typo_in_a_key_is_named_with_a_suggestion(
    refused: Callable[..., Result], recipe_text: Callable[..., str]
) -> None:
    result = refused(recipe_text().replace("base_model", "base_modell"))
    assert "base_modell" in result.stderr
    assert "did you mean" in result.stderr


def test_an_unknown_method_is_named_with_a_suggestion(
    refused: Callable[..., Result], recipe_text: Callable[..., str]
) -> None:
    result = refused(recipe_text("tiess"))
    assert result.exit_code == 11
    assert "ties" in result.stderr


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("merge_method: TIES", "ties"),
        ("merge_method: ties\nmodles: []", "models"),
        ("merge_method: ties\nout_dtype: fp16", "float16"),
        ("merge_method: ties\ndtype: bf16", "bfloat16"),
        ("merge_method: ties\ndtype: Float32", "float32"),
    ],
)
def test_what_people_write_from_habit_is_answered_with_the_word_they_mean(
    refused: Callable[..., Result], recipe_text: Callable[..., str], wrong: str, right: str
) -> None:
    result = refused(recipe_text().replace("merge_method: ties", wrong))
    assert result.exit_code == 11
    assert f"did you mean `{right}`?" in result.stderr


def test_a_missing_required_parameter_names_model_and_parameter(
    refused: Callable[..., Result], recipe_text: Callable[..., str]
) -> None:
    result = refused(
        recipe_text().replace("parameters: {weight: 0.5}", "parameters: {density: 0.5}")
    )
    assert "weight" in result.stderr
    assert "expert_01" in result.stderr


def test_a_model_path_that_is_not_there_is_named(
    refused: Callable[..., Result], recipe_text: Callable[..., str]
) -> None:
    result = refused(recipe_text().replace("expert_02", "expert_77"))
    assert result.exit_code == 12
    assert "expert_77" in result.stderr
    assert "\n  next      " in result.stderr


@pytest.fixture
def registered(tmp_path: Path, family: Path) -> Path:
    """A warehouse at `w` that knows `base`, in a folder of its own, and `math`."""
    shutil.copytree(family / "base", tmp_path / "base")
    home = tmp_path / "w"
    assert call("register", tmp_path / "base", "--home", home).exit_code == 0
    assert call("register", family / "expert_00", "--name", "math", "--home", home).exit_code == 0
    return home


RECIPE = "merge_method: ties\nbase_model: base\nmodels:\n- model: math\nparameters: {weight: 1}\n"


def check(home: Path, text: str) -> Result:
    (home.parent / "r.yml").write_text(text)
    return call("check", home.parent / "r.yml", "--home", home)


def test_an_unknown_model_is_told_at_its_key_with_the_name_that_is_meant(registered: Path) -> None:
    result = check(registered, RECIPE.replace("base_model: base", "base_model: bse"))
    assert result.exit_code == 12
    assert "r.yml, line 2, base_model: bse\n" in result.stderr
    assert "; did you mean `base`?\n" in result.stderr
    result = check(registered, RECIPE.replace("model: math", "model: mth"))
    assert "r.yml, line 4, models[0].model: mth\n" in result.stderr
    assert "; did you mean `math`?\n" in result.stderr


def test_several_unknown_models_are_explained_once(registered: Path) -> None:
    text = RECIPE.replace("model: math", "model: mth").replace(
        "base_model: base", "base_model: bse"
    )
    result = check(registered, text)
    assert result.stderr.count("a folder with safetensors, a model in") == 1
    assert "did you mean `base`?" in result.stderr
    assert "did you mean `math`?" in result.stderr


@pytest.mark.parametrize(
    ("mistake", "place"),
    [
        ("budget: 30\n", "line 6, budget"),
        ("seeed: 1\n", "line 6, seeed"),
        ("dtype: bfloat17\n", "line 6, dtype"),
    ],
)
def test_a_model_that_is_not_there_is_said_beside_what_else_is_wrong(
    registered: Path, mistake: str, place: str
) -> None:
    text = RECIPE.replace("model: math", "model: mth").replace(
        "base_model: base", "base_model: ./b"
    )
    result = check(registered, text + mistake)
    assert "found     3 problems" in result.stderr
    assert "line 2, base_model: a model is neither a registered name nor a path" in result.stderr
    assert "no such name, and nothing at 'mth'; did you mean `math`?\n" in result.stderr
    assert place in result.stderr
    alone = check(registered, RECIPE + mistake)
    assert alone.exit_code != 0
    assert "neither a registered name" not in alone.stderr


@pytest.mark.parametrize("text", ["experts/maht", "./experts/maht", "far/experts/maht"])
def test_a_misspelt_path_is_named_with_the_folder_that_is_meant_though_it_may_be_a_hub_name(
    registered: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody answers there
    right = registered.parent / text.replace("maht", "math")
    right.mkdir(parents=True)
    result = check(registered, RECIPE.replace("model: math", f"model: {text}"))
    assert f"did you mean `{text.replace('maht', 'math')}`?" in result.stderr
    assert "next      correct the path" in result.stderr or "check the spelling" in result.stderr


def test_a_path_from_the_root_is_not_looked_for_beside_the_recipe(registered: Path) -> None:
    (registered.parent / "exprets").mkdir()
    result = check(registered, RECIPE.replace("model: math", "model: /experts"))
    assert "nothing at '/experts'\n" in result.stderr


def test_a_stage_is_no_model_that_is_missing_where_something_else_is_wrong(
    registered: Path,
) -> None:
    first = f"name: half\n{RECIPE}"
    last = RECIPE.replace("model: math", "model: half") + "dtype: bfloat17\n"
    result = check(registered, f"{first}---\n{last}")
    assert "bfloat17" in result.stderr
    assert "neither a registered name" not in result.stderr


@pytest.mark.parametrize(
    ("wish", "key"),
    [
        ("tokenizer_source: unoin\n", "tokenizer_source"),
        ("tokenizer: {source: unoin}\n", "tokenizer.source"),
    ],
)
def test_a_misspelt_tokenizer_source_is_told_at_its_key_with_the_word_that_is_meant(
    registered: Path, wish: str, key: str
) -> None:
    result = check(registered, RECIPE + wish)
    assert f"r.yml, line 6, {key}: unoin\n" in result.stderr
    assert "; did you mean `union`?\n" in result.stderr


def test_an_unknown_model_of_one_token_is_told_at_its_key(registered: Path) -> None:
    result = check(registered, RECIPE + "tokenizer: {tokens: {<s>: {source: unoin}}}\n")
    assert "r.yml, line 6, tokenizer.tokens.<s>.source: unoin\n" in result.stderr
    assert "did you mean" not in result.stderr


def test_a_registered_model_whose_folder_is_gone_is_told_by_name_with_what_to_do(
    registered: Path, tmp_path: Path
) -> None:
    (tmp_path / "base").rename(tmp_path / "moved")
    result = check(registered, RECIPE)
    assert result.exit_code == 12
    assert "error: The folder of a registered checkpoint is gone\n" in result.stderr
    assert f"base_model: base, registered at {tmp_path / 'base'}\n" in result.stderr
    assert "`mergepipe register NEWPATH --name base`" in result.stderr
    again = call("register", tmp_path / "moved", "--name", "base", "--home", registered)
    assert again.exit_code == 0
    assert check(registered, RECIPE).exit_code == 0


@pytest.mark.parametrize(("path", "hub"), [("org/model", True), ("./org/model", False)])
def test_a_path_that_could_be_a_hub_name_is_told_how_to_mean_the_hub(
    registered: Path, path: str, hub: bool
) -> None:
    result = call("register", path, "--home", registered)
    assert result.exit_code == 12
    assert ("write hf://org/model" in result.stderr) is hub


def test_a_recipe_that_is_no_text_or_not_there_is_told_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "r.yml").write_bytes(b"# caf\xe9\n" + RECIPE.encode())
    result = call("check", tmp_path / "r.yml", "--home", tmp_path / "w")
    assert "byte 5, which is not UTF-8 text\n  next      save the file as UTF-8" in result.stderr
    result = call("check", tmp_path / "no.yml", "--home", tmp_path / "w")
    assert "  found     no such file\n  next      check the path" in result.stderr


def test_shapes_that_differ_are_named_with_both_shapes(
    refused: Callable[..., Result], tmp_path: Path, family: Path
) -> None:
    odd = write_model(tmp_path / "odd", tensors_of(0, 0, hidden=32), hidden=32)
    result = refused(
        f"merge_method: task_arithmetic\nbase_model: {family / 'base'}\n"
        f"models:\n  - model: {odd}\n    parameters: {{weight: 1}}\n"
    )
    assert result.exit_code == 11
    assert "[512, 32]" in result.stderr
    assert "[512, 64]" in result.stderr


def test_a_truncated_shard_is_named_with_its_sizes(
    refused: Callable[..., Result], tmp_path: Path, family: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(family / "expert_01", broken)
    shard = broken / "model-00002-of-00002.safetensors"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-100])
    result = refused(
        f"merge_method: task_arithmetic\nbase_model: {family / 'base'}\n"
        f"models:\n  - model: {broken}\n    parameters: {{weight: 1}}\n"
    )
    assert result.exit_code == 13
    for part in (shard.name, str(size), str(size - 100)):
        assert part in result.stderr


def test_a_bin_checkpoint_says_how_to_convert(
    refused: Callable[..., Result], tmp_path: Path, family: Path
) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "pytorch_model.bin").write_bytes(b"never loaded")
    result = refused(
        f"merge_method: task_arithmetic\nbase_model: {family / 'base'}\n"
        f"models:\n  - model: {old}\n    parameters: {{weight: 1}}\n"
    )
    assert result.exit_code == 12
    assert "mergepipe convert" in result.stderr


def test_a_header_of_absurd_length_is_refused(
    refused: Callable[..., Result], tmp_path: Path, family: Path
) -> None:
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    (hostile / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    result = refused(
        f"merge_method: task_arithmetic\nbase_model: {family / 'base'}\n"
        f"models:\n  - model: {hostile}\n    parameters: {{weight: 1}}\n"
    )
    assert "absurd" in result.stderr
    assert str(1 << 60) in result.stderr


def test_several_problems_are_listed_at_once(
    refused: Callable[..., Result], recipe_text: Callable[..., str]
) -> None:
    text = recipe_text().replace("expert_02", "gone_1").replace("expert_03", "gone_2")
    result = refused(text)
    assert "gone_1" in result.stderr
    assert "gone_2" in result.stderr


def test_a_budget_nobody_understands_is_refused(
    refused: Callable[..., Result], recipe_text: Callable[..., str]
) -> None:
    assert refused(recipe_text(), "--budget", "lots").exit_code == 16


def test_a_partial_budget_without_a_base_says_what_to_add(
    refused: Callable[..., Result], recipe_text: Callable[..., str]
) -> None:
    result = refused(recipe_text("linear", "", base=False), "--budget", "50%")
    assert result.exit_code == 16
    assert "\n  expected  a base_model, or at least" in result.stderr


def test_a_strategy_nobody_knows_is_refused(
    refused: Callable[..., Result], recipe_text: Callable[..., str]
) -> None:
    result = refused(recipe_text(), "--strategy", "magnitud")
    assert result.exit_code == 11
    assert "--strategy" in result.stderr
    assert "did you mean `magnitude`?" in result.stderr


def test_a_home_folder_of_nobody_is_a_path_that_is_not_there(
    refused: Callable[..., Result], recipe_text: Callable[..., str], family: Path, tmp_path: Path
) -> None:
    result = refused(recipe_text().replace(str(family / "expert_02"), "~no-such-user/model"))
    assert result.exit_code == 12
    assert "nothing at '~no-such-user/model'" in result.stderr
    assert "did you mean" not in result.stderr
    assert call("register", "~no-such-user/x", "--home", tmp_path / "v").exit_code == 12
    result = call("ls", "--home", "~no-such-user/w")
    assert result.exit_code == 10
    assert "--home or MERGEPIPE_HOME, '~no-such-user/w'" in result.stderr


def test_a_revision_whose_files_were_replaced_is_refused(tmp_path: Path, family: Path) -> None:
    home, model, recipe = tmp_path / "w", tmp_path / "model", tmp_path / "r.yml"
    shutil.copytree(family / "expert_00", model)
    assert call("register", model, "--home", home).exit_code == 0
    text = (
        f"merge_method: task_arithmetic\nbase_model: {family / 'base'}\n"
        "models:\n  - {model: model@1, parameters: {weight: 1}}\n"
    )
    recipe.write_text(text)
    assert call("check", recipe, "--home", home).exit_code == 0
    shutil.copy(family / "expert_02" / "model.safetensors", model / "model.safetensors")
    result = call("check", recipe, "--home", home)
    assert result.exit_code == 14
    assert f"model@1, {model}\n  expected  checkpoint" in result.stderr
    recipe.write_text(text.replace("@1", ""))
    assert call("check", recipe, "--home", home).exit_code == 0


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000])
def test_a_config_that_is_no_object_is_refused_before_the_merge(
    refused: Callable[..., Result], tmp_path: Path, family: Path, text: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(family / "base", broken)
    (broken / "config.json").write_text(text)
    result = refused(
        f"merge_method: task_arithmetic\nbase_model: {broken}\n"
        f"models:\n  - model: {family / 'expert_00'}\n    parameters: {{weight: 1}}\n"
    )
    assert result.exit_code == 13
    assert f"{broken}, config.json\n  expected  a JSON object\n  found" in result.stderr


def test_a_base_without_a_config_is_warned_of(tmp_path: Path, family: Path) -> None:
    bare, recipe = tmp_path / "bare", tmp_path / "r.yml"
    shutil.copytree(family / "base", bare)
    (bare / "config.json").unlink()
    recipe.write_text(
        f"merge_method: task_arithmetic\nbase_model: {bare}\n"
        f"models:\n  - model: {family / 'expert_00'}\n    parameters: {{weight: 1}}\n"
    )
    result = call("check", recipe, "--home", tmp_path / "w")
    assert result.exit_code == 0
    assert "warning: bare has no config.json, and the result takes it from there" in result.stderr


@pytest.mark.parametrize("option", ["--threads", "--window-size", "--memory"])
def test_none_of_what_a_merge_needs_some_of_is_refused(
    tmp_path: Path, recipe_text: Callable[..., str], option: str
) -> None:
    recipe = tmp_path / "r.yml"
    recipe.write_text(recipe_text())
    result = call("merge", recipe, "--home", tmp_path / "w", option, "0")
    assert result.exit_code == 2
    assert "0 is not in the range x>=1" in result.stderr


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_refused_first(tmp_path: Path, device: str) -> None:
    result = call("merge", "no-such.yml", "--home", tmp_path / "w", "--device", device)
    assert result.exit_code == 23
    assert f"\n  where     device '{device}'\n" in result.stderr
    assert not (tmp_path / "w").exists()


def test_values_of_any_type_are_printed_for_machines(tmp_path: Path) -> None:
    Warehouse.at(tmp_path).ensure()
    result = call(
        "sql", "select 'x'::blob as a, 1::decimal(3, 1) as b", "--json", "--home", tmp_path
    )
    assert json.loads(result.stdout) == [{"a": "b'x'", "b": 1}]


def test_an_output_folder_in_use_is_refused_before_any_work(
    tmp_path: Path, recipe_text: Callable[..., str]
) -> None:
    recipe, out = tmp_path / "r.yml", tmp_path / "out"
    recipe.write_text(recipe_text())
    out.mkdir()
    (out / "thesis.txt").write_text("precious")
    result = call("merge", recipe, "--home", tmp_path / "w", "--out", out)
    assert result.exit_code == 10
    assert "not empty" in result.stderr
    assert (out / "thesis.txt").read_text() == "precious"


def test_machines_get_the_error_as_json(tmp_path: Path) -> None:
    result = call("merge", tmp_path / "none.yml", "--home", tmp_path / "w", "--json")
    error = json.loads(result.stdout)
    assert error["exit_code"] == result.exit_code == 11
    assert error["error"]["class"] == "RecipeError"


def test_two_models_in_folders_of_one_name_keep_their_own_names(
    tmp_path: Path, family: Path
) -> None:
    for where, source in (("a", "expert_00"), ("b", "expert_01")):
        shutil.copytree(family / source, tmp_path / where / "model")
    recipe = tmp_path / "r.yml"
    models = "".join(
        f"  - model: {tmp_path / w / 'model'}\n    parameters: {{weight: 1}}\n" for w in "ab"
    )
    recipe.write_text(
        f"merge_method: task_arithmetic\nbase_model: {family / 'base'}\nmodels:\n{models}"
    )
    result = call("merge", recipe, "--home", tmp_path / "w", "--json")
    assert result.exit_code == 0, result.output
    listing = json.loads(call("ls", "--home", tmp_path / "w", "--json").stdout)
    names = {c["name"]: c["root"] for c in listing["checkpoints"]}
    assert len(names) == 3
    assert set(names.values()) >= {str(tmp_path / "a" / "model"), str(tmp_path / "b" / "model")}
