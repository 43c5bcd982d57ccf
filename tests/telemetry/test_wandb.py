"""wandb: which mode, and that it never gets in training's way."""

from pathlib import Path

import pytest

from ftopt.telemetry.wandb import WandbMirror, resolve


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_auto_is_offline_without_a_key_and_online_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert resolve("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert resolve("auto") == "off"
    assert resolve("offline") == "offline"


def test_an_error_of_wandb_does_not_reach_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = WandbMirror("offline", tmp_path, job="job", replica="r0", config={})

    def broken() -> None:
        raise RuntimeError("no service")

    monkeypatch.setattr(mirror, "_mirror", broken)
    mirror.step(10, loss=1.0, lr=0.1)
    mirror.finish(10.0)
    assert "no service" in caplog.text


@pytest.mark.slow
def test_an_offline_run_lies_in_the_runs_folder(tmp_path: Path) -> None:
    mirror = WandbMirror("offline", tmp_path, job="job", replica="r0", config={"replicas": 1})
    for step in range(0, 30, 10):
        mirror.step(step, loss=1.0, lr=0.1)
    mirror.finish(60.0)
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
