"""YAML and ``key=value`` to a checked `Recipe`, with every error at once. Only this file imports OmegaConf.

A section is built bottom up: unknown keys are reported with the nearest valid one, each leaf is checked against its
type by an OmegaConf structured config, then the dataclass checks its values. A wrong setting is reported, and its
section built with the default instead, so that one pass finds every error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from ftopt.common.plural import count
from ftopt.config.choices import (
    CHOICES,
    LISTS,
    REQUIRED,
    SHORT,
    WITH_FACTORIES,
    choices_of,
    class_of,
    join,
    name_of,
    section_of,
    unknown,
)
from ftopt.config.own_code import located
from ftopt.config.schema import Recipe
from ftopt.config.shipped import check_overrides, locate
from ftopt.errors import UserError, from_extra
from ftopt.methods import LocalSGD
from ftopt.run.fault_spec import Fault

with from_extra("cli", "a recipe"):
    import yaml
    from omegaconf import MISSING, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

_MAX_BYTES = 1 << 20
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.(env|decode)")
_MAX_NODES = 100_000


def load(source: str, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe.

    Args:
        source: a shipped name or a path.
        overrides: ``key=value``, dotted keys, values as in YAML; ``1e-3`` is a number.

    Raises:
        UserError: the recipe is wrong; lists all errors at once.
    """
    reading = examine(source, overrides)
    if reading.recipe is None or reading.errors:
        raise listed(source, reading.errors)
    return reading.recipe


def listed(source: str, errors: Sequence[str]) -> UserError:
    """One error that lists all errors of a recipe."""
    return UserError(f"recipe {source}: {count(len(errors), 'error')}\n" + "\n".join(f"  {line}" for line in errors))


@dataclasses.dataclass
class Reading:
    """The result of reading a recipe that may be wrong.

    Attributes:
        recipe: with defaults in place of wrong values; None if there is not even a mapping.
        wrong: paths of the settings, and of whole sections, in it that are not the user's.
        errors: the messages.
    """

    recipe: Recipe | None = None
    wrong: set[str] = dataclasses.field(default_factory=set)
    errors: list[str] = dataclasses.field(default_factory=list)

    def refuse(self, path: str, text: str) -> None:
        self.errors.append(text)
        self.wrong.add(path)


def examine(source: str, overrides: Sequence[str] = ()) -> Reading:
    """Reads a recipe as far as possible.

    Raises:
        UserError: the recipe cannot be read at all.
    """
    return examined(read(source, overrides))


def read(source: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The nested mappings of a recipe with its overrides; paths to files of factories are absolute.

    Raises:
        UserError: the recipe cannot be read.
    """
    path = locate(source)
    raw: dict[str, Any] = _merge(_named(_read(path)), _named(_dotted(overrides)), "")
    for section in (raw[key] for key in WITH_FACTORIES if isinstance(raw.get(key), dict)):
        if isinstance(spec := section.get("factory"), str):
            section["factory"] = located(spec, path.resolve().parent)
    return raw


def _named(raw: dict[str, Any]) -> dict[str, Any]:
    """Names sections with a ``factory`` and no ``name``: they are the user's own."""
    for key in WITH_FACTORIES:
        if isinstance(section := raw.get(key), dict) and "factory" in section:
            section.setdefault("name", "factory")
    return raw


_STAND_INS: Mapping[str, Any] = {"name": "unnamed", "method": LocalSGD(sync_every=1)}
"""Values for required settings that a recipe does not give."""


def examined(raw: Mapping[str, Any]) -> Reading:
    """Reads the nested mappings of a recipe as far as possible."""
    found = Reading()
    found.recipe = _section(Recipe, raw, "", found, _STAND_INS)
    if found.recipe is not None:
        sections = {path.partition(".")[0].partition("[")[0] for path in found.wrong}
        found.errors += [text for text in found.recipe.problems() if not _mentions(text, sections)]
    return found


def _mentions(text: str, words: Collection[str]) -> bool:
    return any(re.search(rf"\b{re.escape(word)}\b", text) for word in words)


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML; `load` reads it back to an equal one."""
    return OmegaConf.to_yaml(OmegaConf.create(as_dict(recipe)))


def as_dict(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe as nested dicts, each choice with its ``name``."""
    plain: dict[str, Any] = _plain(recipe, "")
    return plain


def _plain(instance: Any, path: str) -> Any:
    if isinstance(instance, list | tuple):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(instance)]
    if not dataclasses.is_dataclass(instance):
        return instance
    name = {"name": name_of(path, instance)} if choices_of(path) else {}
    names = [field.name for field in dataclasses.fields(instance) if not field.metadata.get("alias")]
    return name | {key: _plain(getattr(instance, key), join(path, key)) for key in names}


def _read(path: Path) -> dict[str, Any]:
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


def _resolved(config: Any, where: str) -> Any:
    """The settings with references to other settings (``${train.batch_size}``) replaced.

    Raises:
        UserError: a setting refers to the environment. Its value may be secret, and would get into the run's folder,
            its report and the trackers.
    """
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


def _dotted(overrides: Sequence[str]) -> dict[str, Any]:
    check_overrides(overrides)
    try:
        raw = _resolved(OmegaConf.from_dotlist(list(overrides)), "an override")
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(f"an override cannot be read ({' '.join(overrides)}): {error}") from error
    assert isinstance(raw, dict)
    return {str(key): value for key, value in raw.items()}


def _merge(base: Any, over: Any, path: str) -> Any:
    """``over`` on top of ``base``. Another name in a choice drops the settings that the new choice does not have."""
    if section_of(path) in LISTS and isinstance(base, list) and isinstance(over, dict) and over and "name" not in over:
        return _merge_items(base, over, path)
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    name = over.get("name")
    if choices_of(path) and name not in (None, base.get("name")):
        with contextlib.suppress(UserError):  # a wrong name is reported later with the other errors
            kept = {field.name for field in dataclasses.fields(class_of(path, name))}
            base = {key: value for key, value in base.items() if key in kept}
    merged = {key: _merge(base[key], value, join(path, key)) if key in base else value for key, value in over.items()}
    return base | merged


def _merge_items(base: list[Any], over: dict[Any, Any], path: str) -> list[Any]:
    """Merges ``over``, which has settings of list items by their numbers, ``inner.0.lr=1e-3``."""
    if wrong := [key for key in over if not (str(key).isdecimal() and int(key) < len(base))]:
        raise UserError(
            f"{join(path, str(wrong[0]))}: {path} is a list here; name one of its items, {path}.0 to "
            f"{path}.{len(base) - 1}, or override it as a whole"
        )
    merged = list(base)
    for key, value in over.items():
        merged[int(key)] = _merge(base[int(key)], value, f"{path}[{key}]")
    return merged


def _section(cls: type, raw: Any, path: str, found: Reading, stand_ins: Mapping[str, Any] | None = None) -> Any | None:
    """An instance of ``cls``, with defaults (or ``stand_ins``) for wrong settings, which are added to ``found``; None
    if one of them has no default."""
    fields = {field.name: field for field in dataclasses.fields(cls) if not field.metadata.get("internal")}
    if not isinstance(raw, Mapping):
        found.refuse(path, f"{path}={raw!r}; must be a section with keys: {', '.join(fields)}")
        return None
    hints = typing.get_type_hints(cls)
    named = choices_of(path) is not None
    values = dict(stand_ins or {})
    wrong: set[str] = set()
    for key, value in raw.items():
        where = join(path, str(key))
        if key == "name" and named:
            continue
        if key not in fields:
            found.errors.append(unknown(str(key), path, [*fields, *(["name"] if named else [])]))
            continue
        before = len(found.errors)
        made = _value(fields[key], hints[key], value, where, found)
        if len(found.errors) == before or made is not None:
            values[key] = made
        else:
            wrong.add(key)
            found.wrong.add(where)
    for name, field in fields.items():
        if name not in raw and _is_needed(field):
            found.refuse(join(path, name), f"{join(path, name)} is missing; a recipe must give it")
    return _built(cls, values, path, found, wrong)


def _value(field: dataclasses.Field[Any], hint: Any, value: Any, where: str, found: Reading) -> Any:
    """The value of one setting; None also if it is wrong."""
    if section_of(where) in LISTS and (isinstance(value, list) or not choices_of(where)):
        return _items(value, where, found)
    if where in SHORT and isinstance(value, str):
        return value
    if choices_of(where):
        optional = value is None and field.default is None
        return None if optional else _choice(value, where, found, _default_name(field, where))
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return _section(hint, value, where, found)
    if hint == list[Fault]:
        return _items(value, where, found)
    return _leaf(hint, value, where, found)


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def _built(cls: type, values: dict[str, Any], path: str, found: Reading, wrong: set[str]) -> Any | None:
    """``cls(**values)``. A dataclass reports one wrong value: it is left out, and the rest tried again. Messages that
    mention a ``wrong`` setting are not reported, since its default may have caused them."""
    needed = {field.name for field in dataclasses.fields(cls) if _is_needed(field)}
    while needed <= values.keys():
        try:
            return cls(**values)
        except (TypeError, ValueError) as error:  # a user's own method may raise other errors than UserError
            text = _placed(str(error), path)
        if not _mentions(text, wrong):
            found.errors.append(text)
        own = re.match(rf"{re.escape(path)}\.(\w+)", text)
        if own is None or own[1] not in values:
            break
        wrong.add(own[1])
        found.wrong.add(join(path, own[1]))
        del values[own[1]]
    found.wrong.add(path)
    return None


def _placed(message: str, path: str) -> str:
    """``message`` with the path of its section: a dataclass may or may not name its own section."""
    if not path or message.startswith(path):
        return message
    section = section_of(path)
    for own in (section, section.rpartition(".")[2]):
        if message.startswith(f"{own}."):
            return f"{path}{message.removeprefix(own)}"
    if re.match(r"\w+=", message):
        return f"{path}.{message}"
    return f"{path}: {message}"


def _default_name(field: dataclasses.Field[Any], path: str) -> str | None:
    """The name for a section without one: that of the field's own default, if it has one."""
    made = field.default_factory
    return None if made is dataclasses.MISSING else name_of(path, made())


def _choice(raw: Any, path: str, found: Reading, default: str | None = None) -> Any | None:
    """Builds a section with a choice. ``default``: the name if it gives none; None: the first choice, or required."""
    choices = CHOICES[section_of(path)]
    if not isinstance(raw, Mapping):
        found.refuse(path, f"{path}={raw!r}; must be a section, e.g. {path}: {{name: {next(iter(choices))}, ...}}")
        return None
    name = raw.get("name", default or (None if section_of(path) in REQUIRED else next(iter(choices))))
    try:
        return _section(class_of(path, name), raw, path, found)
    except UserError as error:
        found.refuse(path, str(error))
        return None


def _items(raw: Any, path: str, found: Reading) -> list[Any] | None:
    """Builds the sections of a list, each with a choice of its own; faults have no choice."""
    choices = choices_of(f"{path}[0]")
    if not isinstance(raw, list):
        example = (
            f"name: {next(iter(choices))}, ..." if choices else "replica: 1, at_step: 120, point: reduce, do: kill"
        )
        found.refuse(path, f"{path}={raw!r}; must be a list of sections, e.g. [{{{example}}}]")
        return None
    places = [f"{path}[{index}]" for index in range(len(raw))]
    build = _choice if choices else partial(_section, Fault)
    made = [build(item, place, found) for item, place in zip(raw, places, strict=True)]
    return [item for item in made if item is not None] or (None if raw else [])


def _leaf(hint: Any, value: Any, path: str, found: Reading) -> Any:
    """``value`` as ``hint``, converted as OmegaConf does (``1e-3``, ``"5"``, ``true``)."""
    if hint is str and isinstance(value, bool):
        value = "on" if value else "off"  # YAML reads the words on and off as true and false.
    try:
        if value == MISSING:
            raise OmegaConfBaseException
        node = OmegaConf.structured(_leaf_type(hint))
        OmegaConf.update(node, "value", value)
        return OmegaConf.to_container(node, resolve=True)["value"]  # type: ignore[index,call-overload]
    except OmegaConfBaseException:
        got = type(value).__name__ if value is not None else "null"
        found.refuse(path, f"{path}={value!r} ({got}); must be {_words(hint)}")
        return None


@cache
def _leaf_type(hint: Any) -> type:
    """A dataclass by which OmegaConf checks a value of that type; creating it takes as long as the check."""
    return dataclasses.make_dataclass("leaf", [("value", hint)])


_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", type(None): "null"}


def _words(hint: Any) -> str:
    if typing.get_origin(hint) is list:
        return f"a list, each item {_words(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is dict:
        return "a mapping"
    parts = typing.get_args(hint) or (hint,)
    return " or ".join(_WORDS.get(part, str(part)) for part in parts)
