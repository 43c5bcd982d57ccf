"""`Sync`: what follows from other settings, and a codec with named settings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ftopt.codecs import TopK
from ftopt.config.loader import dump, load
from ftopt.errors import UserError
from ftopt.sync.protocol.settings import Derived, Sync


def test_times_follow_from_others_unless_they_are_set() -> None:
    assert Sync().derived == Derived(heartbeat_s=0.5, recovery_s=30.0, tail_s=600.0)
    assert Sync(dead_after_s=0.75, gone_after_s=9.0).derived == Derived(0.125, 7.5, 9.0)
    assert Sync(dead_after_s=60.0).derived.heartbeat_s == 0.5, "reports go on"
    set_by_hand = Sync(heartbeat_s=1.0, recovery_s=5.0, tail_s=7.0)
    assert set_by_hand.derived == Derived(1.0, 5.0, 7.0)
    assert replace(Sync(dead_after_s=0.75), dead_after_s=1.5).derived.heartbeat_s == 0.25


def test_replicas_compare_what_follows_and_not_what_was_written() -> None:
    assert Sync().values() == Sync(heartbeat_s=0.5, recovery_s=30.0, tail_s=600.0).values()
    assert Sync(**Sync().values()).derived == Sync().derived  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"heartbeat_s": 2.0}, r"sync.dead_after_s=3 with heartbeat_s=2; .* use dead_after_s=6"),
        ({"recovery_s": 0.0}, r"sync.recovery_s=0.0; must be a number of seconds above 0"),
        ({"tail_s": 1.0}, r"sync.tail_s=1; must be at least dead_after_s=3"),
        ({"gone_after_s": 2.0}, r"sync.gone_after_s=2; must be at least dead_after_s=3"),
        ({"codec": 5}, r"sync.codec=5; must be a codec or its name"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, float], match: str) -> None:
    with pytest.raises(UserError, match=match):
        Sync(**settings)  # type: ignore[arg-type]


def test_a_codec_has_named_settings() -> None:
    assert Sync(codec=TopK(fraction=0.01, bits=4)) == Sync(codec="top_k:0.01:4")
    recipe = load("diloco_bytes", ["sync.codec={name: top_k, fraction: 0.01, bits: 4}"])
    assert recipe.sync.codec == load("diloco_bytes", ["sync.codec=top_k:0.01:4"]).sync.codec == "top_k:0.01:4"
    assert "codec: top_k:0.01:4" in dump(recipe)
    assert load("diloco_bytes", ["sync.codec.name=int8"]).sync.codec == "int8"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "sync.codec={name: top_k, fractoin: 0.01}",
            "sync.codec.fractoin: unknown key; did you mean sync.codec.fraction?",
        ),
        ("sync.codec={name: top_k, payloads: 3}", "sync.codec.payloads: unknown key"),
        ("sync.codec={name: top_k, bits: 9}", "sync.codec: top_k: bits=9; must be 2 to 8"),
        ("sync.codec={name: int8, bits: 4}", "sync.codec.bits: unknown key"),
        ("sync.codec={name: fp5}", "sync.codec.name='fp5'; allowed: fp32, bf16, int8, fp4, top_k"),
        ("sync.codec={fraction: 0.01}", "sync.codec.name=None; allowed"),
        ("sync.codec=7", "sync.codec=7; must be a section"),
        ("sync.codec=fp5", "sync.codec='fp5'; allowed: fp32, bf16"),
    ],
)
def test_what_is_wrong_with_a_codec(override: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        load("diloco_bytes", [override])
    assert said in str(caught.value)
