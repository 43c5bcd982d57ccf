"""The results of a simulation: whose steps are in the model, and where the rest of the machines' time went."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ftopt.sync.protocol.coordinator.roster.effects import Decided


class Tally:
    """Counts while a world runs. The coordinator's decisions say what is in the model."""

    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self._counted: Counter[tuple[str, int, int]] = Counter()
        self._taken = self._in_model = 0.0
        self._capacity = self._machine_s = 0.0
        self._second, self._in_second = -1, 0
        self.stood_s = 0.0
        self.dropped = 0.0
        self.messages = self.busiest = 0
        self.rounds = 0
        self._shares = 0.0
        self.pending: list[tuple[str, int, int, int]] = []
        self.coordinator_events: Counter[str] = Counter()
        self.line: list[tuple[float, float]] = [(0.0, 0.0)]
        """(seconds, steps in the model so far)."""

    def message(self, now: float, count: int = 1) -> None:
        """The coordinator has received or sent ``count`` messages."""
        self.messages += count
        second = int(now)
        self._in_second = count + (self._in_second if second == self._second else 0)
        self._second = second
        self.busiest = max(self.busiest, self._in_second)

    def decided(self, now: float, decided: Decided, connected: int) -> None:
        """A version was committed while ``connected`` replicas were connected."""
        if not decided.members:
            return
        added = 0
        for replica, incarnation, steps, last_step, *_ in decided.members:
            key = (replica, incarnation, decided.fragment)
            if last_step - steps < self._counted[key]:
                raise AssertionError(f"steps of {replica} counted twice")
            self._counted[key] = last_step
            added += steps
        self._in_model += added / self._fragments
        self.rounds += 1
        self._shares += sum(steps > 0 for _, _, steps, *_ in decided.members) / max(1, connected)
        self.line.append((now, self._in_model))

    def ended(self, replica: str, incarnation: int, steps: int, dropped: int) -> None:
        """A replica has ended after ``steps`` steps; those up to ``dropped`` were another incarnation's."""
        self._taken += steps
        self.pending.append((replica, incarnation, steps, dropped))

    def stayed(self, seconds: float, capacity: float) -> None:
        """A machine was there for ``seconds``, and could have taken ``capacity`` steps."""
        self._machine_s += seconds
        self._capacity += capacity

    def result(self, *, end_s: float, batch: int) -> Outcome:
        """The outcome of the whole trace."""
        lost = max(0.0, self._taken - self._in_model)
        return Outcome(
            goodput=self._in_model / self._capacity if self._capacity else 0.0,
            samples=self._in_model * batch,
            capacity=self._capacity * batch,
            computed=self._taken * batch,
            twice=lost * batch,
            kept=1 - self.dropped / self._taken if self._taken else 1.0,
            participation=self._shares / self.rounds if self.rounds else 0.0,
            stall=self.stood_s / self._machine_s if self._machine_s else 0.0,
            rounds=self.rounds,
            aborted=self.coordinator_events["abort"],
            messages_s=self.messages / end_s,
            busiest_s=self.busiest,
            line=[(seconds, steps * batch) for seconds, steps in self.line],
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one policy on one trace.

    Args:
        goodput: samples in the model / samples that the machines present could have computed.
        samples, capacity: these two numbers.
        computed: samples that were computed.
        twice: samples computed whose work is not in the model, so that they are due again.
        kept: the share of steps of machines that lived on that was not thrown away.
        participation: contributors of a round / connected replicas, on average.
        fault_free: goodput without any failure but with the network's cost; 1 if the network costs nothing.
        stall: share of the machines' time in which a training thread stood still.
        rounds, aborted: committed outer steps; attempts that failed.
        messages_s, busiest_s: messages the coordinator received and sent per second, on average and at most.
        line: (seconds, samples in the model so far).
    """

    goodput: float
    samples: float
    capacity: float
    computed: float
    twice: float
    kept: float = 1.0
    participation: float | None = None
    fault_free: float = 1.0
    stall: float | None = None
    rounds: int | None = None
    aborted: int | None = None
    messages_s: float | None = None
    busiest_s: int | None = None
    line: list[tuple[float, float]]
