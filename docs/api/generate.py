"""Writes the pages of the API reference: one for `ftopt`, one for each public module, and one for the keys of a recipe,
in mkdocstrings' syntax.

    python docs/api/generate.py

The pages only name the objects; the site takes signatures and texts from the docstrings. A test compares the pages with
what this program would write.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import ModuleType

MODULES: dict[str, tuple[str, ...]] = {
    "ftopt": (),
    "ftopt.methods": (),
    "ftopt.outer": (),
    "ftopt.fragments": (),
    "ftopt.triggers": (),
    "ftopt.codecs": (),
    "ftopt.undo": ("undo_step", "undoable", "Undone"),
    "ftopt.events": ("Event", "OnEvent"),
    "ftopt.errors": ("FtoptError", "UserError", "Unreachable", "Refused", "JobFailed", "JobOver"),
    "ftopt.integrations": ("advance", "finish"),
}
"""Modules, and what each offers; empty: every public name in it, since the module only gathers them."""
INHERITED = {"ftopt.ReplicaOptimizer": ["zero_grad", "add_param_group", "state_dict", "load_state_dict"]}
"""Members that a class inherits from a private class of ours, and that its page shows."""

RECIPE: dict[str, tuple[str, ...]] = {
    "the recipe": ("schema.Recipe",),
    "model": ("model_settings.GptConfig", "model_settings.ConvnetConfig", "model_settings.FactoryConfig"),
    "data": ("data_settings.Drawn", "data_settings.Text", "data_settings.TokensConfig", "data_settings.OwnData"),
    "task": ("task_settings.OwnTask",),
    "inner": (
        "inner_settings.InnerOptimizerConfig",
        "inner_settings.AdamWConfig",
        "inner_settings.SgdConfig",
        "inner_settings.MuonConfig",
        "inner_settings.TorchConfig",
    ),
    "inner.schedule": ("inner_settings.ConstantConfig", "inner_settings.CosineConfig"),
    "train": ("schema.TrainConfig",),
    "checkpoint": ("schema.CheckpointConfig",),
    "log": ("schema.LogConfig",),
}
"""Section of a recipe -> the dataclasses in ``ftopt.config`` whose fields are its keys."""


def public(module: ModuleType) -> list[str]:
    """The names that a module offers."""
    names = MODULES[module.__name__] or getattr(module, "__all__", None) or vars(module)
    return sorted(name for name in names if not name.startswith("_") and not inspect.ismodule(getattr(module, name)))


def reference(name: str) -> str:
    """One object."""
    members = INHERITED.get(name)
    return f"::: {name}" + (f"\n    options:\n      inherited_members: {members}" if members else "")


def page(name: str) -> str:
    """The page of a module."""
    module = importlib.import_module(name)
    text = inspect.getdoc(module) or ""
    first, _, rest = text.partition("\n\n")
    shown = [reference(f"{name}.{each}") for each in public(module)]
    return "\n\n".join(part for part in (f"# {name}", first, rest if name != "ftopt" else "", *shown) if part) + "\n"


def recipe() -> str:
    """The page of a recipe's keys."""
    options = "\n    options: {heading_level: 3, members: [], show_root_full_path: false, show_source: false}"
    parts = ["# Keys of a recipe"]
    for section, names in RECIPE.items():
        parts += [f"## {section}", *(f"::: ftopt.config.{name}{options}" for name in names)]
    parts += [
        "## method and policy",
        "The keys of `method` are the fields of its class in [ftopt.methods](ftopt.methods.md). Those of `policy` are "
        "the fields of `FaultPolicy` in [ftopt](ftopt.md).",
        "## faults",
        f"::: ftopt.run.fault_spec.Fault{options}",
    ]
    return "\n\n".join(parts) + "\n"


def pages() -> dict[str, str]:
    """The text of each page by its file's name."""
    lines = []
    for name in MODULES:
        summary = (inspect.getdoc(importlib.import_module(name)) or "").splitlines()[0]
        lines.append(f"- [`{name}`]({name}.md): {summary}")
    lines.append("- [Keys of a recipe](recipe.md): sections, keys, defaults, faults.")
    return {
        "index.md": "\n".join(["# API reference", "", *lines, ""]),
        **{f"{name}.md": page(name) for name in MODULES},
        "recipe.md": recipe(),
    }


if __name__ == "__main__":
    for file, text in pages().items():
        (Path(__file__).parent / file).write_text(text, "utf-8")
