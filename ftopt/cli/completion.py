"""``ftopt completion SHELL``: prints a completion script, which shtab makes from the parser."""

from __future__ import annotations

import argparse

from ftopt.cli.shared.output import say
from ftopt.errors import from_extra

_SHELLS = ("bash", "zsh", "tcsh")
_FILES = {"FILE", "PATH", "CHECKPOINT"}
_RECIPES = {"RECIPE", "NAME"}

_EPILOG = """\
for this shell:      eval "$(ftopt completion bash)"
for every new one:
  ftopt completion bash > ~/.local/share/bash-completion/completions/ftopt
zsh (a folder of $fpath):
  ftopt completion zsh > ~/.zfunc/_ftopt
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=_SHELLS, help="the shell to complete in")


def run(arguments: argparse.Namespace) -> int:
    """Prints the script."""
    with from_extra("cli", "ftopt completion"):
        import shtab

    from ftopt.cli.main import GROUPS, VERBS
    from ftopt.cli.shared.parser import make
    from ftopt.config.shipped import shipped

    parser = make(GROUPS, complete=VERBS)
    for action in _actions(parser):
        if action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar == "DIR":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.metavar in _RECIPES and not action.option_strings:
            action.choices = list(shipped())  # only in this copy of the parser: a file's path is valid, too
        elif action.metavar == "COMMAND" and not isinstance(action, argparse._SubParsersAction):
            action.choices = list(VERBS)
    say(shtab.complete(parser, arguments.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    found: list[argparse.Action] = []
    for action in parser._actions:
        found.append(action)
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                found += _actions(sub)
    return found
