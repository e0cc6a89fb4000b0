"""A window that slides by its kept sum is, bit by bit, the merge of all its checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mergepipe_pipeline.execution.run import MergeOutcome
from mergepipe_pipeline.execution.stages import plan_in_stages
from mergepipe_pipeline.execution.sums import slid_nbytes
from mergepipe_pipeline.resolution.recipe_text import load_recipe
from mergepipe_pipeline.storage import atomic
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.runs import register_run
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse
from tests.checkpoints.runs import save_alone
from tests.support.family import Size, tensors_of, write_model

LAST = 4
SIZE: Size = {"layers": 1, "hidden": 32, "vocab": 2100}  # a table of more than one piece


def step(folder: Path, number: int, dtype: torch.dtype, odd: float | None = None) -> Path:
    """A checkpoint of a run; `odd` stands in one place of one tensor."""
    tensors = tensors_of(number, None, **SIZE, dtype=dtype)
    for tensor in tensors.values():
        tensor.view(-1)[:3] = torch.tensor([0.0, -0.0, 1e-3 * number])
    if odd is not None:
        tensors["model.norm.weight"][7] = odd
    path = folder / "run" / f"checkpoint-{number}"
    return write_model(path, tensors, **SIZE)


class World:
    """A run that goes on, with the window of its last steps merged in a warehouse."""

    def __init__(self, home: Warehouse, folder: Path) -> None:
        self.home, self.folder = home, folder
        self.recipe = folder / "window.yml"
        weights = "weights: {schedule: uniform}"
        self.recipe.write_text(
            f"merge_method: linear\nmodels: [{{run: run, last: {LAST}, {weights}}}]\n"
        )

    def save(self, *numbers: int, dtype: torch.dtype = torch.bfloat16, odd: object = None) -> None:
        for number in numbers:
            path = step(self.folder, number, dtype, odd)  # type: ignore[arg-type]
            register(self.home, path, f"run.step-{number}")

    def slide(self) -> MergeOutcome:
        return merge(self.home, self.recipe).outcome

    def said(self) -> int | None:
        """What its plan says that a merge will read of experts beside the sums."""
        parsed = load_recipe(self.recipe, self.home)
        return slid_nbytes(self.home, plan_in_stages(self.home, parsed))

    def of_all(self, numbers: Sequence[int]) -> list[str]:
        """The layers of the same window, read whole in a warehouse that knows nothing."""
        other = Warehouse.at(self.folder / f"other-{'-'.join(map(str, numbers))}").ensure()
        names = [f"{self.folder}/run/checkpoint-{n}" for n in numbers]
        recipe = self.folder / "all.yml"
        models = "".join(f"- {{model: {name}}}\n" for name in names)
        recipe.write_text(f"merge_method: mean\nmodels:\n{models}")
        return layers(merge(other, recipe).outcome)


def layers(outcome: MergeOutcome) -> list[str]:
    return [shard.sha256 for shard in outcome.snapshot.manifest.shards]


@pytest.fixture
def world(home: Warehouse, tmp_path: Path) -> World:
    return World(home, tmp_path)


def nbytes(outcome: MergeOutcome) -> int:
    """The weights of one checkpoint."""
    return outcome.plan.estimates.expert_bytes_total // len(outcome.plan.sources)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_slide_reads_one_new_and_one_old_checkpoint_and_gives_the_bits_of_all(
    world: World, dtype: torch.dtype
) -> None:
    world.save(*range(1, LAST), dtype=dtype)
    assert world.said() is None
    first = world.slide()
    assert first.realised.expert_bytes_read == (LAST - 1) * nbytes(first)
    assert first.realised.sum_bytes_read == 0
    for number in range(LAST, LAST + 4):
        world.save(number, dtype=dtype)
        said, slid = world.said(), world.slide()
        changed = 1 if number == LAST else 2  # the window grows before it slides
        assert said == slid.realised.expert_bytes_read == changed * nbytes(slid)
        assert 0 < slid.realised.sum_bytes_read < 5 * nbytes(slid)
        assert layers(slid) == world.of_all(range(number - LAST + 1, number + 1))
        assert [m.text for m in slid.plan.request.models][-1] == f"run.step-{number}"
    assert not verify_all(world.home).findings


def test_a_run_that_torch_saved_slides_like_its_exports_once_its_steps_are_whole(
    world: World, tmp_path: Path
) -> None:
    run = tmp_path / "fsdp"
    for number in (1, 2, 3, 4):
        folder = run / f"checkpoint-{number}"
        exported = step(tmp_path, number, torch.bfloat16)
        state = {"model": load_file(exported / "model.safetensors"), "step": number}
        save_alone(folder, state)
        shutil.copy(exported / "config.json", folder)
    late = (run / "checkpoint-4" / ".metadata").rename(tmp_path / "late")
    recipe = tmp_path / "fsdp.yml"
    recipe.write_text("merge_method: mean\nmodels: [{run: fsdp, last: 3}]\n")
    assert [folder for folder, _ in register_run(world.home, run).left_out] == ["checkpoint-4"]
    assert layers(merge(world.home, recipe).outcome) == world.of_all([1, 2, 3])
    late.rename(run / "checkpoint-4" / ".metadata")
    assert register_run(world.home, run).new == ("fsdp.step-4",)
    slid = merge(world.home, recipe).outcome
    assert slid.realised.expert_bytes_read == 2 * nbytes(slid)
    assert layers(slid) == world.of_all([2, 3, 4])


def test_what_comes_twice_or_comes_back_is_counted_as_often(world: World) -> None:
    world.save(1, 2, 3, 4)
    world.slide()
    shutil.copytree(world.folder / "run" / "checkpoint-4", world.folder / "run" / "checkpoint-5")
    register(world.home, world.folder / "run" / "checkpoint-5", "run.step-5")
    slid = world.slide()
    assert slid.realised.expert_bytes_read == 2 * nbytes(slid)
    assert layers(slid) == world.of_all([2, 3, 4, 5])


def sums_files(home: Warehouse) -> list[Path]:
    return sorted(home.sums_dir.glob("window/*.sums"))


@pytest.mark.parametrize("where", [9, 0.5, -40, -3])
def test_a_flipped_bit_in_kept_sums_costs_reads_and_nothing_else(
    world: World, where: float
) -> None:
    world.save(1, 2, 3, 4)
    world.slide()
    assert sums_files(world.home)
    for file in sums_files(world.home):
        data = bytearray(file.read_bytes())
        data[int(where * len(data)) if isinstance(where, float) else where] ^= 4
        file.write_bytes(data)
    world.save(5)
    slid = world.slide()
    assert layers(slid) == world.of_all([2, 3, 4, 5])
    assert slid.realised.expert_bytes_read > 2 * nbytes(slid)


def test_a_step_that_left_the_disk_with_the_window_costs_reads_and_nothing_else(
    world: World,
) -> None:
    world.save(1, 2, 3, 4)
    world.slide()
    shutil.rmtree(world.folder / "run" / "checkpoint-1")
    world.save(5)
    slid = world.slide()
    assert slid.realised.expert_bytes_read == LAST * nbytes(slid)
    assert layers(slid) == world.of_all([2, 3, 4, 5])
    world.save(6)
    assert world.slide().realised.expert_bytes_read == 2 * nbytes(slid)


@pytest.mark.parametrize("at", [9, -9])
def test_a_step_that_rotted_after_it_was_merged_harms_no_window_that_it_has_left(
    world: World, at: int
) -> None:
    world.save(1, 2, 3, 4)
    world.slide()
    file = world.folder / "run" / "checkpoint-1" / "model.safetensors"
    times = file.stat()
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    world.save(5)
    slid = world.slide()
    assert layers(slid) == world.of_all([2, 3, 4, 5])


class CrashError(Exception):
    """The process would be dead here."""


def test_a_death_at_any_step_of_a_slide_leaves_sums_from_which_the_next_one_is_right(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.save(1, 2, 3, 4)
    world.slide()
    crashes = 0
    for number in range(5, 11):
        world.save(number)
        while True:
            # Each time further, every fifth time to the end.
            lives = iter(range(2 * crashes if crashes % 5 else 10**9))

            def die(_: str, lives: Iterator[int] = lives) -> None:
                if next(lives, None) is None:
                    raise CrashError

            monkeypatch.setattr(atomic, "crash_hook", die)
            with suppress(CrashError):
                slid = world.slide()
                break
            crashes += 1
        monkeypatch.setattr(atomic, "crash_hook", None)
        crashes += 1
        assert layers(slid) == world.of_all(range(number - LAST + 1, number + 1))
    assert crashes > 15


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 1e38])
def test_numbers_of_far_sizes_and_those_that_no_sum_holds_change_no_bit_of_the_rest(
    world: World, odd: float
) -> None:
    world.save(1, 2)
    world.save(3, odd=odd)
    world.save(4, odd=1e-38)
    world.slide()
    for number in range(5, 10):
        world.save(number)
        slid = world.slide()
        assert layers(slid) == world.of_all(range(number - LAST + 1, number + 1))
    assert slid.realised.expert_bytes_read == 2 * nbytes(slid)


def test_a_mean_without_a_run_keeps_nothing(world: World) -> None:
    world.save(1, 2)
    world.of_all([1, 2])
    other = Warehouse.at(world.folder / "other-1-2")
    assert not other.sums_dir.exists()
    assert np.isfinite(world.slide().wall_s)
