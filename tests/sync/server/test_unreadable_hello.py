from __future__ import annotations

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica.effects import GiveUp, Notice
from ftopt.sync.protocol.replica.identity import Identity
from ftopt.sync.protocol.replica.machine import Replica


def _answer(incarnation: int) -> list[object]:
    replica = Replica(Identity("j", "r0", {}, {}, "aa"), incarnation=incarnation)
    replica.connect()
    return list(replica.receive(m.Refuse("unreadable", "too long")))


def test_a_newcomer_whose_hello_cannot_be_read_gives_up_and_who_was_let_in_trains_on() -> None:
    assert _answer(0) == [GiveUp("too long")]
    assert _answer(3) == [Notice("too long")]
