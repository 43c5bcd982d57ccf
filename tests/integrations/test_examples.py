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
        ("continue_pretraining", ("transformers",)),
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
    ended = killed_and_back(f"{name}.py", told_per_step=2 if name == "lightning_automatic" else 1)  # its micro-batches
    one, other = ended.back, ended.survivor
    print(f"{name}: {other}, executed {ended.executed}, committed {ended.committed}")  # noqa: T201 (for the page)
    assert one.step == other.step == 60
    assert one.digest == other.digest
    assert one.loss == pytest.approx(other.loss)
    survivor, dead, back = (e - c for e, c in zip(ended.executed, ended.committed, strict=True))
    assert survivor == 0, "a survivor loses no step"
    assert -1 <= dead <= ended.executed[1] and ended.committed[1] >= 20, "a step may count before it is told"
    assert 0 <= back <= 2, "but for those that one that has come late takes beyond the plan"
