"""What the installed mergekit plans for a recipe, as JSON: run as a script in its own process.

Prints, per output tensor, each model's tensor name and parameters, and the method's parameters.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def planned(text: str) -> dict[str, Any]:
    """Output name to {"inputs": {model folder: [tensor, params]}, "params": params}."""
    import yaml
    from mergekit.architecture import get_architecture_info
    from mergekit.config import MergeConfiguration
    from mergekit.io.tasks import LoaderCache
    from mergekit.options import MergeOptions
    from mergekit.plan import MergePlanner

    config = MergeConfiguration.model_validate(yaml.safe_load(text))
    options = MergeOptions()
    LoaderCache().setup(options)
    arch = get_architecture_info(config, options)
    out_config = config.referenced_models()[0].config()
    out_config.num_hidden_layers = 64
    planner = MergePlanner(config, arch, options, out_config)
    planner._plan()
    found = {}
    for weight, task in planner._tensors:
        names = {m: w.name for m, w in task.gather_tensors.weight_info.items()}
        own = {m: dict(p.items()) for m, p in task.input_parameters.items()}
        found[weight.name] = {
            "params": dict(task.parameters.items()),
            "base": Path(str(task.base_model)).name if task.base_model else None,
            "inputs": {Path(str(m)).name: [names[m], own[m]] for m in task.model_order},
        }
    return found


if __name__ == "__main__":
    print(json.dumps([planned(Path(p).read_text(encoding="utf-8")) for p in sys.argv[1:]]))
