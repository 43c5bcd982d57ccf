"""A group whose network side is a script: anything may happen whenever the optimizer calls it.

The test says what each step moves the parameters by, and no two sums of steps are alike: the anchor tells which
steps it counts, and how often.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ftopt.codecs import FP32
from ftopt.step.outer.usual import USUAL, Usual
from ftopt.step.tensors.digest import digest
from ftopt.sync.group import AttemptView, Committed, Contribution, End, Fingerprint, Host, Means, Reading, bits
from ftopt.sync.protocol.policy import FaultPolicy


class Lonely:
    """The collective of one member."""

    rank, size, sent_bytes, received_bytes = 0, 1, 0, 0

    def __init__(self, contribution: Contribution | None = None, *, fails: bool = False) -> None:
        self.contribution, self.fails = contribution, fails

    def all_reduce_(self, flat: Tensor, summed: Any = None) -> None:
        if self.fails:
            flat.fill_(float("nan"))  # A late piece: using this buffer again shows.
            raise ConnectionError("a peer is gone")

    def mean_encoded_(self, flat: Tensor, codec: Any, shares: Any, owed: Any = None, *_: Any, **__: Any) -> Any:
        self.all_reduce_(flat)
        return owed

    def tell(self, row: Any) -> None: ...

    def told(self) -> list[list[int]]:
        c = self.contribution
        told = (1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
        if c is not None:
            told = (c.weight, float(c.steps), c.norm, c.peak, c.behind, c.reach)
        return [[0, *bits(told)]]

    def exchange(self, row: Any) -> list[list[int]]:
        return [list(row)]

    def stop(self) -> None: ...

    def close(self) -> None: ...


class Scripted:
    """A `ReplicaGroup` and the job behind it, played by chance.

    The job's truth is kept apart from the optimizer: ``anchor`` in float64, and which local steps are counted in it.

    Args:
        chance: decides what happens.
        size: elements of the only parameter.
    """

    def __init__(self, chance: random.Random, size: int) -> None:
        self.chance = chance
        self.replica, self.standby = "r0", False
        self.island = None
        self.policy = FaultPolicy()
        self.codec = FP32()
        self.tells_steps, self.tells_gradients = True, False
        self.units = None
        self.global_batch = None
        self.incarnation = 1
        self.committed = Committed(0, 0, 0, 0)
        self.anchor = torch.zeros(size, dtype=torch.float64)
        self.counted: list[int] = []
        self.dropped: list[int] = []
        self.work: dict[int, Tensor] = {}  # local step -> what it moved the parameters by
        self.happened: dict[str, int] = {}
        self.attempts = 0
        self.quiet = True
        self.reborn_pending = False
        self._host: Host | None = None
        self._outstanding: Contribution | None = None
        self._acting = threading.Lock()
        self._deciding = threading.Lock()  # a freezer proposes while the training thread plays the network

    # The network side.

    def maybe(self) -> None:
        """Something happens on the other threads, perhaps."""
        # The network thread does one thing at a time, whichever threads of the optimizer come here at once.
        if self.quiet or not self._acting.acquire(blocking=False):
            return
        try:
            if self.chance.random() < 0.6:
                return
            self.chance.choice([self.commit, self.abort, self.fail, self.overtaken, self.overtaken_uncounted])()
            if self.chance.random() < 0.1:
                self.foreign()
            if self.chance.random() < 0.03:
                self.reset()
                if self.chance.random() < 0.5:
                    self.foreign()
        finally:
            self._acting.release()

    def _reduce(self, *, fails: bool = False) -> tuple[AttemptView, str] | None:
        mine, host = self._outstanding, self._host
        if mine is None or host is None:
            return None
        self.attempts += 1
        weight = mine.weight
        attempt = AttemptView(0, self.committed.version + 1, self.attempts, 0, 1, weight, weight, int(weight > 0))
        return attempt, host.reduce(attempt, Lonely(mine, fails=fails))

    def _count(self, mine: Contribution) -> None:
        steps = range(mine.last_step - mine.steps + 1, mine.last_step + 1)
        self.counted += steps
        for step in steps:
            self.anchor += self.work[step].double()

    def commit(self) -> None:
        reduced, mine = self._reduce(), self._outstanding
        if reduced is None or mine is None or self._host is None:
            return
        self._count(mine)
        with self._deciding:
            inner_step = self.committed.inner_step + mine.steps
            self.committed = Committed(0, self.committed.version + 1, inner_step, mine.last_step)
        self._host.commit(reduced[0], self.committed)
        self._outstanding = None
        self._tally("commit")

    def abort(self) -> None:
        if self._reduce() is not None and self._host is not None:
            self._host.discard(0)
            self._tally("abort")

    def fail(self) -> None:
        try:
            self._reduce(fails=True)
        except ConnectionError:
            self._tally("fail")

    def overtaken(self) -> None:
        """Decided with this replica's contribution while it was away, and fetched."""
        mine = self._outstanding
        if mine is None:
            return
        if self.chance.random() < 0.5:
            self._reduce()
        self._count(mine)
        self._tally("overtaken")
        self._install(counted=mine.last_step)

    def overtaken_uncounted(self) -> None:
        """Decided without it."""
        if self._outstanding is not None:
            self._tally("uncounted")
            self.foreign()

    def foreign(self) -> None:
        """The others' work moves the anchor by 1 to 3 versions, and this replica fetches it."""
        for _ in range(self.chance.randint(1, 3)):
            # Whole numbers that stay small: every sum of them and of eighths is exact in bf16 too.
            self.anchor += self.chance.randint(-3, 3) - self.anchor.round()
        self._tally("foreign")
        self._install(counted=self.committed.counted_step)

    def reset(self) -> None:
        """Away for longer than the job remembers: what was pending is lost."""
        self.reborn_pending = True
        self._tally("reset")
        self._install(counted=self.committed.counted_step, reset=True)

    def _install(self, *, counted: int, reset: bool = False) -> None:
        assert self._host is not None
        with self._deciding:
            self.committed = Committed(0, self.committed.version + 1, self.committed.inner_step + 1, counted)
        tensors = {"anchor": self.anchor.to(torch.float32, copy=True), f"outer.{USUAL}": Usual().tensor()}
        self._host.install(self.committed, digest(tensors), tensors, reset=reset)
        self._outstanding = None

    def _tally(self, what: str) -> None:
        self.happened[what] = self.happened.get(what, 0) + 1

    # The optimizer's side.

    def start(self, host: Host, fingerprint: Fingerprint) -> list[Committed]:
        self._host = host
        return [self.committed]

    def propose(self, contribution: Contribution, *, now: bool = False) -> None:
        self.maybe()
        with self._deciding:
            assert self._outstanding is None, "two contributions outstanding (FREEZE)"
            in_time = contribution.version == self.committed.version
            if in_time:
                self._outstanding = contribution
        if in_time:
            self._tally("propose")
        else:
            self._tally("propose too late")
        self.maybe()

    def wait(self, fragment: int, *, timeout_s: float | None = None) -> bool:
        self.maybe()
        return self._outstanding is None

    def outstanding(self, fragment: int) -> bool:
        self.maybe()
        return self._outstanding is not None

    def catch_up(self, *, timeout_s: float | None = None) -> bool:
        return True

    def obstacle(self) -> str:
        return ""

    def called_in(self, fragment: int) -> bool:
        self.maybe()
        return not self.quiet and self.chance.random() < 0.1

    def share(self, reading: Reading) -> None: ...

    def tell_loss(self, loss: float | Tensor) -> None: ...

    def means(self, fragment: int) -> Means | None:
        return None

    def report(self, state: str) -> None:
        self.maybe()

    def check(self) -> None: ...

    closed = False
    stopped = None

    def wait_for_end(self, inner_step: int, **_: Any) -> End:
        return End((), (self.replica,))

    def finish(self) -> None: ...

    def leave(self, *, timeout_s: float, early: bool = False, reason: str = "") -> None: ...

    def close(self) -> None: ...

    def emit(
        self,
        event: str,
        *,
        fragment: int | None = None,
        version: int | None = None,
        attempt: int | None = None,
        inner_step: int | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        if event == "discarded" and data is not None:
            self._tally("discarded")
            last = max(self.work)
            self.dropped += range(last - data["steps"] + 1, last + 1)
        self.maybe()
