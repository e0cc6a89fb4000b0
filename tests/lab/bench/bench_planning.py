"""Claim: 100 experts of 70B parameters are planned in under 30 s and 4 GiB, in blocks of 1 Mi.

    python -m tests.lab.bench.bench_planning [--experts 100] [--layers 80] [--packs]

The checkpoints are sparse files (headers only take disk) in the layout of Llama 70B; their
statistics are synthetic but complete, samples included, and go through the catalog as
those of an analysis do. What is timed is the whole command `mergepipe plan`, in a process of its
own. Making the catalog takes minutes and about 3 GB; it is kept in the folder and used again. With
`--packs` every expert has a pack, of 51 MB beside its frames, which are holes in files.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from mergepipe_pipeline.checkpoints.header import build_header
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.pack import CHUNK_ELEMS, FACTORED, TIERS, PackedTensor
from mergepipe_pipeline.domain.segments import COARSE_ELEMS, Segments
from mergepipe_pipeline.domain.stats import (
    HIST_SHIFT,
    SAMPLE_WIDTH,
    ExpertStats,
    TensorStats,
    narrowed,
)
from mergepipe_pipeline.domain.view import view_of
from mergepipe_pipeline.facts.contents import Contents
from mergepipe_pipeline.operators.steps.sparsify import trim_count
from mergepipe_pipeline.packs.contents import packed_contents
from mergepipe_pipeline.packs.index import NO_TAILS, frames_path, pack_id_of, write_index
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.lab.bench import FOLDER

BLOCK_ELEMS = 1 << 20
BUDGET = "10%"
DENSITY = 0.2
METHODS = {"task_arithmetic": "weight: 0.3", "ties": f"weight: 1.0, density: {DENSITY}"}
QUERIES = {
    "largest blocks": "SELECT tensor, block, l2sq FROM block_stats ORDER BY l2sq DESC LIMIT 10",
    "energy per expert": "SELECT checkpoint_id, sum(l2sq) FROM tensor_stats GROUP BY 1",
    "zero blocks per tensor": (
        "SELECT tensor, count(*) FROM block_stats WHERE nonzero = 0 GROUP BY 1"
    ),
}

Shape = tuple[int, ...]


def llama_70b(layers: int) -> list[tuple[str, str, Shape]]:
    """Tensors of Llama 70B: hidden 8192, 64 heads, 8 key-value heads, 28672 inside, untied."""
    hidden, inside, kv, vocab = 8192, 28672, 1024, 128256
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (vocab, hidden)}
    for n in range(layers):
        at = f"model.layers.{n}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}mlp.down_proj.weight": (hidden, inside),
            f"{at}mlp.gate_proj.weight": (inside, hidden),
            f"{at}mlp.up_proj.weight": (inside, hidden),
            f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}self_attn.k_proj.weight": (kv, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, hidden),
            f"{at}self_attn.q_proj.weight": (hidden, hidden),
            f"{at}self_attn.v_proj.weight": (kv, hidden),
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    return [(name, "BF16", shape) for name, shape in shapes.items()]


def write_sparse(folder: Path, tensors: list[tuple[str, str, Shape]], layers: int) -> None:
    """A checkpoint folder whose weights are a hole in the file."""
    folder.mkdir(parents=True, exist_ok=True)
    header = build_header(tensors, {"format": "pt"})
    nbytes = sum(2 * int(np.prod(shape)) for _, _, shape in tensors)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(header)
        file.truncate(len(header) + nbytes)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))


def synthetic(seed: int, tensors: list[tuple[str, str, Shape]]) -> tuple[TensorStats, ...]:
    """Statistics as a fine-tune has them: layers and blocks of different sizes, a common part."""
    rng, grid = np.random.default_rng([7, seed]), BlockGrid(BLOCK_ELEMS)
    out = []
    for number, (name, _, shape) in enumerate(tensors):
        numel = int(np.prod(shape))
        blocks = grid.count(numel)
        lengths = np.minimum(BLOCK_ELEMS, numel - BLOCK_ELEMS * np.arange(blocks))
        sigma = 4e-4 * np.exp(0.7 * rng.standard_normal() + 0.4 * rng.standard_normal(blocks))
        l2sq = lengths * sigma**2
        common = np.random.default_rng([8, number]).standard_normal((blocks, SAMPLE_WIDTH))
        own = rng.standard_normal((blocks, SAMPLE_WIDTH), dtype=np.float32)
        draws = sigma[:, None] * (0.3 * common + 0.95 * own)
        edges, counts = np.unique(
            (np.abs(draws).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),
            return_counts=True,
        )
        out.append(
            TensorStats(
                tensor=name,
                base_tensor=name,
                dtype="BF16",
                base_dtype="BF16",
                digest=f"{seed:032x}{number:032x}",
                base_digest=f"{0:032x}{number:032x}",
                numel=numel,
                l1=float(lengths @ sigma) * 0.8,
                l2sq=float(l2sq.sum()),
                max_abs=float(5.5 * sigma.max()),
                nonzero=numel,
                hist_bins=edges,
                hist_counts=(counts * (numel / counts.sum())).astype(np.int64),
                block_l2sq=l2sq,
                block_max_abs=(5.5 * sigma).astype(np.float32),
                block_nonzero=lengths,
                block_sample=narrowed(draws.astype(np.float32)),
            )
        )
    return tuple(out)


def thresholds(stats: tuple[TensorStats, ...]) -> dict[str, tuple[float, ...]]:
    """The magnitude that a fifth of each tensor's elements reach, from its histogram."""
    out: dict[str, tuple[float, ...]] = {}
    for s in stats:
        keep = trim_count(s.numel, DENSITY)
        above = np.cumsum(s.hist_counts[::-1])[::-1]
        at = max(0, int(np.searchsorted(-above, -keep)) - 1)
        out[f"{s.tensor}#{keep}"] = (float(int(s.hist_bins[at]) << HIST_SHIFT), 0.0)
    return out


def prepare(home: Warehouse, n_experts: int, layers: int) -> None:
    """Checkpoints, registrations, digests and statistics, where the folder lacks them."""
    tensors = llama_70b(layers)
    catalog = home.catalog
    models = home.root / "models"
    ids = []
    for n, name in enumerate(["base", *(f"expert_{i:03d}" for i in range(n_experts))]):
        if not (models / name / "config.json").exists():
            write_sparse(models / name, tensors, layers)
        found = register(home, models / name, name, "base" if n else None)
        checkpoint_id = found.checkpoint.checkpoint_id
        ids.append(checkpoint_id)
        # Nothing was read of these files: what follows is believed of them where they lie.
        places = Contents(home, found.checkpoint).places
        place = places.place_of(found.checkpoint)
        assert place
        places.claim(place, found.checkpoint.root)
        if catalog.digests(checkpoint_id) is None:
            if n:
                stats = synthetic(n, tensors)
                facts = catalog.facts(ids[0], checkpoint_id)
                facts.put_stats(ExpertStats(ids[0], checkpoint_id, BLOCK_ELEMS, stats))
                facts.put_fact("keep-largest", thresholds(stats))
            digests = {t[0]: f"{n:08x}{i:08x}".encode() for i, t in enumerate(tensors)}
            taken = {name: (Segments(COARSE_ELEMS, of),) for name, of in digests.items()}
            catalog.contents(checkpoint_id).put(taken, list(digests))
            print(f"\r{n} of {n_experts} experts", end="", file=sys.stderr, flush=True)


def pack_all(home: Warehouse, n_experts: int, layers: int) -> None:
    """A pack of every expert: sizes and residuals of chunks as those of fine-tunes, no frames."""
    base = Model("base", (home.catalog.get("base").checkpoint,), {})
    base = replace(base, views={t.name: view_of(t) for t in base.checkpoint.tensors})
    base_digests = [home.catalog.digests(base.model_id) or {}]
    shares = np.array([0.001, 0.004, 0.015, 0.001, 0.03, 0.1, 0.1, 0.12, 0.2])
    left = np.array([0.8, 0.6, 0.5, 0.5, 0.35, 0.084, 0.0096, 0.3, 0.0])
    for n in range(n_experts):
        checkpoint = home.catalog.get(f"expert_{n:03d}").checkpoint
        expert = Model(checkpoint.name, (checkpoint,), base.views)
        digests = [home.catalog.digests(checkpoint.checkpoint_id) or {}]
        contents = packed_contents(expert, base, digests, base_digests)
        pack_id = pack_id_of(contents)
        if home.packs.path(pack_id).exists():
            continue
        rng, stats = np.random.default_rng([9, n]), synthetic(n + 1, llama_70b(layers))
        tensors, start_byte = [], np.zeros(len(TIERS), np.int64)
        known = {s.tensor: s for s in stats}
        for content in contents:
            s = known[content.name]
            per_block = BLOCK_ELEMS // CHUNK_ELEMS
            chunks = -(-s.numel // CHUNK_ELEMS)
            l2sq = np.repeat(s.block_l2sq / per_block, per_block)[:chunks].astype(np.float32)
            spread = rng.uniform(0.9, 1.1, (len(TIERS), chunks))
            nbytes = (2 * CHUNK_ELEMS * shares[:, None] * spread).astype(np.uint32)
            of_factors = nbytes[: len(FACTORED)].sum(axis=1)
            nbytes[: len(FACTORED)] = 0
            nbytes[: len(FACTORED), 0] = of_factors
            tensors.append(
                PackedTensor(
                    *content,
                    unit=9e-4,
                    factors="f" * 16,
                    threshold_bits=0x3A000000,
                    nbytes=nbytes,
                    checksums=np.zeros((len(TIERS), 0), np.uint64),
                    residual_sq=(left[:, None] * l2sq).astype(np.float32),
                    start_byte=start_byte.copy(),
                    tails=NO_TAILS,
                )
            )
            start_byte += nbytes.astype(np.int64).sum(axis=1)
        root = home.packs.path(pack_id)
        root.mkdir(parents=True)
        write_index(root, root, tensors)
        for tier, size in zip(TIERS, start_byte.tolist(), strict=True):
            with open(frames_path(root, tier), "wb") as file:
                file.truncate(size)


def write_recipe(home: Warehouse, method: str, n_experts: int) -> Path:
    """A recipe of all experts."""
    rows = "".join(
        f"- {{model: expert_{i:03d}, parameters: {{{METHODS[method]}}}}}\n"
        for i in range(n_experts)
    )
    path = home.recipe_path(f"plan_{method}")
    path.write_text(
        f"merge_method: {method}\nbase_model: base\nbudget: {BUDGET}\n"
        f"block_size: {BLOCK_ELEMS}\nmodels:\n{rows}"
    )
    return path


def timed(command: list[str]) -> tuple[float, float, str]:
    """Seconds and peak resident MiB of a process, and what it printed. Raises if it fails."""
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - started
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return seconds, peak_kib / 1024, done.stdout


def main() -> None:
    """Prepare, plan with each method, and query."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=100)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--home", default=FOLDER / "planning")
    parser.add_argument("--method", choices=METHODS, action="append")
    parser.add_argument("--packs", action="store_true", help="give every expert a pack")
    args = parser.parse_args()
    home = Warehouse.at(args.home).ensure()
    prepare(home, args.experts, args.layers)
    if args.packs:
        pack_all(home, args.experts, args.layers)
    size = sum(p.stat().st_size for p in home.catalog_dir.rglob("*.parquet"))
    blocks = args.experts * sum(
        BlockGrid(BLOCK_ELEMS).count(int(np.prod(s))) for _, _, s in llama_70b(args.layers)
    )
    print(f"\rcatalog: {blocks} blocks, {size / 1e9:.2f} GB, {size / blocks:.0f} bytes per block")
    tool = [sys.executable, "-m", "mergepipe_pipeline.cli.main", "--home", str(home.root)]
    for method in args.method or METHODS:
        recipe = write_recipe(home, method, args.experts)
        seconds, peak_mib, out = timed([*tool, "plan", str(recipe)])
        print(f"plan {method}: {seconds:.1f} s, peak {peak_mib:.0f} MiB")
        print("  " + "\n  ".join(out.strip().splitlines()[:8]))
    for name, query in QUERIES.items():
        seconds, _, _ = timed([*tool, "sql", query])
        print(f"sql, {name}: {seconds:.2f} s")


if __name__ == "__main__":
    main()
