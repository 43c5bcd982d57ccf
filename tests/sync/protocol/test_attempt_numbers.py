from __future__ import annotations

from ftopt.sync.protocol.coordinator.rounds.attempts import AttemptNumbers


def test_a_new_epoch_of_one_life_repeats_no_number_of_an_old_one_that_had_more_than_a_million() -> None:
    numbers = AttemptNumbers(epoch=10)
    for _ in range(1_000_005):
        last = numbers.next()
    numbers.restart(11)
    assert numbers.next() > last


def test_an_epoch_after_a_clock_that_was_set_back_begins_above_what_the_journal_has() -> None:
    former = AttemptNumbers(epoch=10, offset=999_990)
    numbers = [former.next() for _ in range(20)]
    assert AttemptNumbers(epoch=11, decided=numbers[:10], offset=3).next() > numbers[-1]


def test_coordinators_that_start_in_one_second_begin_apart_and_stay_apart_in_later_epochs() -> None:
    one, other = AttemptNumbers(epoch=11, offset=250_000), AttemptNumbers(epoch=11, offset=750_000)
    assert (one.next(), other.next()) == (11_250_001, 11_750_001)
    one.restart(12)
    other.restart(12)
    assert (one.next(), other.next()) == (12_250_001, 12_750_001)
