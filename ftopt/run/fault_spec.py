"""The definition of a fault: target, time, place, kind. Python and a recipe's ``faults`` have the same fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftopt.errors import UserError

COORDINATOR = "coordinator"
POINTS = (
    "inner", "propose", "gather", "reduce", "payload", "reduce.after", "prepare", "commit", "apply", "aggregated",
    "fetch", "serve",
)  # fmt: skip
COORDINATOR_POINTS = ("join", "quorum", "decide", "abort")
ACTIONS = ("kill", "stop", "hang", "partition", "corrupt", "nan", "slow")
COORDINATOR_ACTIONS = ("kill", "stop", "partition")
GRADIENT_KINDS = ("noise", "bit", "stuck", "bias")
FLIPPED = ("params", "grads", "inner", "payload", "sum", "result", "anchor", "outer")
OF_EACH_RANK = ("params", "grads", "inner", *GRADIENT_KINDS)
"""Kinds of which each rank of a replica has its own, or a part."""
WHAT = {"corrupt": (*FLIPPED, *GRADIENT_KINDS), "nan": ("params", "grads")}
_AT = {"grads": "inner", "payload": "payload", "sum": "reduce.after", "result": "prepare"} | dict.fromkeys(
    GRADIENT_KINDS, "aggregated"
)
_DEFAULT = {"payload": "payload", "reduce.after": "sum", "prepare": "result", "aggregated": "noise"}
_BITS = 32
_LASTING = ("stop", "hang", "partition")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault. It strikes once, at the first event named ``point`` from inner step ``at_step`` on.

    Args:
        replica: index in the recipe's replicas, a replica's id, or ``coordinator``.
        point: the event at which it strikes, before that event's effect (``reduce.after``: after the reduction).
        do: ``kill`` (SIGKILL), ``stop`` (SIGSTOP for ``for_s``), ``hang`` (the training thread sleeps ``for_s``),
            ``partition`` (no connection for ``for_s``), ``corrupt`` (a flipped bit), ``nan``, ``slow``.
        at_step: the replica's inner step (for the coordinator: the committed one) from which the fault waits.
        for_s: seconds that ``stop``, ``hang`` and ``partition`` last; ``slow``: null for the rest of the incarnation.
        rejoin_s: seconds until ``ftopt run`` restarts a killed process; null: never.
        incarnation: the incarnation of the replica at which it aims; 1 is the first, 2 its successor.
        journal: ``keep`` or ``delete``, for a killed coordinator that rejoins.
        what: where ``corrupt`` flips a bit: ``anchor`` (default) or ``outer`` (the committed state), ``params``,
            ``inner`` (the inner optimizer's state), ``grads`` (at ``inner``), ``payload`` (this replica's, about to be
            reduced; at ``payload``, default there), ``sum`` (the reduced payloads; at ``reduce.after``, default
            there), ``result`` (what was prepared, after its digest was computed; at ``prepare``, default there); where
            ``nan`` puts one: ``params`` (default) or ``grads``. Or
            how ``corrupt`` changes this replica's copy of the agreed gradient (at ``aggregated``, for methods that
            exchange gradients): ``noise`` (normal, of variance ``size``, on every element; default there), ``bit`` (one
            flipped bit), ``stuck`` (always the same element is ``size``), ``bias`` (``size`` on top of every element).
        times: number of strikes, for ``corrupt`` and ``nan``; null: unlimited. Default 1.
        every: strikes at every ``every``-th of the point's events, for ``corrupt`` and ``nan``. Default 1.
        size: for ``noise``, ``stuck`` and ``bias``, see ``what``.
        bit: the bit to flip, 0 to 31; the highest exponent bit is 30. Default 22, the highest of the mantissa.
        element: the element whose bit is flipped, counted through all of ``what`` and wrapping at its end. Default: the
            greatest in magnitude.
        factor: for ``slow``: how many times as long an inner step takes.

    Raises:
        UserError: a combination that cannot strike; the message says what is allowed.
    """

    replica: int | str = 0
    point: str = "inner"
    do: str = "kill"
    at_step: int = 0
    for_s: float | None = None
    rejoin_s: float | None = None
    incarnation: int = 1
    journal: str = "keep"
    what: str | None = None
    times: int | None = 1
    every: int = 1
    size: float | None = None
    bit: int | None = None
    element: int | None = None
    factor: float | None = None

    def __post_init__(self) -> None:
        coordinator = self.replica == COORDINATOR
        points = COORDINATOR_POINTS if coordinator else POINTS
        if self.point not in points:
            raise UserError(f"point={self.point!r} of {self.replica!r}; allowed: {', '.join(points)}")
        if self.do not in ACTIONS:
            raise UserError(f"do={self.do!r}; allowed: {', '.join(ACTIONS)}")
        if coordinator and self.do not in COORDINATOR_ACTIONS:
            raise UserError(
                f"do={self.do!r} of the coordinator, which does not train; allowed: {', '.join(COORDINATOR_ACTIONS)}"
            )
        self._check_time()
        self._check_target()
        if self.at_step < 0 or self.incarnation < 1:
            raise UserError(f"at_step={self.at_step}, incarnation={self.incarnation}; at least 0, at least 1")
        if self.point == "fetch" and self.incarnation < 2:
            raise UserError("point='fetch' with incarnation=1, which has nothing to fetch; use incarnation=2 or above")
        if self.journal not in ("keep", "delete"):
            raise UserError(f"journal={self.journal!r}; allowed: keep, delete")

    @property
    def aim(self) -> str:
        """``what``, or its default at this fault's point."""
        if self.what is not None or self.do not in WHAT:
            return self.what or ""
        return "params" if self.do == "nan" else _DEFAULT.get(self.point, "anchor")

    def _check_time(self) -> None:
        if self.for_s is not None and self.do == "kill":
            raise UserError(f"for_s={self.for_s:g} with do='kill' has no effect; use rejoin_s to restart the process")
        if self.for_s is not None and self.do in WHAT:
            raise UserError(f"for_s={self.for_s:g} with do={self.do!r} has no effect; use times to repeat it")
        lasts = self.for_s is not None and self.for_s > 0
        if not lasts and (self.do in _LASTING or (self.do == "slow" and self.for_s is not None)):
            raise UserError(f"for_s={self.for_s} with do={self.do!r}; must be a number of seconds above 0")
        if self.rejoin_s is not None and (self.do != "kill" or self.rejoin_s < 0):
            raise UserError(f"rejoin_s={self.rejoin_s:g} with do={self.do!r}; for kill only, and at least 0")
        if (self.factor is not None) != (self.do == "slow") or (self.factor is not None and self.factor <= 1):
            raise UserError(f"factor={self.factor} with do={self.do!r}; for slow, which needs it, and above 1")

    def _check_target(self) -> None:
        allowed = WHAT.get(self.do, ())
        if self.what is not None and self.what not in allowed:
            raise UserError(f"what={self.what!r} with do={self.do!r}; allowed: {', '.join(allowed) or 'null'}")
        only = _AT.get(self.aim, self.point)
        if self.point != only:
            raise UserError(f"what={self.aim!r} at point={self.point!r}; allowed: {only!r}")
        if self.do == "nan" and self.point not in ("inner", "propose"):
            raise UserError(f"do='nan' at point={self.point!r}; allowed: inner, propose")
        if self.do == "slow" and self.point != "inner":
            raise UserError(f"do='slow' at point={self.point!r}; allowed: inner")
        if self.times != 1 and (self.do not in WHAT or (self.times is not None and self.times < 1)):
            raise UserError(f"times={self.times} with do={self.do!r}; at least 1, more for corrupt and nan only")
        if self.every < 1 or (self.every > 1 and self.do not in WHAT):
            raise UserError(f"every={self.every} with do={self.do!r}; at least 1, more for corrupt and nan only")
        sized = self.aim in ("noise", "stuck", "bias")
        if sized != (self.size is not None) or (self.aim == "noise" and not (self.size or 0.0) > 0):
            raise UserError(
                f"size={self.size} with what={self.aim or None!r}; noise needs a variance above 0, stuck and bias a "
                "number, nothing else has one"
            )

        flips = self.do == "corrupt" and self.aim in FLIPPED
        wrong = not 0 <= (self.bit or 0) < _BITS or (self.element or 0) < 0
        if wrong or (not flips and (self.bit is not None or self.element is not None)):
            raise UserError(
                f"bit={self.bit}, element={self.element} with do={self.do!r}, what={self.aim or None!r}; a bit is 0 to "
                f"{_BITS - 1}, an element at least 0, for corrupt with what one of {', '.join(FLIPPED)}"
            )

    def target(self, ids: Sequence[str]) -> str | None:
        """Returns the id of the process at which it aims; None if it is not among ``ids``."""
        if self.replica == COORDINATOR:
            return COORDINATOR
        if isinstance(self.replica, int):
            return ids[self.replica] if 0 <= self.replica < len(ids) else None
        return self.replica if self.replica in ids else None
