"""The user's own code that a recipe names: how it is found, and how its errors are reported.

A function is named by ``package.module:function`` or by ``FILE.py:function``. Modules are also searched in the working
folder, however ftopt was started; a file is searched in the working folder, then next to the recipe.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ftopt.common.paths import near
from ftopt.common.timers import if_longer
from ftopt.common.whose import is_ours, is_users
from ftopt.errors import FtoptError, UserError

_log = logging.getLogger(__name__)
_PATIENCE_S = 20.0
"""A factory that runs for longer than this is reported."""
_DTYPES = re.compile(r"\b(double.*\bfloat|float.*\bdouble)\b", re.IGNORECASE)
"""Matches torch's messages that an operation got float64 and float32."""
_FLOATS = (
    "Double is float64, which torch's default_collate makes of Python's and of NumPy's floats; let the data set return "
    "tensors of float32, or convert the batch with .float()"
)
_OF_A_WORKER = "Original Traceback (most recent call last)"


_TOLD = re.compile(r"^.+ failed \(.+?\): (.+(?:\n    at .+)?)", re.MULTILINE)


class OwnCodeFailed(FtoptError):
    """The user's own code has failed while the job trained. Exit status 1."""


def check_form(where: str, spec: object) -> None:
    """Raises UserError unless ``spec`` has one of the two forms."""
    source, _, name = str(spec).rpartition(":")
    if not (isinstance(spec, str) and source and name.isidentifier()):
        raise UserError(f"{where}={spec!r}; must be package.module:function or FILE.py:function")


def located(spec: str, folder: Path) -> str:
    """``spec`` with the path of its file made absolute, relative to the working folder, else to ``folder``, the
    recipe's. Unchanged if there is no such file, or it names a module."""
    source, _, name = spec.rpartition(":")
    if source.endswith(".py"):
        for base in (Path.cwd(), folder):
            if (found := base / Path(source).expanduser()).is_file():
                return f"{found.resolve()}:{name}"
    return spec


def find(where: str, spec: str, *, shown: str | None = None) -> Any:
    """Imports what ``spec`` names. ``where``: the setting, for messages. ``shown``: the setting's value, if it differs
    from ``spec``. UserError: there is no such file, module or name, or the module raises."""
    source, _, name = spec.rpartition(":")
    what = f"{where}={shown or spec!r}"
    try:
        if source.endswith(".py"):
            module = _of_file(what, Path(source))
        else:
            _search(Path.cwd())
            module = importlib.import_module(source)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and source.startswith(error.name):
            searched = f"the working folder {Path.cwd()} and Python's path were searched"
            raise UserError(f"{what} cannot be imported: {error}; {searched}; or name its file, FILE.py") from None
        raise UserError(f"{what} cannot be imported: {described(error)}") from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), n=1)
        hint = f"did you mean {near[0]}?" if near else "correct the name"
        raise UserError(f"{what} cannot be imported: {source} has no {name!r}; {hint}")
    return getattr(module, name)


def call(where: str, spec: str, args: Mapping[str, Any]) -> Any:
    """Calls the function that ``spec`` names with ``args``, and returns its result. UserError: it cannot be imported or
    called, or it raises; the message names the user's own line."""
    with patience(f"{where}={spec}"):
        function = find(where, spec)
        if not callable(function):
            raise UserError(f"{where}={spec!r} is a {type(function).__name__}; must be a function or a class")
        try:
            return function(**args)
        except (Exception, SystemExit) as error:
            raise UserError(f"{where}={spec!r} with args={dict(args)}: {described(error)}") from error


@contextmanager
def failing(what: str, kind: Callable[[str], FtoptError] = OwnCodeFailed) -> Iterator[None]:
    """Turns errors of the user's code in the block into ``kind``, with the user's own line."""
    try:
        yield
    except FtoptError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not place_of(error):
            raise  # a signal that asks this process to leave
        raise kind(f"{what}: {described(error)}") from error


@contextmanager
def warned(what: str) -> Iterator[list[str]]:
    """Collects the warnings that Python shows in the block, each once, with the user's own line. Main thread."""
    told: list[str] = []
    depth = len(traceback.extract_stack()) - 2  # without this function, and its caller in contextlib

    def take(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        place = _innermost(traceback.extract_stack()[depth:])
        text = f"warning: {what}: {category.__name__}: {message}" + (f"\n    at {place}" if place else "")
        if text not in told:
            told.append(text)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = take
        yield told


def patience(what: str) -> AbstractContextManager[None]:
    """Logs a warning if the block takes long."""
    return if_longer(_PATIENCE_S, _log.warning, "%s has been running for %g s; Ctrl-C stops it", what, _PATIENCE_S)


def described(error: BaseException) -> str:
    """The error in one or two lines: its type, its text, and the user's own line that raised it, if any."""
    if isinstance(error, SystemExit):
        text = f"it called sys.exit({error.code!r}); return or raise instead"
    else:
        text = f"{type(error).__name__}: {error}"
    if _OF_A_WORKER in text:  # torch's data loader puts the whole traceback of its worker process into the message
        return _of_worker(text)
    if isinstance(error, RuntimeError) and _DTYPES.search(text):
        text = f"{text}; {_FLOATS}"
    place = place_of(error) or _in_backward(error)
    return f"{text}\n    at {place}" if place else text


def _in_backward(error: BaseException) -> str:
    """Says that torch raised it while it computed gradients, when the traceback has no line of the user's."""
    frames = traceback.extract_tb(error.__traceback__)
    in_torch = any(frame.name == "backward" and "/torch/" in frame.filename for frame in frames)
    return "loss.backward(), the backward pass of the loss" if in_torch else ""


def _of_worker(text: str) -> str:
    found = re.findall(r'File "(.+?)", line (\d+), in (\S+)\n +(.+)', text)
    own = [frame for frame in found if is_users(frame[0])]
    last = text.strip().rpartition("\n")[2].strip()
    return last + "".join(f"\n    at {near(Path(at))}, line {n}, in {name}: {line}" for at, n, name, line in own[-1:])


def failed_in(messages: Mapping[str, str]) -> str:
    """A message that the user's code has failed in all replicas, with each error once; "" if one has another error, or
    none. ``messages``: each replica's last message, by its id."""
    by_error: dict[str, list[str]] = {}
    for replica, said in sorted(messages.items()):
        if not (found := _TOLD.search(said)):
            return ""
        by_error.setdefault(found[1], []).append(replica)
    where = {error: " and ".join(filter(None, [", ".join(ids[:-1]), ids[-1]])) for error, ids in by_error.items()}
    return "\n".join(f"your code failed in {replicas}: {error}" for error, replicas in where.items())


def place_of(error: BaseException) -> str:
    """``FILE, line N, in FUNCTION: SOURCE`` of the user's innermost line; "" if the traceback has none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{near(Path(error.filename))}, line {error.lineno}: {(error.text or '').strip()}"
    return _innermost(traceback.extract_tb(error.__traceback__))


def _innermost(stack: Iterable[traceback.FrameSummary]) -> str:
    frames = [frame for frame in stack if not is_ours(frame.filename)]
    own = [frame for frame in frames if is_users(frame.filename)]
    if not own:  # perhaps the user's own installed package
        own = [frame for frame in frames if "site-packages" in frame.filename and "/torch/" not in frame.filename]
    if not own:
        return ""
    frame = own[-1]
    return f"{near(Path(frame.filename))}, line {frame.lineno}, in {frame.name}: {frame.line}"


def _of_file(what: str, file: Path) -> ModuleType:
    """Imports a file by its name, as its neighbours and the loader's worker processes do."""
    path = file.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"{what}: there is no file {path}; give its path from the working folder or from the recipe's")
    _search(path.parent)
    module = importlib.import_module(path.stem)
    found = getattr(module, "__file__", None)
    if found is None or Path(found).resolve() != path:
        raise UserError(
            f"{what}: Python has another module of the name {path.stem} ({found or 'built in'}); rename the file"
        )
    return module


def _search(folder: Path) -> None:
    """Puts a folder last on the path, so that no file of the user's replaces a module that others import."""
    importlib.invalidate_caches()
    if str(folder) not in sys.path and not ("" in sys.path and folder == Path.cwd()):
        sys.path.append(str(folder))
