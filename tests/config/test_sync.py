"""`FaultPolicy`: what follows from other settings, and a codec with named settings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ftopt.codecs import TopK
from ftopt.config.loader import dump, load
from ftopt.errors import UserError
from ftopt.methods import DiLoCo
from ftopt.sync.protocol.policy import Derived, FaultPolicy


def test_times_follow_from_others_unless_they_are_set() -> None:
    assert FaultPolicy().derived == Derived(heartbeat_s=0.5, recovery_s=30.0)
    assert FaultPolicy(dead_after_s=0.75).derived == Derived(0.125, 7.5)
    assert FaultPolicy(dead_after_s=60.0).derived.heartbeat_s == 0.5, "reports go on"
    set_by_hand = FaultPolicy(heartbeat_s=1.0, recovery_s=5.0)
    assert set_by_hand.derived == Derived(1.0, 5.0)
    assert replace(FaultPolicy(dead_after_s=0.75), dead_after_s=1.5).derived.heartbeat_s == 0.25


def test_replicas_compare_what_follows_and_not_what_was_written() -> None:
    assert FaultPolicy().values() == FaultPolicy(heartbeat_s=0.5, recovery_s=30.0).values()
    assert FaultPolicy(**FaultPolicy().values()).derived == FaultPolicy().derived  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"heartbeat_s": 2.0}, r"policy.dead_after_s=3 with heartbeat_s=2; .* use dead_after_s=6"),
        ({"recovery_s": 0.0}, r"policy.recovery_s=0.0; must be a number of seconds above 0"),
        ({"evict_after_s": 2.0}, r"policy.evict_after_s=2; must be at least dead_after_s=3"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, float], match: str) -> None:
    with pytest.raises(UserError, match=match):
        FaultPolicy(**settings)  # type: ignore[arg-type]


def test_a_codec_has_named_settings() -> None:
    assert DiLoCo(codec=TopK(fraction=0.01, bits=4)) == DiLoCo(codec="top_k:0.01:4")
    with pytest.raises(UserError, match="codec=5; must be a codec or its name"):
        DiLoCo(codec=5)  # type: ignore[arg-type]
    recipe = load("diloco_bytes", ["method.codec={name: top_k, fraction: 0.01, bits: 4}"])
    assert recipe.method.codec == load("diloco_bytes", ["method.codec=top_k:0.01:4"]).method.codec == "top_k:0.01:4"
    assert "codec: top_k:0.01:4" in dump(recipe)
    assert load("diloco_bytes", ["method.codec.name=int8"]).method.codec == "int8"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "method.codec={name: top_k, fractoin: 0.01}",
            "method.codec.fractoin: unknown key; did you mean method.codec.fraction?",
        ),
        ("method.codec={name: top_k, payloads: 3}", "method.codec.payloads: unknown key"),
        ("method.codec={name: top_k, bits: 9}", "method.codec: top_k: bits=9; must be 2 to 8"),
        ("method.codec={name: int8, bits: 4}", "method.codec.bits: unknown key"),
        ("method.codec={name: fp5}", "method.codec.name='fp5'; allowed: fp32, bf16, int8, fp4, top_k"),
        ("method.codec={fraction: 0.01}", "method.codec.name=None; allowed"),
        ("method.codec=7", "method.codec=7; must be a section"),
        ("method.codec=fp5", "method.codec='fp5'; allowed: fp32, bf16"),
    ],
)
def test_what_is_wrong_with_a_codec(override: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        load("diloco_bytes", [override])
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [("policy.gone_after_s=9", "policy.evict_after_s"), ("policy.slow_replicas=wait", "policy.stragglers")],
)
def test_what_a_setting_was_called_names_the_setting(override: str, said: str) -> None:
    with pytest.raises(UserError, match=f"did you mean {said}"):
        load("diloco_bytes", [override])
