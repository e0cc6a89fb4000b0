"""The command `land`."""

from __future__ import annotations

from dataclasses import asdict

import click

from mergepipe_pipeline.cli.common import Console, download_options, verb
from mergepipe_pipeline.text import listed, size


@click.command()
@click.argument("path", type=click.Path())
@click.option("--name", help="Name in the inbox (default: the folder's name).")
@click.option("--link", is_flag=True, help="Link the files instead of copying them.")
@click.option("--tag", "tags", multiple=True, help="Give the name a tag; see `tag`.")
@download_options
@verb
def land(console: Console, path: str, name: str | None, link: bool, tags: tuple[str, ...]) -> None:
    """Put a checkpoint into the inbox whole; it replaces an older version of its name.

    PATH is a folder or an address, as hf://org/model.
    """
    from mergepipe_pipeline.verbs.land import land as run

    done = run(console.warehouse, path, name, link=link, tags=tags, progress=console.progress)
    left_out = listed(done.left_out, 5)
    console.show(
        asdict(done),
        f"{done.name}: {done.files} file(s), {size(done.nbytes)}, in {done.path}"
        + (", in place of an older version" if done.replaced else "")
        + (f"; left out, as no part of a model: {left_out}" if left_out else ""),
    )
