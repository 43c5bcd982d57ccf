"""Each example of a trainer ended in each way, with its callback and without: every inner step is accounted for."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integrations.running import needs
from tests.integrations.ways import AT, Life, Way, ended

TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL
EXAMPLES = {
    "plain": (), "muon": (), "nanogpt": (), "schedule_free": ("schedulefree",), "accelerate_loop": ("accelerate",),
    "fabric": ("lightning",), "hf_trainer": ("transformers", "accelerate"), "lora": ("transformers", "peft"),
    "lightning_automatic": ("lightning",), "lightning_manual": ("lightning",),
}  # fmt: skip
HAVE_CALLBACKS = ("hf_trainer", "lora", "lightning_automatic", "lightning_manual")
WAYS = {
    "SIGTERM": Way(TERM),
    "Ctrl-C": Way(INT),
    "SIGTERM to both": Way(TERM, both=True),
    "Ctrl-C, not listened to": Way(INT, listens=False),
    "an exception": Way(None),
    "a kill": Way(KILL),
    "SIGTERM, without callback": Way(TERM, callback=False),
    "an exception, without callback": Way(None, callback=False),
}


def check(name: str, way: Way, folder: Path) -> tuple[Life, Life]:
    """Ends an example in a way; what holds in all of them."""
    needs(*EXAMPLES[name])
    r0, r1 = ended(f"{name}.py", way, folder)
    print(f"{name}: {r0.taken} = {r0.committed} + {r0.lost}; {r1.taken} = {r1.committed} + {r1.lost}")  # noqa: T201
    for life in (r0, r1) if r1.taken >= 0 else (r0,):
        assert life.taken == life.committed + life.lost, (life, "every step is in a version, or the log gives it up")
        assert "without close()" not in "".join(life.log), life.log
    assert r0.status == 0 and r0.lost == 0, "a survivor loses none, and neither do both that leave in good order"
    if way.signal in (TERM, INT) and way.listens:
        assert r1.lost == 0 and r1.status == 0, r1
        assert r0.saved or way.both, "the last to leave completes a checkpoint; of two that leave together, either may"
        assert "has left at version" in r1.log[-1], r1.log
    elif way.signal is None or way.signal is INT:
        assert r1.status and r1.taken >= AT
        assert " in no version" in r1.log[-1] and (way.signal is None or "Ctrl-C" in r1.log[-2]), r1.log
    return r0, r1


@pytest.mark.trainers
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("lightning_automatic", "SIGTERM"),
        ("lightning_manual", "SIGTERM to both"),
        ("hf_trainer", "Ctrl-C"),
        ("hf_trainer", "SIGTERM, without callback"),
        ("plain", "an exception"),
    ],
)
def test_all_steps_are_accounted_for(name: str, way: str, tmp_path: Path) -> None:
    check(name, WAYS[way], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_all_steps_of_each_example_are_accounted_for_in_each_way(name: str, way: str, tmp_path: Path) -> None:
    if not WAYS[way].callback and name not in HAVE_CALLBACKS:
        pytest.skip("a loop of its own has no callback")
    check(name, WAYS[way], tmp_path)
