"""Steps of training runs, really written by torch: FSDP2 on several processes, by gloo."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.spawn import spawn


class Weights(torch.nn.Module):
    """A module with exactly these tensors as its parameters, under these names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in tensors.items():
            *path, last = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            if value.dim():
                module.register_parameter(last, torch.nn.Parameter(value.clone()))
            else:
                module.register_buffer(last, value.clone())

    def forward(self) -> torch.Tensor:
        """A number that depends on all of them, so that all get a gradient."""
        return torch.stack([p.float().square().sum() for p in self.parameters()]).sum()


def save_alone(folder: Path, state: Mapping[str, Any], writer: Any = None, **how: Any) -> Path:
    """Save a state as one process does; `how` is what `save` takes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(dict(state), checkpoint_id=folder, storage_writer=writer, no_dist=True, **how)
    return folder


def save_sharded(models: Mapping[Path, Path], grid: tuple[Path, Path], ranks: int) -> None:
    """Save models, by the folder the file of safetensors of each, as processes with FSDP2 do.

    Beside each the states of AdamW. The last, `grid`, is cut along its columns, too, also where
    that is uneven.
    """
    with TemporaryDirectory() as place:
        spawn(_rank, (ranks, f"file://{place}/meeting", models, grid), nprocs=ranks)


def _rank(
    rank: int, ranks: int, meeting: str, models: Mapping[Path, Path], grid: tuple[Path, Path]
) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  it ends with the process
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    for folder, model in models.items():
        module = Weights(load_file(model))
        fully_shard(module, mesh=mesh)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.0, weight_decay=0.0)
        module().backward()
        optimizer.step()
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
        save(state, checkpoint_id=folder)
    cut = init_device_mesh("cpu", (ranks // 2, 2))
    placed = {
        name: distribute_tensor(t, cut, [Shard(0), Shard(1)]) if t.dim() > 1 else t
        for name, t in load_file(grid[1]).items()
    }
    save({"app": {"model": placed}}, checkpoint_id=grid[0])
    dist.destroy_process_group()


def load_all(folder: Path) -> Any:
    """All that was saved, as torch exports it."""
    with TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, f"{place}/all.pt")
        return torch.load(f"{place}/all.pt", weights_only=True)


def exported(folder: Path, to: Path, *keys: str) -> dict[str, torch.Tensor]:
    """The tensors below `keys` as torch exports them, written as safetensors into a folder."""
    state = load_all(folder)
    for key in keys:
        state = state[key]
    tensors = {n: t.clone().contiguous() for n, t in state.items() if isinstance(t, torch.Tensor)}
    to.mkdir(parents=True)
    save_file(tensors, to / "model.safetensors")
    return tensors
