"""What the training thread reads without a lock is never half written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, SupportsIndex

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica.fragment import FragmentState
from ftopt.sync.protocol.replica.states import Call, Offer
from ftopt.sync.replica.view import FragmentView, View


class Written(list[FragmentView]):
    """Keeps all that a reader may see."""

    def __init__(self, *views: FragmentView) -> None:
        super().__init__(views)
        self.seen: list[FragmentView] = []

    def __setitem__(self, index: Any, view: Any) -> None:
        assert isinstance(index, SupportsIndex)
        self.seen.append(view)
        super().__setitem__(index, view)


def test_a_proposal_that_arrives_is_on_its_way_or_offered_at_every_moment() -> None:
    view, written = View(), Written(FragmentView())
    view.fragments = written
    view.propose(0)
    view.publish(machine_of(_offered(0)), let_in=True, arrived=0)
    assert written[0] == FragmentView(proposed=0, offered=True)
    assert all(each.outstanding for each in written.seen)


def test_threads_are_woken_by_news_alone() -> None:
    view, fragments = View(), [FragmentState(0), FragmentState(1)]
    view.fragments, machine, woken = [FragmentView()] * 2, machine_of(*fragments), [0]
    view.changed.notify_all = lambda: woken.append(woken.pop() + 1)  # type: ignore[method-assign]

    def wakes(*, arrived: int | None = None) -> bool:
        before = woken[0]
        view.publish(machine, let_in=True, arrived=arrived)
        return woken[0] > before

    assert wakes()  # the first
    assert not wakes()
    fragments[1].call = Call.CALL_IN
    assert wakes()
    assert view.fragments[1].called_in
    view.propose(1)
    fragments[1].offer, fragments[1].call = _offered(1).offer, Call.NONE
    assert wakes(arrived=1)
    assert not wakes()
    fragments[1].call = Call.TRAIN_ON
    assert wakes()
    fragments[0].record = m.Record(0, 1, "c", 5)
    assert wakes()  # peers can fetch it, once it has taken effect on all ranks
    fragments[1].offer = None
    assert wakes()
    assert not view.fragments[1].outstanding
    machine.may_train = False
    assert wakes()
    view.propose(1)
    assert wakes(arrived=1)  # the machine has not taken it
    assert not view.fragments[1].outstanding


def machine_of(*fragments: FragmentState) -> Any:
    return SimpleNamespace(fragments=fragments, incarnation=1, welcomed=True, ready=True, may_train=True, standby=False)


def _offered(fragment: int) -> FragmentState:
    return FragmentState(fragment, offer=Offer(m.Contribution(fragment, 0, 1, 1, 1.0)))
