"""Claim: a merge under a budget from elsewhere sends what its plan buys and little besides.

    python -m tests.lab.bench.bench_remote [--preset P] [--experts 5] [--latency 0.02]

The family is served by this machine, by S3's protocol and by the hub's. What is known of the models
is learned first, which reads all of them once; then downloads are removed before each merge: 10 %,
the same with every tenth answer cut, and without a budget. Bytes and requests are counted by the
server; a row says them, planned bytes, headers, seconds, and whether the ids are those of folders.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from tests.lab.bench.options import family_and_work, options
from tests.remote.servers import Fault, HubServer, S3FolderServer, Server, running, s3_environment

_TIMEOUT_S = 3600


def main() -> None:
    """Measure and print a table."""
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=5)
    parser.add_argument("--latency", type=float, default=0.02, help="seconds before each answer")
    parser.add_argument("--places", nargs="+", default=["s3", "hub"], choices=["s3", "hub"])
    args = parser.parse_args()
    family, work = family_and_work(args, args.experts)
    print("place  merge     sent MB  planned MB  ratio  requests  seconds  same ids")
    expected = _local(family, work, args.experts)
    for place in args.places:
        for name, row in _place(place, family, work, args.experts, args.latency):
            same = row["snapshot_id"] == expected.get((place, name.partition(" ")[0]))
            print(
                f"{place:5}  {name:8}  {row['sent'] / 1e6:7.1f}  {row['planned'] / 1e6:10.1f}  "
                f"{row['sent'] / row['planned']:.4f}  {row['requests']:8}  {row['seconds']:7.1f}  "
                f"{same}",
                flush=True,
            )


def _place(
    place: str, family: Path, work: Path, k: int, latency_s: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    home, downloads = work / f"remote-{place}", work / "downloads"
    hub = work / "hub"
    shutil.rmtree(home, ignore_errors=True)
    shutil.rmtree(hub, ignore_errors=True)
    hub.mkdir(parents=True)
    (hub / "org").symlink_to(family)
    made: Server = S3FolderServer(family) if place == "s3" else HubServer(hub)
    with running(made) as server:
        environment = {
            **s3_environment(server.url),
            "HF_ENDPOINT": server.url,
            "HF_HUB_CACHE": str(work / "no_cache"),
            "MERGEPIPE_DOWNLOADS": str(downloads),
            "HF_HUB_OFFLINE": "0",
        }
        prefix = "s3://models" if place == "s3" else "hf://org"
        recipe = _recipe(work / f"{place}.yml", prefix, k)
        shutil.rmtree(downloads, ignore_errors=True)
        _run(home, recipe, "10%", environment, "plan")
        server.latency_s = latency_s
        for name, budget in (("10%", "10%"), ("10% cut", "10%"), ("whole", "none")):
            shutil.rmtree(downloads, ignore_errors=True)
            server.seen.requests.clear()
            server.fault = _cutting() if name.endswith("cut") else _sound
            began = time.monotonic()
            found = _run(home, recipe, budget, environment, "merge", "--fresh")
            planned = found["expert_bytes_planned"] + found["base_bytes_read"]
            yield (
                name,
                {
                    "snapshot_id": found["snapshot_id"],
                    "planned": planned,
                    "sent": server.seen.nbytes,
                    "requests": len(server.seen.requests),
                    "seconds": time.monotonic() - began,
                },
            )
    shutil.rmtree(downloads, ignore_errors=True)
    shutil.rmtree(home, ignore_errors=True)


def _sound(method: str, path: str, number: int) -> None:
    """No fault."""


def _cutting() -> Callable[[str, str, int], Fault]:
    """Cuts every tenth answer."""
    gets = count(1)
    return lambda method, path, number: "cut" if method == "GET" and next(gets) % 10 == 0 else None


def _local(family: Path, work: Path, k: int) -> dict[tuple[str, str], str]:
    """The ids of the same merges from folders of the names that models have at each place."""
    found = {}
    for place, prefix in (("s3", ""), ("hub", "org-")):
        folder, home = work / f"local-{place}", work / f"home-{place}"
        for old in (folder, home):
            shutil.rmtree(old, ignore_errors=True)
        for model in sorted(family.iterdir()):
            if model.is_dir():
                shutil.copytree(model, folder / f"{prefix}{model.name}", copy_function=os.link)
        recipe = _recipe(work / "local.yml", f"{folder}", k, prefix)
        for name, budget in (("10%", "10%"), ("whole", "none")):
            ids = _run(home, recipe, budget, {}, "merge")
            found[place, name] = ids["snapshot_id"]
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _recipe(path: Path, at: str, k: int, prefix: str = "") -> Path:
    lines = ["merge_method: ties", f"base_model: {at}/{prefix}base", "models:"]
    for i in range(k):
        lines += [f"  - model: {at}/{prefix}expert_{i:02d}", "    parameters: {weight: 0.4}"]
    path.write_text("\n".join([*lines, "parameters: {density: 0.3}", "dtype: bfloat16", ""]))
    return path


def _run(
    home: Path, recipe: Path, budget: str, environment: dict[str, str], verb: str, *more: str
) -> dict[str, Any]:
    command = [sys.executable, "-m", "mergepipe_pipeline.cli.main", "--home", str(home), "--json"]
    done = subprocess.run(
        [*command, verb, str(recipe), "--budget", budget, *more],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
