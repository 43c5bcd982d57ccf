"""What the training thread reads without a lock is never half written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, SupportsIndex

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
    fragment = SimpleNamespace(outstanding=True, released=False, called_in=False, means=None)
    machine: Any = SimpleNamespace(
        fragments=[fragment], incarnation=1, welcomed=True, ready=True, may_train=True, standby=False
    )
    view.propose(0)
    view.publish(machine, let_in=True, arrived=0)
    assert written[0] == FragmentView(proposed=0, offered=True)
    assert all(each.outstanding for each in written.seen)
