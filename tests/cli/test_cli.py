"""The command line: results, messages and exit status of each verb."""

from __future__ import annotations

import argparse
import json
import logging
import re
import socket
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import ftopt
from ftopt.checkpoint.reader import whole
from ftopt.cli import coordinator
from ftopt.cli.main import GROUPS, VERBS, main
from ftopt.cli.shared import output
from ftopt.errors import FtoptError
from ftopt.events import Event
from ftopt.watch.folder import RunFolder
from ftopt.watch.jsonl import read_lines
from tests.checkpoint.parts import part, writer


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in (
        "FTOPT_COORDINATOR",
        "FTOPT_REPLICA",
        "FTOPT_JOB",
        "FTOPT_TOKEN",
        "FTOPT_CA",
        "FTOPT_CERT",
        "FTOPT_KEY",
    ):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_ls_tells_each_recipe_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"diloco_bytes", "localsgd_bytes"} <= set(names)


def test_cp_copies_once_and_the_copy_is_valid(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cp", "diloco_bytes"]) == 0
    assert main(["validate", "diloco_bytes.yaml"]) == 0
    assert main(["cp", "diloco_bytes"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["cp", "diloco_bytes", "no/such/folder.yaml"]) == 2


def test_validate_tells_everything_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "diloco_bytes", "train.inner_step=3", "replica=4"]) == 2
    error = capsys.readouterr().err
    assert "2 errors" in error
    assert "train.inner_steps" in error
    assert "replicas?" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "diloco_bites"],
        ["run", "diloco_bytes", "checkpoint.resume=x"],
        ["replica", "diloco_bytes"],
        ["replica", "diloco_bytes", "--coordinator", "nonsense"],
        ["replica", "diloco_bytes", "--coordinator", "http://127.0.0.1:1", "--id", "../x"],
        ["coordinator", "--bind", "127.0.0.1:0", "--folder", "/dev/null/x"],
        ["status", "localhost:29410"],
        ["cp", "nothing"],
    ],
)
def test_wrong_input_ends_in_one_message_and_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err.removeprefix("loading PyTorch ...\n")  # on a busy machine
    assert error.startswith("ftopt: ")
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--coordinator", "127.0.0.1:29410"], "--coordinator '127.0.0.1:29410' is not an address; write http://HOST:"),
        (["--coordinator", "http://127.0.0.1:1", "--token-file", "none"], "token file none: "),
        (["--coordinator", "http://127.0.0.1:1", "--host", "a", "--interface", "b"], "--host a and --interface b; "),
    ],
)
def test_wrong_options_of_a_replica_are_told_before_anything_is_loaded(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftopt.cli.replica.loading", lambda: pytest.fail("it is loading"))
    assert main(["replica", "diloco_bytes", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_run_of_digits_without_scikit_learn_leaves_no_folder(
    elsewhere: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert main(["run", "digits"]) == 2
    assert "data.name=digits needs scikit-learn" in capsys.readouterr().err
    assert not (elsewhere / "runs").exists()


def test_a_run_that_is_refused_leaves_no_folder(elsewhere: Path) -> None:
    assert main(["run", "diloco_bytes", "policy.min_replicas=9"]) == 2
    assert not (elsewhere / "runs").exists()


def test_a_run_that_resumes_at_its_end_starts_nothing(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, _ = writer(elsewhere / "kept")
    model = ftopt.recipe("diloco_bytes").build_model()
    one.write(part(version=5, shapes={name: p.shape for name, p in model.named_parameters()}))
    (there,) = (path.relative_to(elsewhere) for path in whole(elsewhere / "kept"))
    words = ["run", "diloco_bytes", "train.inner_steps=50", "checkpoint.resume=kept"]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"resuming from {there}: version 5, inner step 50; train.inner_steps=50 is reached, and nothing is trained: "
        "give more to go on",
        f"to get the model from it: ftopt export {there} model.safetensors",
    ]
    assert main([*words, "model.width=128"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "it is of another model: embed.weight is (256, 64) there, (256, 128) here; " in captured.err
    assert not (elsewhere / "runs").exists()


def test_overrides_may_stand_anywhere_behind_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--coordinator", "http://127.0.0.1:1", "none.b=2", "--id", "r0", "none.c=3"]
    assert main(["replica", "diloco_bytes", "none.a=1", *options]) == 2
    assert "none: unknown key" in capsys.readouterr().err
    for wrong in (["--idd", "r0"], ["--id", "r0", "train.seed=1", "--quick"]):
        with pytest.raises(SystemExit) as caught:
            main(["replica", "diloco_bytes", *wrong])
        assert caught.value.code == 2
        assert "unrecognized arguments: --" in capsys.readouterr().err


def test_a_coordinator_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        assert main(["status", url]) == 2
    assert url in capsys.readouterr().err


def test_a_port_in_use_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["coordinator", "--bind", f"127.0.0.1:{port}"]) == 2
    assert str(port) in capsys.readouterr().err


@pytest.mark.parametrize("supervised", [False, True])
def test_warnings_of_a_coordinator_have_the_time_like_its_other_lines(
    supervised: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runner reads those of a supervised one."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr("ftopt.cli.coordinator.run", lambda _: logging.getLogger("ftopt.sync").warning("look") or 0)
    assert main(["coordinator", *(["--supervised"] if supervised else [])]) == 0
    when = "" if supervised else r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  "
    assert re.fullmatch(f"{when}ftopt: look\n", capsys.readouterr().err)


def test_the_folder_of_a_coordinator_that_comes_back_has_one_clock(tmp_path: Path) -> None:
    words = argparse.Namespace(folder=tmp_path, started=None, faults="[]", life=1)
    coordinator._subscribers(words)[0](Event("start", "coordinator"))
    files = RunFolder(tmp_path)
    about = json.loads(files.about.read_text()) | {"began": "2026-01-02T03:04:05Z"}
    files.about.write_text(json.dumps(about))
    coordinator._subscribers(words)[0](Event("recover", "coordinator"))
    first, second = (line["t_s"] for line in read_lines(files.events))
    assert 0 <= first < 100 < second


def test_every_verb_has_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        with pytest.raises(SystemExit) as exit_:
            main([verb, "--help"])
        assert exit_.value.code == 0
    assert "key=value" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("dance", "'dance' is not a command; `ftopt --help` lists the commands"),
        ("rnu diloco_bytes", "'rnu' is not a command; did you mean `run`? `ftopt --help` lists the commands"),
        ("run", "the following arguments are required: RECIPE; `ftopt run --help` shows its arguments"),
        ("run diloco_bytes --quite", "unrecognized arguments: --quite; did you mean `--quiet`?"),
        (
            "run diloco_bytes --replicas 3",
            "unrecognized arguments: --replicas; a setting of the recipe is written replicas=VALUE",
        ),
        ("replica diloco_bytes --idd=r0", "unrecognized arguments: --idd=r0; did you mean `--id`?"),
        ("run diloco_bytes --train.seed=1", "settings have no dashes: write train.seed=1"),
        ("run diloco_bytes --lr=1", "settings have no dashes: write lr=1"),
    ],
)
def test_a_mistyped_command_line_gets_one_line_with_what_was_meant(
    given: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(given.split())
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("ftopt: ") and error.count("\n") == 1
    assert told in error


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for words in (["--help"], ["run", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        told.append(capsys.readouterr().out)
    assert all(verb in told[0] for verb in VERBS) and "key=value" in told[1]
    assert told[2] == f"ftopt {ftopt.__version__}\n"
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert all(f"{group}:\n" in told[0] for group in GROUPS)
    assert "start and stop a job:" in capsys.readouterr().err


def test_ctrl_c_while_a_command_is_imported_is_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for where in ("ftopt.cli.main.parse", "importlib.import_module"):  # both import
        with monkeypatch.context() as patched:
            patched.setattr(where, interrupted)
            assert main(["ls"]) == 130
            assert capsys.readouterr().err == "ftopt: interrupted\n"


@pytest.mark.parametrize(("verb", "goes_on"), [("run", True), ("coordinator", True), ("ls", False)])
def test_only_a_command_that_trains_outlives_its_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str, goes_on: bool
) -> None:
    output.begin(verb)
    with pytest.MonkeyPatch.context() as patched, Path("/dev/full").open("w") as full:
        patched.setattr("sys.stdout", full)
        with nullcontext() if goes_on else pytest.raises(FtoptError, match="standard output: No space left on device"):
            output.say("a result")
        output.say("nobody reads this")
    error = capsys.readouterr().err
    assert error.count("No space left on device; what follows is not shown there, and the work goes on") == goes_on
