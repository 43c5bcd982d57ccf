"""The errors that users of ftopt see. Each message says what is wrong, the value, what is allowed, and what to do.

The functions check settings of methods, codecs and the outer-sync layer; ``hint``: what to do.
"""

from __future__ import annotations

import dataclasses
import decimal
import difflib
import inspect
import math
import numbers
import operator
import re
import warnings
from abc import ABCMeta
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class FtoptError(Exception):
    """The base of ftopt's own errors."""


class UserError(FtoptError, ValueError):
    """The user's input is wrong: a recipe, an argument, a file. The command line exits with status 2."""


class Refused(UserError):
    """The coordinator refuses this replica (another model, method, settings or protocol). The job goes on."""


class Unreachable(UserError, ConnectionError):
    """Nothing answers at the address of the coordinator, or of a peer."""


class JobFailed(FtoptError):
    """A replica was lost, and the job has ended for all, since ``policy.on_loss`` is ``fail``. Exit status 1.

    Attributes:
        replica: the lost replica.
        incarnation: its incarnation.
        why: what became of it.
        versions: the versions at which the job stays, one per fragment.
        inner_step: the inner step at which it stays.
        pending_steps: inner steps of the replica that raises this error which no version contains.
    """

    replica = why = ""
    incarnation = inner_step = pending_steps = 0
    versions: tuple[int, ...] = ()


class JobOver(SystemExit):
    """The job has ended, and this replica stood by (``standby=True``) until then. A script that does not catch it ends
    with status 0.

    Attributes:
        reason: a sentence.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason

    def __reduce__(self) -> tuple[type[JobOver], tuple[str]]:
        return type(self), (self.reason,)  # an island's other ranks raise it, too


@contextmanager
def from_extra(extra: str, what: str) -> Iterator[None]:
    """Wraps the import of a package that not every installation has.

    Args:
        extra: ftopt's extra that installs it.
        what: what needs it, as the subject of the message.

    Raises:
        UserError: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(lacking(extra, what, error.name or extra)) from error


_ON_PYPI = {"yaml": "PyYAML"}
"""Package as it is imported -> its name there, where they differ."""


def lacking(extra: str, what: str, package: str) -> str:
    """A message that ``what`` needs ``package``, which is not installed, and how to install it."""
    name = package.partition(".")[0]
    return f"{what} needs {_ON_PYPI.get(name, name)}, which is not installed; pip install 'ftopt[{extra}]'"


def thread_failed(replica: str, where: str, error: BaseException) -> FtoptError:
    """The error for the training thread when ``error`` has ended another thread's work; ``error`` is its cause."""
    if isinstance(error, FtoptError):
        return error
    failed = FtoptError(
        f"{where} of replica {replica} failed: {type(error).__name__}: {plain(error)}; if this is not an error of your "
        "own code, please report it; restart this replica, which takes up the job's state again"
    )
    failed.__cause__ = error
    return failed


def warn_user(text: str) -> None:
    """Warns with a UserWarning at the line outside ftopt and torch that has led here."""
    level, frame = 2, inspect.currentframe()
    frame = frame.f_back if frame is not None else None
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


_BETWEEN = ("ftopt", "torch", "contextlib")


def plain(error: object) -> str:
    """An error's text without places in a library's source; works even if its ``__str__`` raises."""
    try:
        return _PLACE.sub("", str(error))
    except Exception:
        return f"an error without a text ({type(error).__name__})"


_PLACE = re.compile(r"\[/\S*:\d+\] ?")


def without_internals(function: Callable[P, R]) -> Callable[P, R]:
    """Drops the traceback through ftopt's modules from a `UserError` of ``function``: the caller's line is the wrong
    one."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except UserError as error:
            raise error.with_traceback(None)  # noqa: B904 (it is the same error)

    return call


def names_arguments(example: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Turns a call with a missing or unknown argument into a UserError that shows an example. UserErrors of the call
    are `without_internals`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        *owner, function_name = function.__qualname__.split(".")
        makes = function_name == "__init__"
        known = ", ".join(parameter for parameter in signature.parameters if parameter != "self")

        @wraps(function)
        @without_internals
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                name = type(args[0]).__name__ if makes else ".".join([*owner, function_name])
                raise UserError(f"{name}(): {error}; call it as in {example}; it has {known}") from None
            return function(*args, **kwargs)

        return call

    return decorate


def plain_number(value: Any) -> Any:
    """A number of NumPy's, a tensor or array of one element, a fraction or a decimal as int, float or bool; a tuple or
    list with each element so converted; other values unchanged."""
    if type(value) in (list, tuple):
        return type(value)(map(plain_number, value))
    if type(value).__module__.partition(".")[0] in ("numpy", "torch"):
        sizes = getattr(value, "shape", None)
        return value.item() if sizes is not None and math.prod(sizes) == 1 and hasattr(value, "item") else value
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real | decimal.Decimal) else value


class _PlainNumbers(ABCMeta):
    """Makes settings plain numbers, whatever type the user has computed them with."""

    @property
    def __signature__(cls) -> inspect.Signature:
        """The settings, for `help` and for completion in notebooks."""
        return inspect.Signature(list(inspect.signature(cls.__init__).parameters.values())[1:])  # type: ignore[misc]

    def __call__(cls, /, *values: Any, **named: Any) -> Any:
        return super().__call__(*map(plain_number, values), **{k: plain_number(v) for k, v in named.items()})


class Settings(metaclass=_PlainNumbers):
    """The base of the frozen dataclasses that users make: methods, their parts, codecs, `FaultPolicy`.

    An unknown setting, or a missing one without a default, is a UserError that lists the settings.
    """

    __slots__ = ()

    def __new__(cls, /, *values: object, **named: object) -> Self:
        fields: list[dataclasses.Field[Any]] = []
        if dataclasses.is_dataclass(cls):
            fields = [f for f in dataclasses.fields(cls) if f.init]
        known = [f.name for f in fields]
        unknown = [name for name in named if name not in [f.name for f in fields]]
        if fields and _made_by_dataclass(cls):
            if unknown:
                near = [n for n in known if n in unknown[0].split("_")]  # outer_optimizer, fragment_sync_delay
                near = near or difflib.get_close_matches(unknown[0], known, n=1)
                meant = f"did you mean {near[0]}? " if near else ""
                raise UserError(f"{cls.__name__} has no setting {unknown[0]!r}; {meant}it has {', '.join(known)}")
            if len(values) > sum(not f.kw_only for f in fields):
                raise UserError(
                    f"{cls.__name__}({values[-1]!r:.60}); settings go by name: {cls.__name__}({known[0]}=...); it has "
                    f"{', '.join(known)}"
                )
            positional = [f.name for f in fields if not f.kw_only][: len(values)]
            missing = [f.name for f in fields if _has_no_default(f) and f.name not in (*named, *positional)]
            if missing:
                call = ", ".join(f"{name}=..." for name in missing)
                raise UserError(
                    f"{cls.__name__} needs {', '.join(missing)}, which has no default; write {cls.__name__}({call}); "
                    f"it has {', '.join(known)}"
                )
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, object]]:
        """Makes copies (deepcopy, pickle) pass all settings."""
        made = dataclasses.is_dataclass(self) and _made_by_dataclass(type(self))
        return (), {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init} if made else {}  # type: ignore[arg-type]


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _made_by_dataclass(cls: type) -> bool:
    """Whether its ``__init__`` takes the fields: a subclass may define another."""
    first = next(each for each in cls.__mro__ if "__init__" in vars(each) or "__dataclass_fields__" in vars(each))
    return "__dataclass_fields__" in vars(first)


def check_choice(name: str, value: object, allowed: Sequence[object], hint: str = "") -> None:
    """Raises UserError for a value that is not among ``allowed``."""
    if value not in allowed:
        words = ", ".join("null" if word is None else str(word) for word in allowed)
        raise UserError(f"{name}={value!r}; allowed: {words}{hint and f'; {hint}'}")


def check_bool(name: str, value: object, hint: str = "") -> bool:
    """Returns a truth value as a bool. Raises UserError if it is none (a number is none)."""
    value = plain_number(value)
    if not isinstance(value, bool):
        raise UserError(f"{name}={value!r:.60}; must be True or False{hint and f'; {hint}'}")
    return value


def check_whole(name: str, value: object, least: int, *, of: str = "", hint: str = "") -> int:
    """Returns a whole number as an int. Raises UserError if it is none (a bool is none), or below ``least``; ``of``:
    the unit."""
    value = plain_number(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        what = f"a whole number{of and f' of {of}'}"
        raise UserError(f"{name}={value!r}; must be {what}, at least {least}{hint and f'; {hint}'}")
    return value


def check_part(name: str, value: object, what: str) -> tuple[int, int]:
    """Returns a pair (number of a ``what`` from 0, count of them). Raises UserError if ``value`` is no such pair."""
    try:
        index, count = map(operator.index, value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise UserError(f"{name}={value!r:.60}; must be ({what}, how many there are)") from None
    if not 0 <= index < count:
        raise UserError(f"{name}=({index}, {count}); the first must be 0 to {count - 1}")
    return index, count


def check_number(name: str, value: object, within: str, *, of: str = "", hint: str = "") -> float:
    """Returns a number as an int or float. Raises UserError unless it is ``within`` an interval, e.g. ``[0, 1)`` or
    ``(0, inf)``."""
    value = plain_number(value)
    low, high = map(float, within[1:-1].split(","))
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if low < number < high or (number == low and within[0] == "[") or (number == high and within[-1] == "]"):
        return number
    what = f"a {'finite ' if number == math.inf else ''}number{of and f' of {of}'}"
    bounds = f", at least {low:g}" if within[0] == "[" else f" above {low:g}"
    raise UserError(
        f"{name}={value!r}; must be {what}{bounds if high == math.inf else f' in {within}'}{hint and f'; {hint}'}"
    )
