"""Draws a tiny model and its sibling from a seed, and writes both as their users would have them.

Names of tensors, config keys and ties are drawn: as `save_pretrained` writes them, as transformers
5 names its modules, or as older files of the hub. Each file is proven to hold its model: loaded
again, its tensors are those that were made.
"""

from __future__ import annotations

import copy
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.drawn.architectures import OLDER_NAMES, Draw, auto_class, draw_config, is_sliced

#: Numbers of a text that is longer than every window; special and image tokens are left out.
_WORDS, _LENGTH = (3, 56), 40
_NOISE = 0.05


@dataclass(frozen=True)
class Drawn:
    """A model type with its seed, and the folders where its models were written.

    `orders` are lists of source layers for passthrough slices; `elsewhere` is the spelling of
    tensors' names in `sibling_elsewhere`, which is there if there are two spellings.
    """

    name: str
    seed: int
    folder: Path
    dtype: torch.dtype
    elsewhere: str
    older_keys: bool
    orders: tuple[tuple[int, ...], ...]

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def sibling(self) -> Path:
        return self.folder / "sibling"

    @property
    def sibling_elsewhere(self) -> Path:
        return self.folder / "sibling_elsewhere"

    def load(self, folder: Path) -> tuple[Any, list[str]]:
        """A model of a folder, as transformers loads it, and what does not fit in its files."""
        cls = getattr(transformers, auto_class(self.name))
        model, info = cls.from_pretrained(
            folder, dtype=self.dtype, attn_implementation="eager", output_loading_info=True
        )
        odd = [f"{key}: {sorted(map(str, names))[:2]}" for key, names in info.items() if names]
        return model.eval(), odd

    def logits(self, model: Any) -> torch.Tensor:
        """What a model says to the drawn text."""
        generator = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(*_WORDS, (1, _LENGTH), generator=generator)
        more: dict[str, Any] = {}
        if model.config.is_encoder_decoder:
            more["decoder_input_ids"] = ids.flip(1)
        if auto_class(self.name) != "AutoModelForMaskedLM":
            more["use_cache"] = False
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=ids, **more).logits
        return logits[0].float()


def draw(name: str, seed: int, folder: Path) -> Drawn:
    """Write `model`, `sibling` and perhaps `sibling_elsewhere` into the folder."""
    rng = random.Random(f"{name} {seed}")
    torch.manual_seed(rng.randrange(2**31))
    d = Draw(rng, rng.randint(4, 6))
    dtype = torch.bfloat16 if d.chance(0.25) else torch.float32
    config = transformers.AutoConfig.for_model(name, **draw_config(name, d))
    model = _random(name, config, dtype, d)
    spellings = _spellings(name, model)
    d.rng.shuffle(spellings)
    here, elsewhere = spellings[0], spellings[-1]
    orders = _orders(d) if is_sliced(name) else ()
    drawn = Drawn(name, seed, folder, dtype, elsewhere, d.chance(0.5), orders)
    write(drawn, drawn.model, model, here)
    sibling = _sibling(name, model, d)
    write(drawn, drawn.sibling, sibling, here)
    if elsewhere != here:
        write(drawn, drawn.sibling_elsewhere, sibling, elsewhere)
    return drawn


def write(drawn: Drawn, folder: Path, model: Any, spelling: str) -> None:
    """Save a model in a spelling, and prove that transformers finds all of it there."""
    model.save_pretrained(folder, save_original_format=spelling != "modules")
    file = folder / "model.safetensors"
    if spelling == "older":
        tensors = {re.sub(*OLDER_NAMES[drawn.name], k): v for k, v in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    if drawn.older_keys:
        _write_older_keys(folder / "config.json")
    loaded, odd = drawn.load(folder)
    assert not odd, f"{drawn.name} {drawn.seed} {spelling}: the drawn file does not fit: {odd}"
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), f"{drawn.name} {spelling} {name}"


def hush() -> None:
    """Let transformers draw no bars and tell nothing that is judged here anyway."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _random(name: str, config: Any, dtype: torch.dtype, d: Draw) -> Any:
    """A model whose every parameter matters: no zero biases, no norms of one, no tiny matrices."""
    model = getattr(transformers, auto_class(name)).from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.shape[-1] > 1:
            parameter.data.normal_(0, d.pick(0.15, 0.25))
        else:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(dtype).eval()


def _sibling(name: str, model: Any, d: Draw) -> Any:
    """The model after a little training, perhaps with a head of its own."""
    config = copy.deepcopy(model.config)
    if is_sliced(name) and d.chance(0.3):
        config.tie_word_embeddings = False
    sibling = getattr(transformers, auto_class(name)).from_config(config, dtype=model.dtype)
    sibling.load_state_dict(model.state_dict())
    for parameter in sibling.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=_NOISE * d.pick(0.2, 1, 3))
    return sibling.eval()


def _spellings(name: str, model: Any) -> list[str]:
    """How files may name the tensors of a model."""
    own = model.state_dict()
    saved = transformers.core_model_loading.revert_weight_conversion(model, own)
    out = ["saved"] if saved.keys() <= own.keys() else ["saved", "modules"]
    return [*out, "older"] if name in OLDER_NAMES else out


def _write_older_keys(file: Path) -> None:
    """Give config.json the keys of files before transformers 5, where they mean the same."""
    text, meant = file.read_text(), transformers.AutoConfig.from_pretrained(file.parent).to_dict()
    config = json.loads(text)
    for part in (config, config.get("text_config", {})):
        part.pop("layer_types", None)
        if "_sliding_window_pattern" in part:
            part["sliding_window_pattern"] = part.pop("_sliding_window_pattern")
        rope = part.get("rope_parameters") or {}
        if set(rope) == {"rope_theta", "rope_type"} and rope["rope_type"] == "default":
            part["rope_theta"] = part.pop("rope_parameters")["rope_theta"]
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    file.write_text(json.dumps(config, indent=1))
    if transformers.AutoConfig.from_pretrained(file.parent).to_dict() != meant:
        file.write_text(text)


def _orders(d: Draw) -> tuple[tuple[int, ...], ...]:
    """Source layers of two sliced models: one without a layer, one that repeats or moves some."""
    n = d.layers
    gone, cut = d.rng.randrange(n), d.rng.randint(1, n - 1)
    dropped = [i for i in range(n) if i != gone]
    repeated = [*range(cut + 1), *range(cut, n)]
    moved = [*range(cut, n), *range(cut)]
    return tuple(dropped), tuple(repeated if d.chance(0.7) else moved)
