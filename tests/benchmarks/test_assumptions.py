"""The settings that a simulated policy names."""

from __future__ import annotations

import pytest

import ftopt
from benchmarks.simulate.assumptions import Model
from benchmarks.simulate.comparison import ours
from ftopt.config.optimizers import parameters_of


@pytest.mark.parametrize(
    ("name", "dead_after_s"), [("spot_machines", 3.0), ("streaming_bytes", 700.0), ("decoupled_bytes", 1.0)]
)
def test_a_recipe_with_a_policys_settings_is_what_is_simulated(name: str, dead_after_s: float) -> None:
    model = Model(sync_every=240, dead_after_s=dead_after_s, evict_after_s=max(600.0, dead_after_s), notice_s=120.0)
    for policy in ours(model, delay=7, quorum=3, fragments=4, codec="int8"):
        usual = [f"policy.{key}={value}" for key, value in Model().settings(1).items() if key != "heartbeat_s"]
        recipe = ftopt.recipe(name, [*usual, *policy.settings])
        made, assumed = recipe.method, policy.model
        found = made.sync_every, made.overlap.delay, made.overlap.wait_for_result_s
        assert found == (assumed.sync_every, assumed.delay, 0.0), policy.name
        assert made.overlap.adaptive_grace == assumed.adaptive_grace
        parts = made.partition(parameters_of(recipe.build_model()))
        assert len(parts) == assumed.fragments, policy.name
        assert recipe.method.codec == "int8"
        derived = recipe.policy.derived
        for key, value in assumed.settings(1).items():
            got = getattr(derived if key == "heartbeat_s" else recipe.policy, key)
            assert got == pytest.approx(value), (policy.name, key)
