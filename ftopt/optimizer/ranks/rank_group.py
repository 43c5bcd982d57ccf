"""The `ReplicaGroup` of each rank of an island: the answers of rank 0's group, the same on all ranks.

Rank 0's group changes at any time. The ranks see changes only through *words*, which rank 0 says at step boundaries and
after each wait: the outstanding fragments, those called in, and the number of changes in effect. So all ranks go
through the same boundary with the same answers.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from torch import Tensor

from ftopt.errors import FtoptError, plain
from ftopt.events import EmitEvent
from ftopt.optimizer.ranks.host import SliceHost
from ftopt.optimizer.ranks.loads import RankLoads
from ftopt.optimizer.ranks.worker import Worker
from ftopt.step.outer.reduction import Reduction
from ftopt.step.tensors.memory import Memory
from ftopt.sync.group import (
    Committed,
    Contribution,
    End,
    Fingerprint,
    Held,
    Island,
    JobStopped,
    Means,
    Position,
    RankLinks,
    Reading,
    ReplicaGroup,
)

_ASK_S = 1.0
_RESTORE = "restore"


@dataclass(frozen=True)
class Word:
    """A message of rank 0 to all ranks.

    Args:
        call: the call of the user's loop that it is in.
        changes: the number of changes in effect when the word is heard.
        why: this island is asked to leave; ``asks``: whether the other ranks are.
        loaded: user code has loaded weights into the model.
        stopped: which replica stopped the job, and why.
        result: the result of rank 0's wait; ``error``: its error.
    """

    call: str
    changes: int = 0
    outstanding: tuple[bool, ...] = ()
    called_in: tuple[bool, ...] = ()
    incarnation: int = 0
    closed: bool = False
    why: str = ""
    asks: bool = False
    loaded: bool = False
    stopped: JobStopped | None = None
    result: Any = None
    error: BaseException | None = None


class RankGroup:
    """See the module.

    Args:
        group: rank 0's group, or its stand-in on the other ranks.
        asked: why this process is asked to leave; "": it is not.
        whole: memory for whole states that peers fetch.

    Attributes:
        call: the call of the user's loop that this rank is in.
        why: why the island is asked to leave.
        loads: weights that user code loads into the model, from the join on.
    """

    global_batch = None
    tells_steps: bool
    tells_gradients: bool

    def __init__(self, group: ReplicaGroup, island: Island, asked: Callable[[], str], whole: Memory) -> None:
        self._group, self.island, self._asked = group, island, asked
        self.replica, self.policy, self.standby = group.replica, group.policy, group.standby
        self.leads = island.leads
        self.tells_steps = self.leads and group.tells_steps
        self.tells_gradients = self.leads and group.tells_gradients  # until all ranks have rank 0's value
        self.call = self.why = ""
        self.alike: BaseException | None = None
        self.loads: RankLoads | None = None
        self._whole = whole
        assert group.shards is not None, "not an island"
        self._shards = group.shards
        self._word = Word("")
        self._links: RankLinks | None = None
        self._worker: Worker | None = None
        self._host: SliceHost | None = None
        self._ask_at = 0.0
        self.has_left = False
        self._proposed: set[int] = set()

    @property
    def links(self) -> RankLinks:
        """The connections of the ranks; made at the first call, which is collective."""
        if self._links is None:
            self._links = RankLinks(self.island, self._shards.host)
        return self._links

    def all(self, value: Any) -> list[Any]:
        """Each rank's value, in a call of the user's loop; also after the end, when the ranks' connections are
        closed."""
        if self.has_left:
            found: list[Any] = self.island.share(self.island.gather(value))
            return found
        return self.links.all(value)

    def raise_alike(self, error: BaseException) -> NoReturn:
        """Raises an error that all ranks raise, so that they stay in step."""
        self.alike = error
        raise error

    # Words.

    def _led(self, act: Callable[[], Any] = lambda: None, *, asks: bool = False) -> Any:
        """Rank 0 runs ``act``; all ranks return its result or raise its error, and take over the changes until then."""
        if self.leads:
            word = self._new_word(act, asks)
            self.island.say(replace(word, error=portable(word.error)))
        else:
            word = self.island.hear()
            if word.call != self.call:
                raise FtoptError(
                    f"replica {self.replica}: rank 0 was in {word.call}() while rank {self.island.rank} called "
                    f"{self.call}(); all ranks of an island make the same calls in the same order"
                ) from word.error
        if word.error is not None:
            self.raise_alike(word.error)
        self._word, self.why = word, word.why
        self._proposed.clear()
        if self._worker is not None:
            self._worker.release(word.changes)
            if self._host is not None:
                self._host.taken(word.changes)
        return word.result

    def _new_word(self, act: Callable[[], Any], asks: bool) -> Word:
        group, result, error = self._group, None, None
        try:
            result = act()
        except BaseException as raised:
            error = raised
        count = len(self._worker.fragments) if self._host is not None and self._worker is not None else 0
        # In this order: a newer state arrives before its contribution stops being outstanding.
        outstanding = tuple(group.outstanding(i) for i in range(count))
        called_in = tuple(group.called_in(i) for i in range(count))
        changes = self._host.word() if self._host is not None else 0
        return Word(
            self.call, changes, outstanding, called_in, group.incarnation, group.closed, self.why, asks,
            self.loads is not None and self.loads.noted,
            group.stopped, result, error,
        )  # fmt: skip

    # The interface of `ReplicaGroup`.

    @property
    def units(self) -> Any:
        return self._group.units if self.leads else None

    @property
    def joins(self) -> Callable[[], object] | None:
        return self._group.joins

    def keep_ledger(self, samples: Any, *, accumulate: int = 1) -> Any:
        return self._group.keep_ledger(samples, accumulate=accumulate)

    @property
    def incarnation(self) -> int:
        return self._word.incarnation

    @property
    def closed(self) -> bool:
        return self._word.closed

    @property
    def emit(self) -> EmitEvent:
        return self._group.emit if self.leads else _nothing

    def check(self) -> None:
        """Takes rank 0's word at a step boundary. All ranks call it."""
        asks = False
        if self.leads:
            now_s = time.monotonic()
            self.why = self.why or self._asked()
            if not self.why and now_s >= self._ask_at:
                asks, self._ask_at = True, now_s + _ASK_S
        self._led(self._group.check if self.leads else lambda: None, asks=asks)
        if self._word.asks:  # launchers belong to one host, so a signal may reach only one rank
            found = self.all(self._asked())
            self.why = next((f"rank {rank}: {each}" for rank, each in enumerate(found) if each), "")
        if self.loads is not None:
            self.loads.begun = self._word.loaded

    def start(self, host: Reduction, fingerprint: Fingerprint) -> list[Committed]:
        links, shards = self.links, self._shards
        fragments: list[Any] = host.fragments
        self._worker = worker = Worker(links, host, fragments, shards.transport)
        if not self.leads:
            worker.start()
            links.listen(worker.heard, lambda error: None)
            while (heard := self.island.hear())[0] == _RESTORE:
                try:
                    self._restore(heard[1])
                except FtoptError as error:
                    if error is not self.alike:  # else rank 0 raises it, too, and reports it
                        raise
        else:
            self._host = slice_host = SliceHost(worker, self.island.size, self._whole)

            def lost(error: FtoptError) -> None:
                slice_host.lost(error)
                shards.fail(error)

            links.listen(slice_host.heard, lost)
            shards.transport.parts = self.island.size if fragments[0].view.sliced else 1
            try:
                heard = "", self._group.start(slice_host, fingerprint), None
            except BaseException as error:
                heard = "", None, error
            self.island.say((*heard[:2], portable(heard[2])))
        if heard[2] is not None:
            if self.alike is not None:
                self.close()
                self.raise_alike(heard[2])
            raise heard[2]
        self._led()
        return list(heard[1])

    def fall_back(self, newest: Callable[[], Position | None], restore: Callable[[], Held]) -> None:
        if self.leads:

            def together() -> Held:
                self.island.say((_RESTORE, self._group.incarnation, None))
                return self._restore(self._group.incarnation)

            self._group.fall_back(newest, together)
        self._restore_here = restore

    def _restore(self, incarnation: int) -> Held:
        self._word = replace(self._word, incarnation=incarnation)
        return self._restore_here()

    def held(self) -> Held:
        found: Held = self._led(self._group.held if self.leads else _none)
        return found

    def resume(self, held: Held) -> None:
        self._led(lambda: self._group.resume(held))

    def adopted_work(self) -> None:
        """None: there is no replay."""

    def propose(self, contribution: Contribution, *, now: bool = False) -> None:
        self._proposed.add(contribution.fragment)
        if self.leads:
            self._group.propose(contribution, now=now)

    def wait(self, fragment: int, *, timeout_s: float | None = None) -> bool:
        """Waits for a fragment. Changes of other fragments take effect meanwhile, so that peers can fetch these."""
        ends_s, again = math.inf if timeout_s is None else time.monotonic() + timeout_s, True
        while again:
            decided, again = self._led(lambda: self._waited(fragment, ends_s))
        return bool(decided)

    def _waited(self, fragment: int, ends_s: float) -> tuple[bool, bool]:
        """On rank 0: whether it is decided; and whether instead changes have come, with time left to go on waiting."""
        assert self._host is not None
        left_s = None if math.isinf(ends_s) else max(0.0, ends_s - time.monotonic())
        decided = self._group.wait(fragment, timeout_s=left_s, until=self._host.waits)
        return decided, not decided and self._host.waits() and time.monotonic() < ends_s

    def catch_up(self, *, timeout_s: float | None = None) -> bool:
        return bool(self._led(lambda: self._group.catch_up(timeout_s=timeout_s)))

    def obstacle(self) -> str:
        return str(self._led(lambda: self._group.obstacle()))

    def outstanding(self, fragment: int) -> bool:
        return fragment in self._proposed or self._word.outstanding[fragment]

    def called_in(self, fragment: int) -> bool:
        return self._word.called_in[fragment]

    def share(self, reading: Reading) -> None:
        if self.leads:
            self._group.share(reading)

    def tell_loss(self, loss: float | Tensor) -> None:
        if self.leads:
            self._group.tell_loss(loss)

    def means(self, fragment: int) -> Means | None:
        """Rank 0's means, on which the ranks agree."""
        return self._group.means(fragment) if self.leads else None

    def report(self, state: str) -> None:
        if self.leads:
            self._group.report(state)

    def offer_copy(self, versions: tuple[int, ...], text: str, tensors: Mapping[str, Tensor]) -> None:
        """There is no replay."""

    def check_copies(self, check: Callable[[str, Mapping[str, Tensor]], None]) -> None:
        """There is no replay."""

    copy_settled = False

    def now_s(self) -> float:
        """Rank 0's clock, on all ranks."""
        return float(self._led(time.monotonic))

    def same(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        return self._led(lambda: value)

    def finish(self) -> None:
        if self.leads:
            self._group.finish()

    def stop(self, reason: str) -> None:
        if self.leads:
            self._group.stop(reason)

    @property
    def stopped(self) -> JobStopped | None:
        return self._word.stopped

    def wait_for_end(
        self, inner_step: int, *, but: Sequence[str], timeout_s: float, until: Callable[[], bool]
    ) -> End | None:
        end: End | None = self._led(
            lambda: self._group.wait_for_end(inner_step, but=but, timeout_s=timeout_s, until=until)
        )
        return end

    def leave(self, *, timeout_s: float, early: bool = False, reason: str = "") -> None:
        self._led(lambda: self._group.leave(timeout_s=timeout_s, early=early, reason=reason))

    def part(self, *, early: bool, reason: str = "") -> None:
        """Says goodbye at once, without the other ranks, which may be in other calls."""
        if self._links is not None and not early:
            self._links.part()
        elif self._links is not None and reason:
            self._links.fail(reason)
        if self.leads:
            if not early:
                self._group.finish()
            self._group.leave(timeout_s=0.0, early=early, reason=reason)

    def close(self) -> None:
        """Ends connections and threads at once. Of this rank alone."""
        self.has_left = True
        try:
            if self.leads:
                self._group.close()
        finally:
            if self._worker is not None:
                self._worker.end()
            if self._links is not None:
                self._links.close()


def _none() -> Any:
    return None


def _nothing(event: str, **_: Any) -> None:
    """Drops events, which only rank 0 emits."""


def portable(error: BaseException | None) -> BaseException | None:
    """The error in a form that can be sent to another process."""
    if error is None:
        return None
    try:
        found = pickle.loads(pickle.dumps(error))
        return found if isinstance(found, BaseException) else FtoptError(plain(error))
    except Exception:
        return FtoptError(f"rank 0: {type(error).__name__}: {plain(error)}")
