"""YAML and ``key=value`` to plain values, and a value to its type. Only this file imports OmegaConf."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ftopt.errors import UserError, from_extra

with from_extra("cli", "a recipe"):
    import yaml
    from omegaconf import MISSING, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

_MAX_BYTES = 1 << 20
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.(env|decode)")
_MAX_NODES = 100_000


def of_file(path: Path) -> dict[str, Any]:
    """The nested mappings of a recipe's file."""
    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise UserError(f"{path} has {size:,} bytes; a recipe has at most {_MAX_BYTES:,}: is this the right file?")
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if isinstance(root, yaml.ScalarNode | yaml.SequenceNode):
            what = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            raise UserError(f"{path} holds {what}; a recipe is a mapping, such as `ftopt cp diloco_bytes` gives")
        if _count(root, {}) > _MAX_NODES:
            raise UserError(f"{path} has more than {_MAX_NODES:,} values once its aliases (*) are expanded; use fewer")
        raw = _resolved(OmegaConf.load(path), str(path))
    except (OmegaConfBaseException, yaml.YAMLError, OSError, UnicodeDecodeError, RecursionError) as error:
        text = str(error) or type(error).__name__
        raise UserError(f"{path} cannot be read as YAML: {text}") from error
    assert isinstance(raw, dict)
    return {str(key): value for key, value in raw.items()}


def of_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """The nested mappings of ``key=value``."""
    try:
        raw = _resolved(OmegaConf.from_dotlist(list(overrides)), "an override")
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(f"an override cannot be read ({' '.join(overrides)}): {error}") from error
    assert isinstance(raw, dict)
    return {str(key): value for key, value in raw.items()}


def to_yaml(values: dict[str, Any]) -> str:
    """``values`` as YAML, which `of_file` reads back."""
    return OmegaConf.to_yaml(OmegaConf.create(values))


def as_type(hint: Any, value: Any) -> Any:
    """``value`` as ``hint``, converted as OmegaConf does (``1e-3``, ``"5"``, ``true``).

    Raises:
        TypeError: it is none.
    """
    if hint is str and isinstance(value, bool):
        value = "on" if value else "off"  # YAML reads the words on and off as true and false.
    try:
        if value == MISSING:
            raise TypeError
        node = OmegaConf.structured(_leaf_type(hint))
        OmegaConf.update(node, "value", value)
        return OmegaConf.to_container(node, resolve=True)["value"]  # type: ignore[index,call-overload]
    except OmegaConfBaseException as error:
        raise TypeError from error


@cache
def _leaf_type(hint: Any) -> type:
    """A dataclass by which OmegaConf checks a value of that type; creating it takes as long as the check."""
    return dataclasses.make_dataclass("leaf", [("value", hint)])


def _resolved(config: Any, where: str) -> Any:
    """The settings with references to other settings (``${train.batch_size}``) replaced. UserError: a setting refers to
    the environment. Its value may be secret, and would get into the run's folder, its report and the trackers."""
    if (found := _ENVIRONMENT.search(yaml.safe_dump(OmegaConf.to_container(config, resolve=False)))) is not None:
        raise UserError(
            f"{where} refers to the environment ({found[0]}...): its value would be written in clear into recipe.yaml, "
            "the report and the trackers; write the value itself, set it as an override from the shell, or read a "
            "secret in your own code"
        )
    return OmegaConf.to_container(config, resolve=True)


def _count(node: yaml.Node | None, known: dict[int, int]) -> int:
    """The number of values in a YAML document with its aliases expanded, which may not fit into memory."""
    if node is None or isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = _MAX_NODES  # an alias to a part that contains it is infinite
        parts = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1 + sum(_count(part, known) for part in parts)
    return known[id(node)]
