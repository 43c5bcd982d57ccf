"""``python -m benchmarks simulate``: its table, its files, and wrong input."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.simulate import output, traces

_SMALL = ["simulate", "--machines", "4", "--hours", "0.2", "--sync-every", "20", "--dead-after", "6"]


def test_policies_stand_side_by_side_with_what_they_assume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "small.csv"
    trace.write_text("0,add,a\n0,add,b\n200000,add,c\n300000,remove,b\n600000,remove,c\n", encoding="utf-8")
    files = ["--json", str(tmp_path / "x.json"), "--picture", str(tmp_path / "x.svg")]
    assert main([*_SMALL, "--trace", str(trace), "--codec", "int8", "--quorum", "1", *files]) == 0
    said = capsys.readouterr().out
    assert "small: 0.2 h, 3 machines at most" in said
    told = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert [x["simulated"] for x in told["policies"]] == [True] * 5 + [False] * 9
    assert [x["on_notice"] for x in told["policies"]] == [False] * 3 + [True] * 2 + [False] * 9
    for policy in told["policies"]:
        assert bool(policy["settings"]) == policy["simulated"]
        assert f"{policy['policy']}: {policy['assumes']}" in said
        assert 0 < policy["goodput"] <= 1
    assert "<svg" in (tmp_path / "x.svg").read_text(encoding="utf-8")


def test_a_fleet_without_a_trace_and_one_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_SMALL, "--mtbf", "400", "--only", "blocking"]) == 0
    said = capsys.readouterr().out
    assert "4 machines, a failure every 100 s in the whole fleet" in said
    assert "Bamboo" not in said
    assert re.search(r"\d% with `ftopt, blocking`$", said, re.MULTILINE)
    assert said.splitlines()[-1].startswith(
        "`ftopt, blocking` in a recipe: method.name=diloco method.sync_every=20 policy."
    )
    assert "No machine was removed" not in said


def test_the_best_policy_says_its_settings_and_that_it_needs_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_SMALL, "--mtbf", "400", "--only", "SIGTERM", "--delay", "3"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("`ftopt, delay 3, SIGTERM on notice` in a recipe: method.name=streaming_diloco ")
    assert " method.delay=3 " in last
    assert last.endswith("; on notice see docs/operations.md, Spot machines")


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ([], "give --mtbf, --failures or --trace"),
        (["--mtbf", "10d"], "give a shorter --mtbf, or more --hours"),
        (["--trace", "x.csv"], "give another --trace, or a longer part of it (--hours)"),
    ],
)
def test_a_result_without_failures_says_how_there_are_some(
    options: list[str], how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.csv").write_text("0,add,a\n1000000,add,b\n", encoding="utf-8")
    assert main([*_SMALL, *options, "--only", "blocking"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"No machine was removed, so this says nothing of failures: {how}"


def test_times_have_units_and_a_policy_alone_says_all_that_it_assumes(capsys: pytest.CaptureFixture[str]) -> None:
    times = ["--mtbf", "10min", "--back", "0.5min", "--step-s", "500ms", "--notice", "0"]
    assert main([*_SMALL, *times, "--only", "delay"]) == 0
    said = capsys.readouterr().out
    assert "a failure every 150 s" in said and "a step 0.5 s" in said
    assert "ftopt, delay 10: DiLoCo, H=20, no notice" in said and "as above" not in said


def test_machines_that_fail_together_fail_as_often_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_SMALL, "--mtbf", "400", "--together", "2", "--only", "blocking"]) == 0
    assert "4 machines, a failure every 200 s" in capsys.readouterr().out


def test_how_often_a_machine_fails_is_in_hours_or_minutes_if_they_are_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*_SMALL, "--mtbf", "8h", "--only", "blocking"]) == 0
    assert "4 machines, a failure every 2 h in the whole fleet: 0.2 h" in capsys.readouterr().out
    assert [traces.span(x) for x in (600, 5400, 86400, 7201)] == ["10 min", "90 min", "24 h", "7201 s"]


def test_a_time_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*_SMALL, "--mtbf", "soon"])
    assert "--mtbf: 'soon'; must be a time" in capsys.readouterr().err


def test_a_long_run_says_on_a_terminal_how_far_it_is_and_how_long_it_will_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("_SHOWN_S", "_LEFT_S"):
        monkeypatch.setattr(output, name, 0.0)
    assert main([*_SMALL, "--only", "blocking"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main([*_SMALL, "--only", "blocking"]) == 0
    assert re.search(r"policy 1 of 1, ftopt, blocking: \d+%, about \d+ s to go", capsys.readouterr().err)


def test_each_policys_row_is_printed_when_it_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before: list[str] = []
    progress = output.Progress.__call__

    def note(self: output.Progress, name: str, share: float) -> None:
        before.append(capsys.readouterr().out) if self._number and name != self._name else None
        progress(self, name, share)

    monkeypatch.setattr(output.Progress, "__call__", note)
    assert main([*_SMALL, "--only", "delay"]) == 0
    assert [text.splitlines()[-1].partition("  ")[0] for text in before] == [
        "ftopt, delay 10",
        "ftopt, delay 10, close() on notice",
    ]


def test_each_policy_at_each_failure_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_SMALL, "--rates", "--json", str(tmp_path / "x.json")]) == 0
    said = capsys.readouterr().out.splitlines()
    head = next(n for n, line in enumerate(said) if "a failure in 6 h" in line and "a failure in 10 min" in line)
    assert len([line for line in said[head + 1 : -1] if line.count("%") == 5]) == 5 + 9 - 1
    assert [line.count("no round") for line in said if line.startswith("ftopt, decoupled")] == [5]  # a quorum of 8
    assert len(json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))) == 6 * (5 + 9)


def test_machines_fail_as_often_as_in_a_published_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_SMALL, "--machines", "8", "--hours", "0.02", "--failures", "llama3", "--only", "blocking"]) == 0
    assert "8 machines, a failure every 2.56308e+06 s" in capsys.readouterr().out


def test_the_models_alone_take_seconds_for_a_large_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--machines", "2048", "--hours", "24", "--failures", "rsc1", "--models"]) == 0
    said = capsys.readouterr().out
    assert "synchronous data-parallel" in said
    assert "ftopt," not in said


def test_models_stand_beside_published_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_SMALL, "--hours", "2", "--published"]) == 0
    assert "ReCycle  GPT-3 6.7B" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trace", "none.csv"], "none.csv cannot be read"),
        (["--machines", "0"], "--machines=0; must be a whole number"),
        (["--mtbf", "-1"], "--mtbf=-1.0; must be a number of seconds above 0"),
        (["--failures", "llama4"], "--failures='llama4'; allowed: llama3, opt175b, rsc1"),
        (["--failures", "llama3", "--mtbf", "60"], "--failures=llama3 with --mtbf"),
        (["--failures", "llama3", "--trace", "x.csv"], "--failures=llama3 with --trace"),
        (["--models", "--only", "delay"], "--models with --only=delay"),
        (["--rates", "--sweep"], "--rates with --sweep: each shows a table of its own; give one"),
        (["--rates", "--failures", "llama3"], "--failures has no effect with --rates; leave it out"),
        (["--sweep", "--picture", "x.svg"], "--picture has no effect with --sweep"),
        (["--only", "nothing"], "no policy has that in its name"),
        (["--step-s", "0"], "--step-s=0.0; must be a"),
        (["--step-s", "1e-308"], "--step-s=1e-308; must be a number of seconds in [1e-6, 1e9]"),
        (["--step-s", "1e-6", "--hours", "100"], "contributions would have to be simulated; at most 5e+09 are allowed"),
        (["--dead-after", "1e-9"], "--dead-after=1e-09; must be a number of seconds in [0.001, 1e9]"),
        (["--dead-after", "1e308"], "--dead-after=1e+308; must be a number of seconds in [0.001, 1e9]"),
        (["--grace", "1e308"], "heartbeats after the end would have to be simulated"),
        (["--hours", "100000", "--machines", "5000"], "fewer machines, or fewer --hours"),
        (["--slow-every", "1e-9"], "--slow-every=1e-09; must be at least 0.001 seconds, or inf for none"),
        (["--slow-for", "1e-9"], "--slow-for=1e-09; must be a number of seconds in [0.001, 1e9]"),
        (["--sync-every", "10000000000"], "--sync-every=10000000000; must be a number in [1, 1e9]"),
        (["--parameters", "inf", "--codec", "int8"], "--parameters=inf; must be a finite number above 0"),
        (["--codec", "fp3"], "allowed: fp32"),
        (["--json", "nowhere/x.json"], "nowhere is no folder"),
        (["--json", "x", "--picture", "./x"], "--json=x with --picture=./x: both name the same file; name two"),
        (["--json", "."], "--json=. is a folder; name a file in it"),
        (["--json", ""], "--json is empty; name a file"),
        (["--trace", ""], "--trace is empty; name a file"),
        (["--machines", "1000000000"], "1,000,000,000 machines for 0.2 h with a failure in"),
        (["--mtbf", "1e-9"], "at most 5,000,000; use fewer machines"),
        (["--hours", "1e18"], "--hours=1e+18; must be a number in (0, 100000]"),
        (
            ["--machines", "2", "--hours", "0.02", "--only", "blocking", "--json", "/dev/full"],
            "No space left on device",
        ),
        (["--seed", "-1"], "--seed=-1"),
    ],
)
def test_wrong_input_is_one_message(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_SMALL, *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


def test_results_are_written_to_a_device_or_through_a_link_and_not_to_a_named_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("link").symlink_to("file")
    assert main([*_SMALL, "--json", "pipe"]) == 2
    assert "--json=pipe is a named pipe" in capsys.readouterr().err
    reader, writer = os.pipe()
    with os.fdopen(reader, encoding="utf-8") as pipe:
        files = ["--json", f"/dev/fd/{writer}", "--picture", "/dev/null"]
        assert main([*_SMALL, "--only", "blocking", *files]) == 0
        os.close(writer)
        assert len(json.loads(pipe.read())["policies"]) == 1
    assert main([*_SMALL, "--only", "blocking", "--json", "link"]) == 0
    assert Path("link").is_symlink() and Path("file").is_file()


def test_a_trace_of_centuries_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n1e300,remove,a\n", encoding="utf-8")
    assert main(["simulate", "--trace", str(trace)]) == 2
    assert "at most 100,000 h are allowed: cut it with --hours" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "hours", "said"),
    [
        ("2021-12-11, 11:00:00, 0\n2021-12-11, 12:00:00, 0\n", [], "no machine is ever there; give another trace\n"),
        ("2021-12-11, 11:00:00, 0\n2021-12-11, 12:00:00, 9\n", [], "no machine is ever there; give another trace\n"),
        (
            "2021-12-11, 11:00:00, 0\n2021-12-11, 12:00:00, 9\n2021-12-11, 13:00:00, 9\n",
            ["--hours", "1"],
            "no machine is ever there in these hours; give another trace, or more --hours",
        ),
    ],
)
def test_a_trace_without_machines_is_refused(
    text: str, hours: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(text, encoding="utf-8")
    assert main(["simulate", "--trace", str(trace), *hours]) == 2
    assert said in capsys.readouterr().err


def test_a_network_that_no_round_gets_through_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_SMALL, "--latency-s", "1e308"]) == 0
    assert "no round" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "x.json"
    target.write_text("before", encoding="utf-8")

    def half(path: Path, text: str, **_: object) -> None:
        path.write_bytes(text[:7].encode())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    assert main([*_SMALL, "--models", "--json", str(target)]) == 130
    assert [(x.name, x.read_bytes()) for x in tmp_path.iterdir()] == [("x.json", b"before")]
    assert "ftopt: interrupted" in capsys.readouterr().err
