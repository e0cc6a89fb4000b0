"""Where we take models otherwise than mergekit does: vocabularies, heads, adapters, files, keys.

Each test has mergekit merge (or refuse) here and now, and us the same recipe.
"""

from __future__ import annotations

import importlib.resources
import json
import shutil
from pathlib import Path

import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.errors import CheckpointError, IncompatibleCheckpointsError, RecipeError
from mergepipe_pipeline.tokenizer.chat import BUILT_IN, built_in
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run
from tests.parity.conftest import FamilyOf
from tests.parity.peer import read_model, run_mergekit
from tests.parity.recipes import fill
from tests.resolution.test_vocabulary import EMBEDDING, HEAD, ROWS, recipe, write
from tests.support.architectures import Tensors
from tests.tokenizer.models import write_checkpoint
from tests.tokenizer.test_mergekit import word_family

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("mergekit_is_here")]

TASK = "merge_method: task_arithmetic\nbase_model: {}\nmodels: [{{model: {}}}]\n"
ONE = TASK + "parameters: {{weight: 0.5}}\n"


def merged(home: Warehouse, text: str) -> Tensors:
    """All tensors of our merge of recipe text."""
    return read_model(Path(run(home, text).snapshot.path))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 llama of ROWS tokens that ties its head."""
    return write(tmp_path_factory.mktemp("deviations") / "base", 0)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "sce"])
@pytest.mark.parametrize("rows", [ROWS + 20, ROWS - 30])
def test_mergekit_refuses_other_numbers_of_embedding_rows_and_we_go_by_the_bases(
    home: Warehouse, base: Path, tmp_path: Path, method: str, rows: int
) -> None:
    expert = write(tmp_path / "expert", 2, rows, base=base)
    text = recipe(method, base, [expert])
    with pytest.raises(ValueError, match=r"size mismatch for model\.embed_tokens"):
        run_mergekit(text)
    ours, below = merged(home, text)[EMBEDDING], read_model(base)[EMBEDDING]
    assert ours.shape == below.shape
    assert not torch.equal(ours[: ROWS - 30], below[: ROWS - 30])
    assert torch.equal(ours[rows:], below[rows:])


def test_the_head_of_an_untied_expert_stays_tied_in_mergekits_config_and_not_in_ours(
    home: Warehouse, base: Path, tmp_path: Path
) -> None:
    text = recipe("task_arithmetic", base, [write(tmp_path / "expert", 5, head=True, base=base)])
    folder = Path(run(home, text).snapshot.path)
    run_mergekit(text, tmp_path / "theirs")
    for path, tied in ((tmp_path / "theirs", True), (folder, False)):
        assert HEAD in read_model(path)
        assert json.loads((path / "config.json").read_text())["tie_word_embeddings"] is tied


def test_mergekit_takes_the_embedding_of_a_model_without_a_head_for_one_and_we_the_bases(
    home: Warehouse, base: Path, tmp_path: Path
) -> None:
    below = write(tmp_path / "below", 5, head=True, base=base)
    expert = write(tmp_path / "expert", 6, base=base)
    for folder in (below, expert):
        config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
        (folder / "config.json").write_text(json.dumps(config))
    text = recipe("task_arithmetic", below, [expert])
    theirs, ours = run_mergekit(text), merged(home, text)
    head, embedding = read_model(below)[HEAD], read_model(expert)[EMBEDDING]
    assert torch.equal(ours[HEAD], head)
    assert float((theirs[HEAD] - head).norm() / (embedding - head).norm()) > 0.1
    with pytest.raises(RecipeError, match=rf"lacks 1 of the tensors.*{HEAD}"):
        merged(home, recipe("linear", None, [below, expert]))


def test_adapters_are_exact_here_and_rounded_to_the_models_dtype_in_mergekit(
    home: Warehouse, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    from tests.resolution.test_adapters import new_model, save, train

    base, adapter, exact = (tmp_path / n for n in ("base", "adapter", "exact"))
    model = new_model("llama").to(torch.bfloat16)
    save(model, base)
    train(model.float(), adapter, exact, target_modules=["q_proj", "down_proj"], r=4)
    text = ONE.format(base, f"{base}+{adapter}") + "dtype: float32\n"
    theirs, ours, below = run_mergekit(text), merged(home, text), read_model(base)
    assert {v.dtype for v in below.values()} == {torch.bfloat16}
    whole = {n: (t + below[n].float()) / 2 for n, t in read_model(exact).items()}
    changed = [n for n, t in read_model(exact).items() if not torch.equal(t, below[n].float())]
    assert len(changed) == 4
    for name in changed:
        torch.testing.assert_close(ours[name], whole[name], rtol=1e-6, atol=1e-7)
        off = (theirs[name] - whole[name]).abs() / whole[name].abs().mean()
        assert float(off.mean()) > 1e-4


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three models with vocabularies of their own, in bfloat16."""
    folders = []
    for i, (files, n_rows) in enumerate(word_family(gaps=False)):
        folders.append(tmp_path_factory.mktemp("words"))
        write_checkpoint(folders[-1], 7 + i, n_rows, files)
        file = folders[-1] / "model.safetensors"
        values = {n: t.to(torch.bfloat16) for n, t in load_file(file).items()}
        save_file(values, file, metadata={"format": "pt"})
    return folders


def union(models: list[Path]) -> str:
    lines = [f"- {{model: {m}, parameters: {{weight: 1}}}}" for m in models]
    return "\n".join(
        ["merge_method: linear", "models:", *lines, "tokenizer_source: union", "dtype: float32", ""]
    )


def vocabulary(folder: Path) -> dict[str, int]:
    """Token to id, of a tokenizer.json, by id."""
    document = json.loads((folder / "tokenizer.json").read_text())
    found: dict[str, int] = dict(document["model"]["vocab"])
    found |= {token["content"]: token["id"] for token in document["added_tokens"]}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def test_new_tokens_of_a_union_have_other_ids_on_every_run_of_mergekit_and_the_same_here(
    tmp_path: Path, words: list[Path]
) -> None:
    text, orders = union(words), set()
    for i in range(10):
        run_mergekit(text, tmp_path / f"theirs_{i}")
        orders.add(tuple(vocabulary(tmp_path / f"theirs_{i}")))
        if len(orders) > 1:
            break
    assert len(orders) > 1
    ours = []
    for i in range(2):
        home = Warehouse.at(tmp_path / f"home_{i}").ensure()
        ours.append(list(vocabulary(Path(run(home, text).snapshot.path))))
    assert ours[0] == ours[1]
    first, second, third = (vocabulary(folder) for folder in words)
    plain = [t for m in (first, second, third) for t in m if not t.startswith("<|")]
    expected = [*dict.fromkeys(plain)]
    assert [t for t in ours[0] if not t.startswith("<|")] == expected


@pytest.mark.parametrize("dtype", ["", "dtype: float32\n"])
def test_means_for_tokens_that_a_model_lacks_are_float32_here_and_in_dtype_in_mergekit(
    home: Warehouse, tmp_path: Path, words: list[Path], dtype: str
) -> None:
    """`shared` is in the second and third model; the first has their mean in its place."""
    text = union(words).replace("dtype: float32\n", dtype)
    theirs = run_mergekit(text, tmp_path / "theirs")[EMBEDDING]
    folder = Path(run(home, text).snapshot.path)
    rows = [read_model(m)[EMBEDDING][vocabulary(m)["shared"]].float() for m in words[1:]]
    mean = (rows[0] + rows[1]) / 2
    in_dtype = mean if dtype else mean.to(torch.bfloat16).float()
    assert torch.equal(mean, in_dtype) == bool(dtype)
    for found, filled in (
        (theirs[vocabulary(tmp_path / "theirs")["shared"]], in_dtype),
        (read_model(folder)[EMBEDDING][vocabulary(folder)["shared"]], mean),
    ):
        merged = ((filled + rows[0] + rows[1]) / 3).to(found.dtype)
        torch.testing.assert_close(found, merged, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("key", "next_to"), [("out_dtpye: float16\n", "out_dtype"), ("residual: 1\n", "")]
)
def test_mergekit_ignores_unknown_keys_and_we_refuse_them(
    home: Warehouse, family_of: FamilyOf, key: str, next_to: str
) -> None:
    text = fill(ONE.format("$base", "$e0"), family_of("llama"))
    theirs = run_mergekit(text)
    assert all(torch.equal(v, theirs[n]) for n, v in run_mergekit(text + key).items())
    with pytest.raises(RecipeError, match=f"unknown key.*{next_to}"):
        run(home, text + key)


def test_mergekit_loads_pickles_and_we_refuse_them(
    home: Warehouse, family_of: FamilyOf, tmp_path: Path
) -> None:
    family = family_of("llama")
    shutil.copytree(family / "expert_00", tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    values = read_model(family / "expert_00")
    torch.save(values, tmp_path / "pickled" / "pytorch_model.bin")
    text = ONE.format(family / "base", tmp_path / "pickled")
    assert run_mergekit(text).keys() == values.keys()
    with pytest.raises(CheckpointError, match="safetensors"):
        run(home, text)


def test_a_part_of_the_base_alone_is_left_out_by_mergekit_and_copied_here(
    home: Warehouse, base: Path, tmp_path: Path
) -> None:
    lead, alone = tmp_path / "lead", "mtp.fc.weight"
    shutil.copytree(base, lead)
    values = read_model(base) | {alone: torch.arange(6.0)}
    save_file(values, lead / "model.safetensors", metadata={"format": "pt"})
    text = ONE.format(lead, write(tmp_path / "expert", 2, base=base)) + "dtype: float32\n"
    theirs, ours = run_mergekit(text), merged(home, text)
    assert alone not in theirs
    assert torch.equal(ours.pop(alone), values[alone])
    assert ours.keys() == theirs.keys()


def test_chat_templates_by_name_render_as_mergekits_for_chatml_alone() -> None:
    from mergekit._data import chat_templates

    messages = [{"role": "user", "content": " Hi there "}, {"role": "assistant", "content": "Yes"}]
    words = {"messages": messages, "bos_token": "<s>", "eos_token": "</s>"}
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    equal = {
        name: jinja.from_string(
            importlib.resources.files(chat_templates).joinpath(f"{name}.jinja").read_text()
        ).render(words)
        == jinja.from_string(built_in(name)).render(words)
        for name in BUILT_IN
    }
    assert equal == {name: name == "chatml" for name in BUILT_IN}


@pytest.mark.parametrize(
    "recipe_text",
    [
        "merge_method: ties\nbase_model: $base\nmodels:\n"
        "- {model: $e0, parameters: {weight: 1, density: -0.5}}\n",
        "merge_method: passthrough\nslices:\n- sources: [{model: $e0, layer_range: [2, 2]}]\n"
        "- sources: [{model: $e0, layer_range: [0, 2]}]\n",
        "merge_method: passthrough\nslices:\n- sources: [{model: $e0, layer_range: ['0', '2']}]\n",
    ],
)
def test_mergekit_takes_settings_without_a_meaning_and_we_refuse_them(
    home: Warehouse, family_of: FamilyOf, recipe_text: str
) -> None:
    text = fill(recipe_text, family_of("llama")) + "dtype: float32\n"
    assert run_mergekit(text)
    with pytest.raises(RecipeError, match=r"density|layer_range"):
        run(home, text)


def test_mergekit_stacks_layers_that_no_config_describes_and_we_refuse_them(
    home: Warehouse, family_of: FamilyOf, tmp_path: Path
) -> None:
    plain, slim = family_of("llama") / "base", tmp_path / "slim"
    shutil.copytree(plain, slim)
    tensors = load_file(slim / "model.safetensors")
    for name in [n for n in tensors if ".mlp." in n]:
        dim = name.endswith("down_proj.weight")
        tensors[name] = tensors[name].chunk(2, dim=int(dim))[0].contiguous()
    save_file(tensors, slim / "model.safetensors", {"format": "pt"})
    layers = "- sources: [{{model: {}, layer_range: [0, 1]}}]\n"
    text = f"merge_method: passthrough\nslices:\n{layers.format(plain)}{layers.format(slim)}"
    first, second = (run_mergekit(text)[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1))
    assert len(first) == 2 * len(second)
    with pytest.raises(IncompatibleCheckpointsError, match="fit no config"):
        run(home, text)
