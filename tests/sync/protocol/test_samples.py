"""Units of a job's samples: epochs, short and dropped last batches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftopt.sync.protocol.samples import Samples

SOME = st.builds(
    Samples,
    samples=st.integers(10, 50),
    batch_size=st.integers(1, 10),
    drop_last=st.booleans(),
    epochs=st.none() | st.integers(1, 4),
)


def test_only_the_last_unit_of_an_epoch_is_short() -> None:
    samples = Samples(samples=10, batch_size=4)
    assert samples.units_per_epoch == 3
    assert [samples.epoch_of(unit) for unit in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    assert [samples.positions(unit) for unit in range(4)] == [range(4), range(4, 8), range(8, 10), range(4)]
    assert samples.units is None


def test_drop_last_leaves_it_out() -> None:
    samples = Samples(samples=10, batch_size=4, drop_last=True, epochs=3)
    assert (samples.units_per_epoch, samples.units) == (2, 6)
    assert [samples.positions(unit) for unit in (1, 2)] == [range(4, 8), range(4)]
    assert samples.count([(0, 6)]) == 24


@settings(deadline=None)
@given(SOME, st.integers(0, 200), st.integers(0, 200))
def test_samples_are_counted_as_their_positions_are(samples: Samples, start: int, length: int) -> None:
    units = range(start, start + length)
    assert samples.count([(units.start, units.stop)]) == sum(len(samples.positions(unit)) for unit in units)


@settings(deadline=None)
@given(SOME, st.integers(0, 5))
def test_the_units_of_an_epoch_are_its_positions_in_order(samples: Samples, epoch: int) -> None:
    per_epoch = samples.units_per_epoch
    units = range(epoch * per_epoch, (epoch + 1) * per_epoch)
    assert {samples.epoch_of(unit) for unit in units} == {epoch}
    found = [position for unit in units for position in samples.positions(unit)]
    dropped = samples.samples % samples.batch_size if samples.drop_last else 0
    assert found == list(range(samples.samples - dropped))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"samples": 0}, "samples=0; must be from 1"),
        ({"batch_size": 0}, "batch_size=0; must be from 1"),
        ({"seed": -1}, "seed=-1; must be from 0"),
        ({"epochs": 0}, "epochs=0; must be null"),
        ({"batch_size": 11, "drop_last": True}, "leaves no batch at all; use a smaller batch_size"),
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Samples(**{"samples": 10, "batch_size": 4, **wrong})  # type: ignore[arg-type]
