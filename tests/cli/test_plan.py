"""``ftopt plan``: what it shows, what it recommends, what it refuses."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftopt.cli.main import main
from ftopt.cli.shared.times import seconds_above_0
from ftopt.config.loader import load
from ftopt.config.shipped import shipped
from ftopt.forecast import calibrate
from ftopt.methods.short_runs import outer_problems
from tests.pages import ROOT, blocks

SLOW = ["--step-s", "30ms", "--gbit-s", "0.05", "--latency-s", "20ms"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another folder; what recipes bring along is not imported before these tests, nor for those after them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    _forget()
    yield
    _forget()


def _forget() -> None:
    for name in [name for name in [*sys.modules] if name.startswith("own_")]:
        del sys.modules[name]


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plan", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(shipped()))
def test_each_shipped_recipe_has_a_plan_whose_command_is_valid(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, name, *SLOW, "--mtbf", "6h")
    now, best = found["as_it_is"], found["recommended"]
    assert 0 < now["goodput"] <= now["utilization"] <= 1
    recipe = load(name, best["overrides"])
    assert (recipe.method.name, recipe.method.codec) == (best["method"], best["codec"])
    assert best["goodput"] >= min(0.9, now["goodput"] - 0.01) or found["refused"]
    assert shlex.split(found["command"])[:3] == ["ftopt", "run", name]


def test_a_plan_needs_neither_the_data_nor_the_gpu_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "gpt2_124m", "train.device=cuda:7", "checkpoint.resume=nowhere", "--step-s", "300ms")
    assert found["recommended"]["method"] == "streaming_diloco"
    assert main(["plan", "gpt2_124m", "--calibrate"]) == 2
    assert "data/openwebtext/train.bin" in capsys.readouterr().err


def test_the_page_shows_what_is_printed_for_two_sites(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "choosing.md"
    (command,) = (block.text for block in blocks(page) if block.text.startswith("ftopt plan gpt2_124m"))
    (table,) = (block.text for block in blocks(page) if "compute utilization" in block.text)
    (recipe,) = (block.text for block in blocks(page) if block.kind == "yaml")
    assert main(shlex.split(command.replace("\\\n", " "))[1:]) == 0
    assert table in capsys.readouterr().out
    Path("two_sites.yaml").write_text(recipe, encoding="utf-8")
    assert main(["plan", "two_sites.yaml", "--step-s", "300ms", "--latency-s", "30ms", "--mtbf", "1d"]) == 0
    assert "the recipe needs no change" in capsys.readouterr().out


def test_a_table_and_a_command_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "diloco_bytes", *SLOW, "replicas=8"]) == 0
    shown = capsys.readouterr().out
    assert "8 replicas" in shown and "compute utilization" in shown and "docs/choosing.md" in shown
    assert "why sync_sgd" not in shown, "another method is recommended"
    command, several = shown.splitlines()[-2:]
    assert command.startswith("ftopt run diloco_bytes replicas=8 method.")
    assert several.startswith("on several machines: `ftopt coordinator") and "`ftopt replica`" in several


@pytest.mark.long
def test_a_slow_link_asks_for_more_than_a_fast_one(capsys: pytest.CaptureFixture[str]) -> None:
    fast = planned(capsys, "diloco_bytes", "--step-s", "1", "--gbit-s", "100")
    assert fast["recommended"]["method"] == "sync_sgd"
    assert fast["recommended"]["loss_percent"] == 0
    slow = planned(capsys, "diloco_bytes", *SLOW)
    assert slow["recommended"]["method"] == "streaming_diloco"
    assert slow["recommended"]["goodput"] > slow["as_it_is"]["goodput"]
    crawl = planned(capsys, "diloco_bytes", "--step-s", "30ms", "--gbit-s", "0.0005")
    assert crawl["recommended"]["codec"] == "fp4"
    assert crawl["recommended"]["dead_after_s"] > 3


def test_a_target_that_is_lower_costs_less_loss(capsys: pytest.CaptureFixture[str]) -> None:
    low = planned(capsys, "diloco_bytes", *SLOW, "--target", "0.5")["recommended"]
    high = planned(capsys, "diloco_bytes", *SLOW, "--target", "0.95")["recommended"]
    assert low["loss_percent"] < high["loss_percent"] and low["goodput"] < high["goodput"]


def test_whether_the_job_fits_into_the_memory_of_a_replica(capsys: pytest.CaptureFixture[str]) -> None:
    fast = ["diloco_bytes", "--step-s", "1", "--gbit-s", "100"]
    free = planned(capsys, *fast)
    as_it_is, most = free["as_it_is"]["memory_bytes"], free["recommended"]["memory_bytes"]
    tight = planned(capsys, *fast, "--memory", f"{(most - 1000) / 1e6:.6f}MB")
    assert tight["recommended"]["memory_bytes"] <= tight["machines"]["memory_bytes"] < most
    assert main(["plan", "diloco_bytes", *SLOW, "--memory", f"{(as_it_is + 1) / 1e6:.6f} MB"]) == 0
    assert "memory as it is: fits: " in capsys.readouterr().out
    assert main(["plan", "diloco_bytes", *SLOW, "--memory", "1MiB"]) == 0
    shown = capsys.readouterr().out
    assert "memory as it is: does not fit into 1.05 MB: " in shown, "1024 kB"
    assert "memory as recommended: does not fit" in shown, "the least loss of all, since none fits"
    for wrong, says in (("80", "a size with a unit"), ("0GB", "above 0"), ("1.2.3GB", "a number"), ("GB", "a unit")):
        with pytest.raises(SystemExit):
            main(["plan", "diloco_bytes", *SLOW, "--memory", wrong])
        assert says in capsys.readouterr().err


def test_outer_settings_that_do_not_suit_the_run_become_auto(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "diloco_bytes", "method.outer=paper", *SLOW)
    assert found["as_it_is"]["loss_percent"] is None
    assert "method.outer=auto" in found["recommended"]["overrides"]
    fits = planned(capsys, "diloco_bytes", "method.outer=paper", "train.inner_steps=100000", *SLOW)["recommended"]
    assert not [each for each in fits["overrides"] if each.startswith("method.outer")]


@pytest.mark.parametrize(
    "start",
    [
        ["method.sync_every=100", "method.delay=5", "method.codec=fp4", "method.outer=paper"],
        ["method.sync_every=100", "method.delay=5", "method.codec=fp4"],
        ["method.name=diloco", "method.outer=paper"],
        ["method.name=paft"],
        ["method.name=diloco", "method.trigger={name: every_seconds, seconds: 60}"],
    ],
)
def test_the_recommendation_does_not_depend_on_the_recipe_s_method(
    start: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["model={name: gpt, layers: 2, heads: 8, width: 1024, context: 64, vocab: 256}", "replicas=8"]
    words = ["adamw_bytes", *model, "train.inner_steps=4000", "method.name=streaming_diloco"]
    link = ["--gbit-s", "0.002", "--latency-s", "60ms", "--step-s", "1", "--mtbf", "20min"]
    fits = planned(capsys, *words, "method.outer=auto", *link)["recommended"]
    found = planned(capsys, *words, *start, *link)
    best = found["recommended"]
    settings = ("method", "sync_every", "fragments", "delay", "codec", "goodput", "loss_percent")
    assert [best[each] for each in settings] == [fits[each] for each in settings]
    assert best["loss_percent"] is not None and not best["late_steps"]
    recipe = load("adamw_bytes", [*words[1:], *start, *best["overrides"]])
    assert not outer_problems(recipe.method, recipe.train.inner_steps)


def test_less_goodput_for_less_loss_is_explained_with_where_the_figures_are_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["train.inner_steps=100000", "--step-s", "1", "--mtbf", "16h", "replicas=8"]
    assert main(["plan", "diloco_bytes", *words]) == 0
    said = capsys.readouterr().out
    assert "failures: each replica fails every 16 h: the job loses one of 8 every 2 h" in said
    (told,) = (line for line in said.splitlines() if line.startswith("recommended is less goodput"))
    assert "the least of all settings that reach --target, 90%; these losses are extrapolated from far smaller" in told
    assert "(131,000 parameters, 600 steps)" in told and "a --target above" in said
    assert "extrapolated to 100,000 steps" in said and " none\n" in said, "SyncSGD has no fragments"


@pytest.mark.parametrize(("target", "why"), [("0.9", "goodput reaches --target"), ("1", "no setting has 0.01 more")])
def test_why_gradients_are_exchanged_at_every_step_is_said(
    target: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "diloco_bytes", "--step-s", "5", "--gbit-s", "100", "--target", target]) == 0
    (told,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("why sync_sgd"))
    assert f": exchanging gradients at every step costs 0.6% of the time at this link, {why}" in told


def test_what_a_recipe_cannot_have_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "globalbatch_bytes", *SLOW]) == 0
    shown = capsys.readouterr().out
    assert "not tried: diloco: data.global_batch=64" in shown


@pytest.mark.long
def test_calibration_measures_what_is_not_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, less in {"_LARGE": 160_000, "_TURNS": 1, "_ROUNDS": 4, "_SENT": 1 << 20, "_COPIED": 1 << 20}.items():
        monkeypatch.setattr(calibrate, name, less)
    found = planned(capsys, "digits", "--calibrate", "--gbit-s", "1", "train.inner_steps=40")
    assert found["machines"]["gbit_s"] == 1.0
    assert all(found["measured"][key] > 0 for key in ("step_s", "memory_gb_s", "loopback_gbit_s"))
    assert found["machines"]["step_s"] == found["measured"]["step_s"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "1 divided by the steps/s of `ftopt status`"),
        (["--step-s", "1", "--target", "2"], "--target=2; must be above 0 and at most 1"),
        (["--step-s", "1", "replicas=0"], "replicas=0; must be from 1"),
        (["--step-s", "1", "method.sync_evry=3"], "did you mean method.sync_every?"),
    ],
)
def test_wrong_input_is_refused_in_one_message(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "diloco_bytes", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "text"),
    [("--gbit-s", "1e-300"), ("--gbit-s", "1e30"), ("--latency-s", "1e300"), ("--step-s", "1e308")],
)
def test_a_link_or_a_step_that_none_has_is_refused(option: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "diloco_bytes", option, text])
    assert f"{option}: '{text}'; must be" in capsys.readouterr().err


def test_the_command_has_each_key_once(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "diloco_bytes", *SLOW, "method.name=local_sgd", "train.seed=3")
    words = shlex.split(found["command"])[3:]
    keys = [word.partition("=")[0] for word in words]
    assert len(set(keys)) == len(keys) and {"train.seed", "method.name"} <= set(keys)
    assert load("diloco_bytes", words) == load("diloco_bytes", ["train.seed=3", *found["recommended"]["overrides"]])


@pytest.mark.parametrize("words", [["--mtbf", "soon"], ["--step-s", "0"], ["--gbit-s", "-1"], ["--latency-s", "nan"]])
def test_a_number_that_is_none_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "diloco_bytes", *words])
    assert ended.value.code == 2
    assert "must be a" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"), [("0.3", 0.3), ("300ms", 0.3), ("10min", 600), ("6h", 21600), ("1e-3 s", 1e-3)]
)
def test_times_have_units(text: str, seconds: float) -> None:
    assert seconds_above_0(text) == pytest.approx(seconds)
