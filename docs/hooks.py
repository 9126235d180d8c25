"""Fills the list of methods in index.md when the site is built: it is read from the classes, so it cannot go stale."""

import importlib
import pkgutil
from typing import Any

import lightning_fcl
from lightning_fcl.types import MethodCard

MARK = "<!-- methods -->"


def cards() -> list[MethodCard]:
    """The card of every method in the house, by name."""
    modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(lightning_fcl.__path__, "lightning_fcl.")]
    kinds = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    own = [card for kind in kinds if isinstance(card := vars(kind).get("card"), MethodCard)]
    return sorted(own, key=lambda card: card.name.lower())


def table() -> str:
    """A Markdown table with a row per method."""
    lines = ["| method | acts on | needs | paper |", "|---|---|---|---|"]
    for card in cards():
        page = f"methods/{card.name.lower().replace(' ', '-')}.md"
        needs = ", ".join(card.needs) or "nothing more"
        lines.append(f"| [{card.name}]({page}) | {card.acts_on} | {needs} | [{card.paper}]({card.url}) |")
    return "\n".join(lines)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page."""
    return markdown.replace(MARK, table()) if MARK in markdown else markdown
