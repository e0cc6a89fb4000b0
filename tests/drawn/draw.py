"""Draws a tiny model and its sibling from a seed, and writes both as their users would have them.

Names of tensors, config keys and ties are drawn: as `save_pretrained` writes them, as transformers 5
names its modules, or as older files of the hub. Each file is proven to hold its model: loaded again,
its tensors are those that were made.
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

from tests.drawn.architectures import ARCHITECTURES, Architecture, Draw, common

State = dict[str, torch.Tensor]
#: Numbers of a text that is longer than every window; special and image tokens are left out.
_WORDS, _LENGTH = (3, 56), 40
_NOISE = 0.05


@dataclass(frozen=True)
class Drawn:
    """A model type with its seed, and the two models that were written.

    `orders` are lists of source layers for passthrough slices; `spelling` and `sibling_spelling`
    say how the files name their tensors.
    """

    name: str
    seed: int
    folder: Path
    dtype: torch.dtype
    spelling: str
    sibling_spelling: str
    legacy: bool
    orders: tuple[tuple[int, ...], ...]
    config: Any

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def sibling(self) -> Path:
        return self.folder / "sibling"

    @property
    def sibling_elsewhere(self) -> Path:
        """The sibling in the other spelling; the same folder where there is one spelling only."""
        return self.folder / "sibling_elsewhere"

    def load(self, folder: Path) -> tuple[Any, list[str]]:
        """A model of a folder, as transformers loads it, and what does not fit in its files."""
        cls = getattr(transformers, ARCHITECTURES[self.name].auto)
        model, info = cls.from_pretrained(
            folder, dtype=self.dtype, attn_implementation="eager", output_loading_info=True
        )
        odd = [f"{key}: {sorted(map(str, names))[:2]}" for key, names in info.items() if names]
        return model.eval(), odd

    def logits(self, model: Any) -> torch.Tensor:
        """What a model says to the drawn text."""
        generator = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(*_WORDS, (1, _LENGTH), generator=generator)
        more = {} if not model.config.is_encoder_decoder else {"decoder_input_ids": ids.flip(1)}
        if ARCHITECTURES[self.name].auto != "AutoModelForMaskedLM":
            more["use_cache"] = False
        with torch.no_grad():
            return model(input_ids=ids, **more).logits[0].float()


def draw(name: str, seed: int, folder: Path) -> Drawn:
    """Write `model`, `sibling` and perhaps `sibling_elsewhere` into the folder."""
    rng = random.Random(f"{name} {seed}")
    torch.manual_seed(rng.randrange(2**31))
    what, d = ARCHITECTURES[name], Draw(rng, rng.randint(4, 6))
    dtype = torch.bfloat16 if d.chance(0.25) else torch.float32
    settings = {**common(d), **what.draw(d)}
    if "text_config" in settings:  # sizes are of the text part alone
        settings = what.draw(d)
    config = transformers.AutoConfig.for_model(name, **settings)
    model = _random(what, config, dtype, d)
    spellings = _spellings(model, what)
    here = d.pick(*spellings)
    elsewhere = d.pick(*(s for s in spellings if s != here)) if len(spellings) > 1 else here
    legacy, unlike = d.chance(), d.chance(0.3)
    drawn = Drawn(
        name,
        seed,
        folder,
        dtype,
        here,
        elsewhere,
        legacy,
        _orders(d) if what.sliced else (),
        config,
    )
    write(drawn, drawn.model, model, here)
    sibling = _sibling(model, what, unlike and _may_untie(model), d)
    write(drawn, drawn.sibling, sibling, here)
    if elsewhere != here:
        write(drawn, drawn.sibling_elsewhere, sibling, elsewhere)
    return drawn


def _random(what: Architecture, config: Any, dtype: torch.dtype, d: Draw) -> Any:
    """A model whose every parameter matters: no zero biases, no norms of one, no tiny matrices."""
    with _quiet():
        model = getattr(transformers, what.auto).from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.shape[-1] > 1:
            parameter.data.normal_(0, d.pick(0.15, 0.25))
        else:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(dtype).eval()


def _sibling(model: Any, what: Architecture, untied: bool, d: Draw) -> Any:
    """The model after a little training; `untied` gives it a head of its own."""
    config = copy.deepcopy(model.config)
    if untied:
        config.tie_word_embeddings = False
    with _quiet():
        sibling = getattr(transformers, what.auto).from_config(config, dtype=model.dtype)
    sibling.load_state_dict(model.state_dict())
    for parameter in sibling.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=_NOISE * d.pick(0.2, 1, 3))
    return sibling.eval()


def _may_untie(model: Any) -> bool:
    plain = not model.config.is_encoder_decoder and model.config.get_text_config() is model.config
    return plain and bool(model.config.tie_word_embeddings)


def _spellings(model: Any, what: Architecture) -> list[str]:
    own = set(model.state_dict())
    saved = transformers.core_model_loading.revert_weight_conversion(model, model.state_dict())
    out = ["saved", "modules"] if not set(saved) <= own else ["saved"]
    return [*out, "old"] if what.old else out


def write(drawn: Drawn, folder: Path, model: Any, spelling: str) -> None:
    """Save a model in a spelling, and prove that transformers finds all of it there."""
    what = ARCHITECTURES[drawn.name]
    model.save_pretrained(folder, save_original_format=spelling != "modules")
    file = folder / "model.safetensors"
    if spelling == "old":
        tensors = {_renamed(k, what.old): v for k, v in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    if drawn.legacy:
        _write_legacy(folder / "config.json", what)
    loaded, odd = drawn.load(folder)
    assert not odd, f"{drawn.name} {drawn.seed} {spelling}: the drawn file does not fit: {odd}"
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), f"{drawn.name} {spelling} {name}"


def _renamed(name: str, old: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in old:
        name = re.sub(pattern, replacement, name)
    return name


def _write_legacy(file: Path, what: Architecture) -> None:
    """Give config.json the keys of older files, where they mean the same."""
    text, meant = file.read_text(), transformers.AutoConfig.from_pretrained(file.parent).to_dict()
    config = json.loads(text)
    for part in (config, config.get("text_config", {})):
        for key, older in what.legacy:
            if key in part and older is not None:
                part[older] = part[key]
            part.pop(key, None)
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


class _quiet:  # noqa: N801
    """Keeps the random state of torch from what constructors draw, which differs by version."""

    def __enter__(self) -> None:
        self.state = torch.get_rng_state()

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self.state)


def hush() -> None:
    """Let transformers draw no bars and tell nothing that is judged here anyway."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
