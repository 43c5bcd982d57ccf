"""The examples of trainers: a replica is killed and comes back, and all end at the planned step with one digest."""

from __future__ import annotations

import pytest

from tests.integrations.running import killed_and_back, needs

pytestmark = pytest.mark.trainers


@pytest.mark.parametrize(
    ("name", "packages"),
    [
        ("plain", ()),
        ("muon", ()),
        ("nanogpt", ()),
        ("schedule_free", ("schedulefree",)),
        ("hf_trainer", ("transformers", "accelerate")),
        ("lora", ("transformers", "accelerate", "peft")),
        ("accelerate_loop", ("accelerate",)),
        ("lightning_automatic", ("lightning",)),
        ("lightning_manual", ("lightning",)),
        ("fabric", ("lightning",)),
    ],
)
def test_a_killed_replica_comes_back_and_both_end_at_the_planned_step_alike(
    name: str, packages: tuple[str, ...]
) -> None:
    needs(*packages)
    one, other = killed_and_back(f"{name}.py")
    assert one.step == other.step == 60
    assert one.digest == other.digest
    assert one.loss == pytest.approx(other.loss)
