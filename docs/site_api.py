"""The API reference of the site: a page for `ftopt` and one for each public module, made from the docstrings.

A hook of mkdocs. Nothing is written into ``docs/``: the pages exist while the site is built.
"""

from __future__ import annotations

import importlib
import inspect
import re
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

MODULES = ("ftopt", "ftopt.methods", "ftopt.outer", "ftopt.fragments", "ftopt.triggers", "ftopt.codecs")


def public(module: ModuleType) -> list[str]:
    """The names that a module offers: ``__all__``, or what it imports under the same name."""
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    values = {name: getattr(module, name) for name in names}
    return sorted(name for name, value in values.items() if not inspect.ismodule(value) and name != "annotations")


INHERITED = {"ftopt.ReplicaOptimizer": ["zero_grad", "add_param_group", "state_dict", "load_state_dict"]}
"""Members that a class has from another one of ours, and that its page shows."""


def reference(name: str) -> str:
    """One object, in mkdocstrings' syntax."""
    members = INHERITED.get(name)
    return f"::: {name}" + (f"\n    options:\n      inherited_members: {members}" if members else "")


def page(name: str) -> str:
    """The page of a module."""
    module = importlib.import_module(name)
    shown = "\n\n".join(reference(f"{name}.{each}") for each in public(module))
    first, _, rest = (inspect.getdoc(module) or "").partition("\n\n")
    return f"# {name}\n\n{first}\n\n{rest if name != 'ftopt' else ''}\n\n{shown}\n"


def on_config(config: MkDocsConfig) -> None:
    """Puts the pages behind the overview."""
    nav: list[dict[str, Any]] = config.nav or []
    nav[-1]["API reference"] += [{name: f"api/{name}.md"} for name in MODULES]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    lines = [
        f"- [`{name}`]({name}.md): {inspect.getdoc(importlib.import_module(name)).splitlines()[0]}" for name in MODULES
    ]  # type: ignore[union-attr]
    files.append(File.generated(config, "api/index.md", content="\n".join(["# API reference", "", *lines, ""])))
    for name in MODULES:
        files.append(File.generated(config, f"api/{name}.md", content=page(name)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """What is not in ``docs/`` is not on the site: a link to it becomes its text."""
    return re.sub(r"\[([^\]]*)\]\(\.\./[^)]*\)", r"\1", markdown)


def on_page_content(html: str, **_: object) -> str:
    """Docstrings introduce their examples with ``::``, which Markdown does not know."""
    return html.replace("<p>::</p>", "").replace("::</p>", ":</p>")
