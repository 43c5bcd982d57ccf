"""Admission: whether a hello fits the job, and what happens when two processes use one id."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.members import spares
from ftopt.sync.protocol.coordinator.roster.effects import Close, Effects, Emit, SendTo
from ftopt.sync.protocol.coordinator.roster.lines import FROZEN, INNER, OTHER_ORDER, differs, frozen_differ
from ftopt.sync.protocol.coordinator.roster.roster import Member, Roster, may_lack
from ftopt.sync.protocol.policy import FaultPolicy
from ftopt.sync.protocol.samples import Samples

JOB_ENDED = "the job has ended"
"""The beginning of the message to latecomers (END)."""
_ID_TAKEN = (
    "a living replica is connected as {!r}; replica ids must be unique in a job: give this one another id, or end the "
    "other process; if it is this very process, as in a notebook whose cell has run twice, close() the optimizer that "
    "has joined there, or restart the kernel"
)


def id_in_use(hello: m.Hello) -> m.Hold:
    """To a newcomer: another process has its id, or another optimizer of its own process."""
    return m.Hold(
        f"another process, or an optimizer of this one that was not closed, is connected as {hello.replica} and goes "
        "on: this process waits until the other ends; to run both, give one of them another id"
    )


def one_process(a: m.Hello, b: m.Hello) -> bool:
    """Whether two hellos are of one id and address: of one process, or of one that came after the other's end.
    The incarnation does not tell, since two processes may resume from one checkpoint."""
    return a.replica == b.replica and a.address == b.address


def awaits_holder(hello: m.Hello, at_most_s: float) -> m.Hold:
    """To a newcomer whose former process has fallen silent, and holds the newest version alone."""
    return m.Hold(
        f"the former process of {hello.replica} is silent (stopped, or cut off), and it alone holds the "
        f"newest version: this process waits for its return, {at_most_s:.0f} s at most, and the job then goes on from "
        "what others hold; if the former process is dead, end this one and start it with FTOPT_FORMER_ENDED=1"
    )


class Contenders:
    """Processes that wait under the id of a member that was connected, until it is known which of the two lives.

    ``newest``: the current version of each fragment.
    """

    def __init__(self, roster: Roster, newest: Callable[[], Iterable[m.Position]]) -> None:
        self._roster, self._newest = roster, newest
        self._hellos: dict[int, tuple[m.Hello, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._hellos)

    def add(self, now: float, conn: int, hello: m.Hello, policy: FaultPolicy) -> Effects:
        """Adds a hello, which replaces an earlier one of the same process."""
        former = [number for number, (h, _) in self._hellos.items() if one_process(h, hello)]
        for number in former:
            self.drop(number)
        self._hellos[conn] = (hello, now)
        rival = self._roster.members.get(hello.replica)
        if rival is not None and rival.conn is None and self.awaits(rival, hello, rival.lost_s):
            return [*map(Close, former), SendTo(conn, awaits_holder(hello, rival.heard_s + policy.evict_after_s - now))]
        return [*map(Close, former), SendTo(conn, id_in_use(hello))]

    def awaits(self, rival: Member, hello: m.Hello, since_s: float) -> bool:
        """Whether a newcomer waits for the return of the member of its id: that member has fallen silent, as a frozen
        or cut-off process does, and a version would be lost with it. Members that fetch that version do not count as
        holders, since their source may be lost; nor do members not heard since ``since_s``, which may be dead, too."""
        if rival.conn is not None or rival.hung_up or hello.replaces:
            return False
        newest = list(self._newest())
        saved = restorable(hello, newest[0].chain)
        newer = [at for at in newest if may_lack(saved, at)]
        here = [x for x in self._roster.connected() if x.heard_s >= max(rival.lost_s, since_s)]
        return any(rival.may_hold(at) and not any(x.held.get(at.fragment) == at for x in here) for at in newer)

    def precede(self, hello: m.Hello) -> bool:
        """Whether another process of this id came before, and still waits."""
        return any(h.replica == hello.replica and not one_process(h, hello) for h, _ in self._hellos.values())

    def drop(self, conn: int) -> None:
        self._hellos.pop(conn, None)

    def close(self) -> Effects:
        """Closes all connections, since the job starts again: the processes are to come again."""
        conns, self._hellos = list(self._hellos), {}
        return [Close(conn) for conn in conns]

    def settle(self, now: float, policy: FaultPolicy) -> Iterator[tuple[int, m.Hello, str]]:
        """Takes out processes whose wait is over, with the reason to refuse each: "" if its rival is gone, or was not
        heard for ``dead_after_s``. A rival that has only lost its connection may be back in a moment. A rival that
        leaves is waited for."""
        for conn in list(self._hellos):
            hello, since_s = self._hellos[conn]
            rival = self._roster.members.get(hello.replica)
            lives = rival is not None and rival.conn is not None
            silent = rival is None or (not lives and now >= self._silent_from_s(rival, hello, since_s, policy))
            patience_s = policy.evict_after_s if rival is not None and rival.leaving else policy.dead_after_s
            if silent or (lives and rival is not None and rival.heard_s >= since_s + patience_s):
                del self._hellos[conn]
                if silent:  # the others of its id now wait for this one, whose connection may have ended unnoticed
                    self._hellos |= {c: (h, now) for c, (h, _) in self._hellos.items() if h.replica == hello.replica}
                yield conn, hello, "" if silent else _ID_TAKEN.format(hello.replica)

    def _silent_from_s(self, rival: Member, hello: m.Hello, came_s: float, policy: FaultPolicy) -> float:
        """When a rival that is away counts as silent. Other holders count if they are heard a heartbeat after the
        newcomer came: what they sent before they died has arrived by then."""
        alone = self.awaits(rival, hello, came_s + policy.derived.heartbeat_s)
        return rival.heard_s + (policy.evict_after_s if alone else policy.dead_after_s)

    def next_s(self, after: float, policy: FaultPolicy) -> float:
        """When the next of them is to be let in, if nothing happens before. ``after``: the time of the last look."""
        pairs = [(self._roster.members.get(hello.replica), hello, came_s) for hello, came_s in self._hellos.values()]
        here = [(x, hello, came_s) for x, hello, came_s in pairs if x is None or x.conn is None]
        away = [self._silent_from_s(x, hello, came_s, policy) if x is not None else after for x, hello, came_s in here]
        return max(after + 0.01, min(away)) if away else math.inf


def restorable(hello: m.Hello, chain: str) -> int:
    """The version of its newest checkpoint, if that is of the same start of the job as ``chain``; 0: it has none.

    A folder may have a checkpoint of an earlier start, whose versions are not comparable.
    """
    at = hello.checkpoint
    return at.version if at is not None and m.same_start(at.chain, chain) else 0


def refuse(conn: int, hello: m.Hello, kind: str, reason: str) -> Effects:
    """Turns a replica away; ``kind`` as in `Refuse`."""
    return [
        Emit("refuse", hello.replica, hello.incarnation, data={"kind": kind, "reason": reason}),
        SendTo(conn, m.Refuse(kind, reason)),
        Close(conn),
    ]


def policy_of(hello: m.Hello) -> FaultPolicy:
    """The job's settings, from its first replica's hello. Raises `ValueError`."""
    names = {f.name for f in fields(FaultPolicy)}
    try:
        return FaultPolicy(**{k: v for k, v in hello.settings.items() if k in names})  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(f"replica {hello.replica} brings settings of a wrong type: {error}") from None


def other_protocol(replica: str, protocol: int) -> str:
    """To a replica whose version of ftopt speaks another protocol."""
    return (
        f"replica {replica} and the coordinator run different versions of ftopt (protocols {protocol} and "
        f"{m.PROTOCOL}); install the same version on both"
    )


def _misfit_of_spare(hello: m.Hello) -> str:
    try:
        return spares.misfit(hello, policy_of(hello))
    except ValueError as error:
        return str(error)


def makes_no_sense(job: str, hello: m.Hello) -> str:
    """Why a hello is not one to this job by this version of ftopt, "" when it is."""
    if hello.protocol != m.PROTOCOL:
        return other_protocol(hello.replica, hello.protocol)
    if hello.job != job:
        return f"this is job {job!r}, not {hello.job!r}"
    if not hello.incarnation and (hello.positions or hello.contributions or hello.prepared):
        return f"the hello of replica {hello.replica!r} makes no sense: a newcomer that holds something"
    compared = {name: hello.lines.get(f"policy.{name}", str(value)) for name, value in hello.settings.items()}
    if wrong := [name for name, value in hello.settings.items() if compared[name] != str(value)]:
        return (
            f"the hello of replica {hello.replica!r} makes no sense: it is compared by policy.{wrong[0]}="
            f"{compared[wrong[0]]}, and has {hello.settings[wrong[0]]}"
        )
    return ""


def misfit(job: str, lines: dict[str, str] | None, hello: m.Hello, samples: Samples | None) -> str:
    """Why a replica cannot be part of this job, "" when it can. ``lines``: the job's, None before there are any."""
    if lines is None:
        return _misfit_of_spare(hello)
    wrong = [
        differs(name, hello.lines.get(name, "nothing"), lines.get(name, "nothing"))
        for name in sorted(lines.keys() | hello.lines.keys())
        if hello.lines.get(name) != lines.get(name) and not name.startswith((FROZEN, m.OWN))
    ]
    other = hello.lines.get("model") != lines.get("model")
    if wrong and hello.lines.get("names") == lines.get("names", "") and other:
        wrong.append(OTHER_ORDER)
    if frozen := frozen_differ(hello.lines, lines):
        wrong.append(frozen)
    if hello.samples != samples:
        wrong.append(f"samples: {hello.samples or 'no ledger'} here, {samples or 'no ledger'} in the job")
    if not wrong:
        return _misfit_of_spare(hello)
    return (
        f"replica {hello.replica} does not fit job {job!r}: {'; '.join(wrong)}. The first replica of a job "
        "defines it; start this one with the same settings, or use another job name"
        + (INNER if any(each.startswith("inner optimizer: ") for each in wrong) else "")
    )
