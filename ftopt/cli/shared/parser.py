"""The command line's grammar: commands, their options, and what is said about a mistyped one."""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import NoReturn

import ftopt
from ftopt.cli.shared.output import complain
from ftopt.common.whose import shipped_folder


class Parser(argparse.ArgumentParser):
    """A parser whose error is one message, with the option or command that was probably meant."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit status 2."""
        complain(f"{message}{'' if message.endswith('?') else ';'} `{self.prog} --help` shows its arguments")
        raise SystemExit(2)


Groups = Mapping[str, Mapping[str, str]]
"""Group -> command -> description."""


class _Commands(argparse._SubParsersAction):  # type: ignore[type-arg]
    """The commands, which `_InGroups` shows by group."""

    groups: Groups


class _InGroups(argparse.HelpFormatter):
    """Shows commands in groups, and leaves room for the longest one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=16)

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, _Commands):
            return super()._format_action(action)
        shown = {each.dest: each for each in action._choices_actions}
        parts: list[str] = []
        for group, verbs in action.groups.items():
            lines = "".join(super(_InGroups, self)._format_action(shown[verb]) for verb in verbs)
            parts.append(f"{group}:\n{lines}" if parts else lines)  # argparse writes the title itself
        return "\n".join(parts)


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that is a whole number of at least ``least``."""

    def parsed(text: str) -> int:
        if not re.fullmatch(r"\d{1,9}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}; must be a whole number of at least {least}")
        return int(text)

    return parsed


def parse(given: Sequence[str], groups: Groups) -> argparse.Namespace:
    """Returns the command, ``verb``, and its arguments; raises SystemExit if there is nothing to run."""
    first = given[0] if given else ""
    verbs = [verb for group in groups.values() for verb in group]
    if not given:
        make(groups).print_help(sys.stderr)
        raise SystemExit(2)
    if not first.startswith("-") and first not in verbs:
        complain(f"{first!r} is not a command{_meant(first, verbs) or ';'} `ftopt --help` lists the commands")
        raise SystemExit(2)
    parser = make(groups, complete={first})
    parsed, rest = parser.parse_known_args(given)
    if (overrides := vars(parsed).get("overrides")) is not None:  # argparse takes only overrides right after RECIPE
        overrides += [word for word in rest if not word.startswith("-")]
        rest = [word for word in rest if word.startswith("-")]
    if rest:
        sub = _of_verb(parser, first)
        meant = _meant_by(rest[0], sub, takes_overrides=overrides is not None)
        sub.error(f"unrecognized arguments: {' '.join(rest)}{meant}")
    return parsed


def make(groups: Groups, complete: Container[str] = ()) -> argparse.ArgumentParser:
    """Returns the parser, with options for the commands in ``complete``, each of which costs an import."""
    parser = Parser(
        prog="ftopt",
        description="Semi-synchronous, fault-tolerant optimizers for PyTorch.",
        formatter_class=_InGroups,
        epilog="`ftopt COMMAND --help` describes a command. To begin: `ftopt run diloco_bytes`; recipes need "
        f"the extra ftopt[cli]. The pages are in {shipped_folder('docs')}, example scripts in "
        f"{shipped_folder('examples')}.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ftopt {ftopt.__version__}", help="show the version")
    title = next(iter(groups))
    subs = parser.add_subparsers(dest="verb", metavar="COMMAND", title=title, required=True, action=_Commands)
    assert isinstance(subs, _Commands)
    subs.groups = groups
    for name, text in (verb for group in groups.values() for verb in group.items()):
        sub = subs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        if name in complete:
            importlib.import_module(f"ftopt.cli.{name}").add(sub)
    return parser


def _of_verb(parser: argparse.ArgumentParser, verb: str) -> argparse.ArgumentParser:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices.get(verb, parser)  # type: ignore[no-any-return]
    return parser


def _meant(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"; did you mean `{near[0]}`?" if near else ""


def _meant_by(word: str, parser: argparse.ArgumentParser, *, takes_overrides: bool) -> str:
    """A hint at what an unknown option was probably meant to be."""
    options = [text for action in parser._actions if action.help != argparse.SUPPRESS for text in action.option_strings]
    near = _meant(word.split("=")[0], options, cutoff=0.8 if "=" in word else 0.7)
    if not near and takes_overrides and re.match(r"--?[a-z_]+[.a-z_]*=", word):
        return f"; settings have no dashes: write {word.lstrip('-')}"
    if not near and takes_overrides and re.fullmatch(r"--[a-z_]+(\.[a-z_]+)*", word):
        return f"; a setting of the recipe is written {word.lstrip('-')}=VALUE"
    return near
