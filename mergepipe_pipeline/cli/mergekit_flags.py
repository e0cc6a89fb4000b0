"""Commands that know mergekit's own options: each that is typed in is answered with what to do."""

from __future__ import annotations

from typing import NamedTuple

import click


class _Flag(NamedTuple):
    """The answer to an option of mergekit, and whether it takes a value there."""

    answer: str
    takes_value: bool = False


_BOUNDED = "leave it out: tensors are streamed in bounded memory, which `--memory` sets"
_CHATTY = "leave it out: warnings and progress go to stderr, and `--json` is for machines"
_WRITES = "leave it out: results are written while others are computed"
#: mergekit 0.1.5's options that commands over recipes do not share.
_FLAGS = {
    "--allow-crimes": _Flag("leave it out: `check` warns where architectures differ"),
    "--async-write": _Flag(_WRITES),
    "--clone-tensors": _Flag("leave it out: a layer may be taken several times"),
    "--cuda": _Flag("write `--device cuda` after `merge`"),
    "--gpu-rich": _Flag("write `--device cuda` after `merge`"),
    "--lazy-unpickle": _Flag(
        "leave it out: safetensors are read in parts, and `mergepipe convert` makes them of .bin"
    ),
    "--lora-merge-cache": _Flag("leave it out: adapters are merged as they are read", True),
    "--lora-merge-dtype": _Flag("leave it out: adapters are merged in float32", True),
    "--low-cpu-memory": _Flag(_BOUNDED),
    "--multi-gpu": _Flag("leave it out: `--device cuda:N` chooses the one that computes"),
    "--num-threads": _Flag("write `--threads N` after `merge`", True),
    "--quiet": _Flag(_CHATTY),
    "--random-seed": _Flag("write `seed: N` in the recipe", True),
    "--read-to-gpu": _Flag(_BOUNDED),
    "--safe-serialization": _Flag("leave it out: results are safetensors"),
    "--transformers-cache": _Flag("set the variable HF_HUB_CACHE to the folder", True),
    "--trust-remote-code": _Flag("leave it out: no code of a model is run"),
    "--verbose": _Flag(_CHATTY),
    "--write-model-card": _Flag("leave it out: every result has a README.md"),
    "--write-threads": _Flag(_WRITES, True),
    "-j": _Flag("write `--threads N` after `merge`", True),
    "-v": _Flag(_CHATTY),
}
_NEGATION = "--no-"


class RecipeCommand(click.Command):
    """A command over a recipe. Options of mergekit, and its second argument, get an answer."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does; raises UsageError with every answer there is."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            answers = self._answers(ctx, given)
            if not answers:
                raise
            lines = "\n".join(f"  {text}: {answer}" for text, answer in answers.items())
            raise click.UsageError(f"written as for mergekit, and here:\n{lines}", ctx) from error

    def _answers(self, ctx: click.Context, given: list[str]) -> dict[str, str]:
        own = {name for p in self.params for name in (*p.opts, *p.secondary_opts)}
        answers, kept, words = {}, [], iter(given)
        for word in words:
            name, _, value = word.partition("=")
            flag = None if name in own else _FLAGS.get(name)
            if flag is None and name.startswith(_NEGATION) and name not in own:
                positive = f"--{name.removeprefix(_NEGATION)}"
                flag = _Flag("leave it out") if positive in own | _FLAGS.keys() else None
            if flag is None:
                kept.append(word)
                continue
            answers[name] = flag.answer
            if flag.takes_value and not value:
                next(words, None)
        try:
            _, others, _ = self.make_parser(ctx).parse_args(kept)
        except click.UsageError:
            return answers
        return {**{text: self._for_argument(text) for text in others[:1]}, **answers}

    def _for_argument(self, text: str) -> str:
        has_out = any("--out" in p.opts for p in self.params)
        return f"write `--out {text}`" if has_out else f"write `--out {text}` after `merge`"
