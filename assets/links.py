"""Links between pages of the UI, as Markdown; they start at the webserver's root."""

from dataclasses import dataclass
from urllib.parse import quote

import dagster as dg

from mergepipe_pipeline.text import markdown


@dataclass(frozen=True, slots=True)
class Link:
    """A text that leads to a page."""

    text: str
    href: str

    @property
    def markdown(self) -> str:
        """The link as Markdown; its text is shown letter by letter."""
        return f"[{markdown(self.text)}]({self.href})"


def expert_link(name: str) -> Link:
    """To the partition of a checkpoint."""
    return Link(name, f"/assets/expert_index?view=partitions&partition={quote(name, safe='')}")


def dependents_link(expert: str) -> dg.MarkdownMetadataValue:
    """To all assets of recipes that use an expert, as they are when somebody follows the link."""
    chosen = quote(f'tag:"expert/{expert[:63]}"', safe="")
    link = Link(f"all assets that use {expert}", f"/assets?asset-selection={chosen}")
    return dg.MetadataValue.md(link.markdown)
