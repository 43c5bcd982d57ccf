"""The examples of trainers: a replica is killed and comes back, and all end at the planned step with one digest."""

from __future__ import annotations

import pytest

from tests.integrations.running import killed_and_back, needs

pytestmark = pytest.mark.trainers


@pytest.mark.parametrize(
    ("name", "packages"),
    [
        ("plain.py", ()),
        ("hf_trainer.py", ("transformers", "accelerate")),
    ],
)
def test_a_killed_replica_comes_back_and_both_end_at_the_planned_step_alike(
    name: str, packages: tuple[str, ...]
) -> None:
    needs(*packages)
    one, other = killed_and_back(name)
    assert one.step == other.step == 60
    assert one.digest == other.digest
    assert one.loss == pytest.approx(other.loss)
