"""The nested mappings of a recipe to a checked `Recipe`, with every error at once.

A section is built bottom up: unknown keys are reported with the nearest valid one, each leaf is checked against its
type, then the dataclass checks its values. A wrong setting is reported, and its section built with the default instead,
so that one pass finds every error. `ftopt.config.reading` makes the mappings of files and overrides.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from ftopt.common.plural import count
from ftopt.config.choices import (
    CHOICES,
    LISTS,
    REQUIRED,
    SHORT,
    choices_of,
    class_of,
    join,
    name_of,
    section_of,
    unknown,
)
from ftopt.config.reading import read
from ftopt.config.schema import Recipe
from ftopt.config.values import as_type, to_yaml
from ftopt.errors import UserError
from ftopt.methods import LocalSGD
from ftopt.methods.short_runs import outer_problems
from ftopt.run.fault_spec import Fault


def load(source: str, overrides: Sequence[str] = (), *, warn: Callable[[str], object] | None = None) -> Recipe:
    """Reads a recipe.

    Args:
        source: a shipped name or a path.
        overrides: ``key=value``, dotted keys, values as in YAML; ``1e-3`` is a number.
        warn: called with what was changed so that the recipe can run, and what is allowed but probably not meant.
            Default: none.

    Raises:
        UserError: the recipe is wrong; lists all errors at once.
    """
    reading = examine(source, overrides)
    if reading.recipe is None or reading.errors:
        raise listed(source, reading.errors)
    if warn is not None:
        for text in reading.warnings:
            warn(text)
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
        warnings: what was changed so that the recipe can run, and what is allowed but probably not meant.
    """

    recipe: Recipe | None = None
    wrong: set[str] = dataclasses.field(default_factory=set)
    errors: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)

    def refuse(self, path: str, text: str) -> None:
        self.errors.append(text)
        self.wrong.add(path)


def examine(source: str, overrides: Sequence[str] = ()) -> Reading:
    """Reads a recipe as far as possible; raises UserError if that is not at all."""
    return examined(read(source, overrides))


_STAND_INS: Mapping[str, Any] = {"name": "unnamed", "method": LocalSGD(sync_every=1)}
"""Values for required settings that a recipe does not give."""


def examined(raw: Mapping[str, Any]) -> Reading:
    """Reads the nested mappings of a recipe as far as possible."""
    found = Reading()
    found.recipe = _section(Recipe, raw, "", found, _STAND_INS)
    if found.recipe is not None:
        sections = {path.partition(".")[0].partition("[")[0] for path in found.wrong}
        if not sections & {"inner", "train"}:
            found.recipe, found.warnings = found.recipe.with_shorter_warmup()
        if not sections & {"method", "train"}:
            problems = outer_problems(found.recipe.method, found.recipe.train.inner_steps)
            found.warnings += [f"warning: method.{text}" for text in problems]
        found.errors += [text for text in found.recipe.problems() if not _mentions(text, sections)]
    return found


def _mentions(text: str, words: Collection[str]) -> bool:
    return any(re.search(rf"\b{re.escape(word)}\b", text) for word in words)


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML; `load` reads it back to an equal one."""
    return to_yaml(as_dict(recipe))


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


def _section(cls: type, raw: Any, path: str, found: Reading, stand_ins: Mapping[str, Any] | None = None) -> Any | None:
    """An instance of ``cls``, with defaults (or ``stand_ins``) for wrong settings, which are added to ``found``; None
    if one of them has no default."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
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
        if value is None and field.default is None:
            return None
        made = field.default_factory  # names a section without a name
        return _choice(value, where, found, None if made is dataclasses.MISSING else name_of(where, made()))
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
    try:
        return as_type(hint, value)
    except TypeError:
        got = type(value).__name__ if value is not None else "null"
        shown = ("off", "on")[value] if hint is str and isinstance(value, bool) else value
        found.refuse(path, f"{path}={shown!r} ({got}); must be {_words(hint)}")
        return None


_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", type(None): "null"}


def _words(hint: Any) -> str:
    if typing.get_origin(hint) is list:
        return f"a list, each item {_words(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is dict:
        return "a mapping"
    parts = typing.get_args(hint) or (hint,)
    return " or ".join(_WORDS.get(part, str(part)) for part in parts)
