"""`ftopt.Wandb` with the real library, offline: its files are read back."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import ftopt
from ftopt.errors import UserError
from ftopt.events import Event
from ftopt.watch.trackers.wandb import of_recipe, resolve, run_id
from tests.watch.offline import Offline, runs

WAIT_S = 200.0
pytestmark = pytest.mark.timeout(600)  # wandb takes seconds to start, and a minute on a very busy machine
TRAINER = Path(__file__).parent / "train_with_wandb.py"


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_auto_is_offline_without_a_key_and_online_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert resolve("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert resolve("auto") == "off"
    assert resolve("offline") == "offline"


def test_auto_in_a_recipe_is_off_without_a_key_and_says_how_to_turn_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_recipe("auto") == ("off", "wandb is off, since this machine has no key; to turn it on: wandb login")
    assert of_recipe("offline") == ("offline", "")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert of_recipe("auto") == ("offline", "")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert of_recipe("auto") == ("off", "")
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert of_recipe("auto") == ("online", "")
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert of_recipe("auto") == ("off", "wandb is off, since it is not installed: pip install 'ftopt[wandb]'")


def test_a_run_has_the_same_id_in_each_life_of_its_replica() -> None:
    assert run_id("job", "r0") == "job-r0"
    assert run_id("my job", "r0") == run_id("my job", "r0") != run_id("my/job", "r0")
    assert len(run_id("x" * 200, "r0")) <= 128 and run_id("x" * 200, "r0") != run_id("x" * 200, "r1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "on"}, "allowed: auto, online, offline"),
        ({"project": 3}, "project=3; must be a string"),
        ({"config": [1]}, "must be a mapping"),
        ({"id": "a/b"}, "none of them"),
        ({"every": 0}, "at least 1"),
        ({"job": "x"}, "ftopt.Wandb"),
        ({"run": "my run"}, "must be what wandb.init"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ftopt.Wandb(**arguments)  # type: ignore[arg-type]


def test_disabled_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    made = ftopt.Wandb()
    made.attend("job", "r0")
    assert not made._runs
    made(Event("stepped", "r0", 1, inner_step=1))
    made.close()


def test_points_go_into_a_run_of_ones_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wandb = pytest.importorskip("wandb")
    run = wandb.init(project="mine", mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True, console="off"))
    with pytest.raises(UserError, match="leave project= out"):
        ftopt.Wandb(run=run, project="other")
    made = ftopt.Wandb(run=run, every=1)
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    group = ftopt.solo(on_event=made)
    with ftopt.wrap(inner, model, ftopt.LocalSGD(sync_every=2), group=group) as optimizer:
        while optimizer.inner_step < 6:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            time.sleep(0.2)  # for the thread that copies
            run.log({"loss": 1.0}, step=10 * optimizer.inner_step)
    with pytest.raises(UserError, match="a run of your own is one replica's"):
        made.attend("solo", "r1")
    made.close()
    run.finish()
    wandb.teardown()  # its service has written everything then
    (found,) = runs(tmp_path)
    later = [
        item for each in found.records if each.WhichOneof("record_type") == "config" for item in each.config.update
    ]
    assert {item.key: item.value_json for item in later}["ftopt_replica"] == '"r0"'
    assert found.curve("loss") == [1.0] * 6
    assert [point["_step"] for point in found.points if "loss" in point] == [10, 20, 30, 40, 50, 60]
    assert found.curve("inner/step")[-1] == 6
    assert len(found.curve("outer/version")) >= 2
    assert "failed" not in caplog.text


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, "it has not come"
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """The processes below ``pid``."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = entry.read_text()
        except OSError:
            continue
        parents.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(entry.parent.name))
    found, left = list[int](), [pid]
    while left:
        left += (below := parents.get(left.pop(), []))
        found += below
    return found


def start(folder: Path, steps: int) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(TRAINER), str(folder), str(steps)]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with start(tmp_path, 1_000_000) as process:
        try:
            yield process
        finally:
            for pid in [*descendants(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def losses(folder: Path) -> list[float]:
    """The curve in the newest run's file as it is now."""
    try:
        return runs(folder)[-1].curve("inner/loss")
    except (IndexError, StopIteration, AssertionError):  # not there, or still empty
        return []


def ended(folder: Path) -> list[Offline]:
    """All runs, once the newest one's file has its end: wandb's service writes on when our process has ended."""

    def has_its_end() -> bool:
        try:
            return bool(runs(folder)[-1].exit_codes)
        except (IndexError, StopIteration, AssertionError):
            return False

    wait_for(has_its_end)
    return runs(folder)


@pytest.mark.long
def test_a_killed_lifes_curve_survives_and_the_next_life_continues_its_run(
    trainer: subprocess.Popen[str], tmp_path: Path
) -> None:
    """With the trainer its other process and wandb's service are killed, as with a node or a container."""
    wait_for(lambda: len(losses(tmp_path)) > 5)
    killed = descendants(trainer.pid)
    assert len(killed) >= 2
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: none of them sees that another one is gone
        for pid in [trainer.pid, *killed]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    trainer.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in killed))
    dead = runs(tmp_path)[-1]
    assert len(dead.curve("inner/loss")) > 5 and not dead.exit_codes

    with start(tmp_path, 60) as second:
        out, _ = second.communicate(timeout=WAIT_S)
    assert second.returncode == 0, out
    assert "there was a run local-r0 already" in out, "a first life of a job that has this run: said, not silent"
    first, run = ended(tmp_path)
    assert first.run.run_id == run.run.run_id == "local-r0"
    assert (run.run.run_group, run.run.project, run.run.display_name) == ("local", "tried", "r0")
    assert list(run.run.tags) == ["a", "b"] and run.config["lr"] == 0.1 and run.config["path"] == "/x"
    assert run.exit_codes == [0]
    _check_curves(run)


@pytest.mark.long
def test_the_pages_script_runs(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "watching.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert block.endswith("wandb.close()\n")
    block = block.replace("wandb.close()", f"wandb.close(timeout_s={WAIT_S})")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "WANDB_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", block], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0 and done.stderr.count("\n") == 1 and "trains alone" in done.stderr
    (run,) = ended(tmp_path)
    assert len(run.curve("inner/loss")) == 10 and len(run.curve("weight")) == 2 and len(run.curve("outer/steps")) == 5
    assert (run.run.project, run.config["lr"]) == ("my-project", 1e-3)


def _check_curves(run: Offline) -> None:
    inner = [point for point in run.points if "inner/loss" in point]
    assert [point["inner/step"] for point in inner] == [10, 20, 30, 40, 50, 60]
    assert inner[0]["inner/loss"] == pytest.approx(sum(range(1, 11)) / 10), "the mean over its steps"
    assert inner[-1]["inner/tokens_per_s"] == pytest.approx(7 * inner[-1]["inner/steps_per_s"])
    assert run.curve("outer/version") == list(range(1, 13))
    assert run.curve("outer/steps") == [5] * 12 and run.curve("outer/steps_kept") == list(range(5, 65, 5))
    assert len(run.curve("outer/gradient_norm")) == 12 and len(run.curve("outer/cosine")) == 11
    assert run.curve("mine") == [42]
    axes = run.axes
    assert (axes["inner/loss"], axes["outer/members"], axes["mine"]) == ("inner/step", "outer/version", "inner/step")


def test_a_later_life_says_nothing_of_the_run_that_it_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "wandb" / "offline-run-20260101_000000-job-r0").mkdir(parents=True)
    made = ftopt.Wandb(mode="offline", dir=tmp_path)
    made.attend("job", "r0")
    made(Event("stepped", "r0", 2, inner_step=7, data={"lr": 0.1}))
    made(Event("discarded", "r0", 2, inner_step=7, data={"steps": 3, "reason": "nonfinite"}))
    made.close(timeout_s=WAIT_S)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []
    (run,) = ended(tmp_path)
    (alert,) = run.alerts
    text = "r0 (incarnation 2): 3 inner steps dropped (the contribution was not finite)"
    assert (alert.title, alert.text, alert.level) == ("r0: discarded", text, "WARN")
    ((_, *row),) = run.table
    assert row == [7, 2, "discarded", text]


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    made = ftopt.Wandb(mode="offline", dir=tmp_path / "file" / "below")
    made.attend("job", "r0")
    made(Event("stepped", "r0", 1, inner_step=1, data={"lr": 0.1}))
    made.close(timeout_s=WAIT_S)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "NotADirectoryError" in record.getMessage() and "training goes on" in record.getMessage()


@pytest.mark.slow
def test_wandbs_service_is_killed_and_training_goes_on(trainer: subprocess.Popen[str], tmp_path: Path) -> None:
    wait_for(lambda: losses(tmp_path))
    services = [pid for pid in descendants(trainer.pid) if "wandb-core" in Path(f"/proc/{pid}/cmdline").read_text()]
    for pid in services:
        os.kill(pid, signal.SIGKILL)
    assert trainer.stdout is not None
    line = next(line for line in trainer.stdout if "WARNING" in line)
    assert "replica r0: wandb: Connection" in line and "nothing is copied" in line
    assert "step" in trainer.stdout.readline(), "it trains on"


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_training_goes_on(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    process = start(tmp_path, 1500)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (40_000, hard))
    with process:
        out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, out
    (line,) = [line for line in out.splitlines() if "WARNING" in line]
    assert "does not grow any more" in line
    (run,) = runs(tmp_path)
    assert run.file.stat().st_size == 40_000 and len(run.curve("inner/loss")) > 5


@pytest.mark.slow
def test_without_its_server_an_online_run_is_kept_offline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    made = ftopt.Wandb(dir=tmp_path, settings={"init_timeout": 3.0, "login_timeout": 3.0})
    made.attend("job", "r0")
    made(Event("stepped", "r0", 1, inner_step=1, data={"lr": 0.1}))
    made.close(timeout_s=60.0)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "it is kept offline: later, wandb sync" in record.getMessage()
    assert ended(tmp_path)[-1].curve("inner/lr") == [0.1]
