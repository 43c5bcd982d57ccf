"""``ftopt launch``: one's own script as the replicas of a job, with real processes."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ftopt.cli.stop import chosen
from ftopt.errors import Unreachable, UserError
from ftopt.events import Event
from ftopt.run.interruption import Interrupts
from ftopt.run.local_jobs import local_jobs
from ftopt.run.processes import Child
from ftopt.run.scripts.ends import Ends
from ftopt.run.scripts.launch import Launch
from ftopt.run.scripts.plan import Plan, devices_of
from ftopt.run.scripts.screen import Screen
from ftopt.run.scripts.words import interrupted, leaving
from ftopt.run.status_of import serving, status_of
from ftopt.watch.folder import RunFolder
from ftopt.watch.jsonl import EventLog, JsonLines, read_lines
from ftopt.watch.status import Job
from ftopt.watch.story import Story
from tests.run.running import alive, until

Launched = subprocess.Popen[str]
Start = Callable[..., Launched]
LIMIT_S = 120.0
TRAINS = """
    import pathlib, sys, time, torch, ftopt
    model = torch.nn.Linear(2, 1)
    optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, ftopt.DiLoCo(sync_every=10),
                           group=ftopt.connect())
    with optimizer:
        print("joined", flush=True)
        while optimizer.inner_step < int(sys.argv[1]) and not pathlib.Path("enough").exists():
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)
    print("pending", optimizer.pending_steps, flush=True)
"""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Start]:
    """Starts ``ftopt launch`` with a script in a folder of its own; what is left at the end is killed."""
    begun: list[Launched] = []

    def start(source: str, *options: str, words: tuple[str, ...] = (), **environment: str) -> Launched:
        (tmp_path / "script.py").write_text(textwrap.dedent(source))
        command = [sys.executable, "-m", "ftopt", "launch", *options, "script.py", *words]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FTOPT_")}
        begun.append(
            subprocess.Popen(
                command,
                cwd=tmp_path,
                env=kept | environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate()
    for pid in spawned([event for launched in records(tmp_path) for event in launched]):
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def records(folder: Path) -> list[list[dict[str, object]]]:
    """The events of each launch; those with the coordinator first."""
    found = [read_lines(path) for path in sorted(folder.glob("runs/*/events.jsonl"))]
    return sorted(found, key=lambda lines: not spawned(lines, "coordinator"))


def events(folder: Path) -> list[dict[str, object]]:
    """The events of the launch with the coordinator."""
    return next(iter(records(folder)), [])


def spawned(events: list[dict[str, object]], who: str = "") -> list[int]:
    lines = [e for e in events if e["event"] == "spawn" and who in ("", e["replica"])]
    return [int(e["data"]["pid"]) for e in lines]  # type: ignore[index]


def pids(folder: Path, who: str = "") -> list[int]:
    return spawned(events(folder), who)


def joined(folder: Path) -> list[str]:
    return [str(e["replica"]) for e in events(folder) if e["event"] == "join"]


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def ended(process: Launched) -> tuple[int, str]:
    output, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, output


def test_each_replica_has_its_id_its_device_and_the_job_and_its_output_is_shown(launch: Start, tmp_path: Path) -> None:
    source = """
        import os, sys
        print(*sys.argv[1:], *(os.environ[f"FTOPT_{x}"] for x in ("REPLICA", "JOB", "LEAVE_ON_SIGNALS")))
        print(os.environ["CUDA_VISIBLE_DEVICES"], os.environ["OMP_NUM_THREADS"], len(os.environ["FTOPT_TOKEN"]))
        print(os.environ["FTOPT_COORDINATOR"], end="")
    """
    status, said = ended(
        launch(source, "-n", "2", "--job", "j", words=("--lr", "3"), CUDA_VISIBLE_DEVICES="4,7", OMP_NUM_THREADS="5")
    )
    assert status == 0, said
    for number, device in ((0, 4), (1, 7)):
        assert f"r{number} | --lr 3 r{number} j 1\n" in said
        assert f"r{number} | {device} 5 64\n" in said
        assert re.search(rf"r{number} \| http://127.0.0.1:\d+\n", said)
    assert not any(map(alive, pids(tmp_path)))


def test_a_script_that_fails_before_it_has_joined_is_not_started_again(launch: Start, tmp_path: Path) -> None:
    status, said = ended(launch("raise SystemExit('no data')", "-n", "2", "--restarts", "9"))
    assert status == 1
    assert said.count("| no data") == 2
    assert said.count("has failed (exit status 1), and is not started again: it had not joined the job") == 2
    assert said.index("r0 died (exit status 1: no data)") < said.index("r0 has failed")
    assert "ftopt: no replica came to the end of script.py" in said
    assert "report:" not in said
    assert len(pids(tmp_path)) == 3
    assert not any(map(alive, pids(tmp_path)))


@pytest.mark.long
def test_a_replica_that_a_signal_kills_before_it_has_joined_is_started_again(launch: Start, tmp_path: Path) -> None:
    source = f"""
    import os, pathlib, signal
    if os.environ["FTOPT_REPLICA"] == "r1" and not pathlib.Path("killed").exists():
        pathlib.Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
{TRAINS}"""
    status, said = ended(launch(source, "-n", "2", words=("40",)))
    assert status == 0, said
    assert sorted(joined(tmp_path)) == ["r0", "r1"] and len(pids(tmp_path, "r1")) == 2
    log = next(tmp_path.glob("runs/*/logs/r1.log")).read_text()
    assert re.match(r"\n--- process 2 of r1 begins, [-\d]+ [:\d]+ ---\n", log)
    assert "process 2 of r1 begins" not in said
    (tmp_path / "killed").unlink()
    status, said = ended(launch(source, "-n", "2", "--restarts", "0", "--folder", "two", words=("40",)))
    assert status == 0, said
    assert "r1 has failed (SIGKILL), and is not started again: --restarts is 0" in said
    begun = [e for e in read_lines(tmp_path / "two" / "events.jsonl") if e["event"] in ("join", "start")]
    assert begun[1]["t_s"] - begun[0]["t_s"] < 30.0, "nobody waited start_s (60 s) for r1"


@pytest.mark.long
def test_a_job_does_not_wait_for_a_replica_that_fails_before_it_has_joined(launch: Start, tmp_path: Path) -> None:
    source = f"""
    import os
    if os.environ["FTOPT_REPLICA"] == "r1":
        raise SystemExit("no data")
{TRAINS.replace("ftopt.connect()", "ftopt.connect(policy=ftopt.FaultPolicy(start_s=1e6))")}"""
    status, said = ended(launch(source, "-n", "2", words=("40",)))
    assert status == 0, said
    assert "r1 has failed (exit status 1), and is not started again: it had not joined the job" in said
    assert joined(tmp_path) == ["r0"]


def test_a_replica_that_gets_sigterm_before_it_has_joined_was_asked_to_leave(launch: Start, tmp_path: Path) -> None:
    process = launch("import time; print('begun', flush=True); time.sleep(600)")
    until(lambda: "begun" in "".join(path.read_text() for path in tmp_path.glob("runs/*/logs/r0.log")))
    os.kill(pids(tmp_path, "r0")[0], signal.SIGTERM)
    status, said = ended(process)
    assert (status, len(pids(tmp_path, "r0"))) == (1, 1)
    assert "r0 was asked to leave, and is not started again" in said and "died" not in said


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("nothing_of_the_kind", "NameError: name 'nothing_of_the_kind' is not defined"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
    ],
)
def test_the_last_lines_have_the_exception_that_ended_the_script(launch: Start, source: str, why: str) -> None:
    status, said = ended(launch(source, "-n", "2", "--restarts", "0"))
    assert status == 1
    assert said.splitlines()[-1] == f"r0 and r1 failed: {why}"


def test_torchrun_s_own_traceback_is_not_the_reason(tmp_path: Path) -> None:
    said = """
        KeyError: 'handled'
        [rank1]: Traceback (most recent call last):
        [rank1]: mine.Broken.NoDataError: no data
        Traceback (most recent call last):
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
          exitcode  : -9 (pid: 41)
    """
    folder = RunFolder(tmp_path)
    folder.create()
    command = [sys.executable, "-c", f"import textwrap; print(textwrap.dedent({said!r})); raise SystemExit(1)"]
    child = Child("r0", command, log=folder.log("r0"), life=1, env={})
    child.process.wait()
    ends = Ends(folder, ranks=2)
    ends.take(child)
    child.end(0.0)
    assert ends.why_failed("x.py", tmp_path).splitlines()[-1] == "r0 failed: mine.Broken.NoDataError: no data"
    assert ends.was_killed(child)


@pytest.mark.long
def test_a_finished_job_that_is_launched_again_has_nothing_left_to_do(launch: Start) -> None:
    source = """
    import torch, ftopt
    model = torch.nn.Linear(2, 1)
    optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, ftopt.DiLoCo(sync_every=10))
    checkpoints = ftopt.Checkpoints("kept", optimizer)
    checkpoints.resume()
    with optimizer:
        for _ in optimizer.steps(20):
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.step()
        checkpoints.close()
    """
    assert ended(launch(source, "--folder", "one"))[0] == 0
    status, said = ended(launch(source, "--folder", "two"))
    assert status == 0, said
    assert "nothing was left to do: the job is at version 2, inner step 20, and script.py takes no more steps" in said
    assert "no replica has joined" not in said


@pytest.mark.long
def test_a_terminal_shows_how_far_the_job_is_and_no_table_after_the_end(launch: Start, tmp_path: Path) -> None:
    steps = TRAINS.replace("while", "for _ in optimizer.steps(int(sys.argv[1])):  #").replace("0.02", "0.05")
    (tmp_path / "script.py").write_text(textwrap.dedent(steps))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ftopt", "launch", "script.py", "200"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"}
    )
    os.close(theirs)
    said = b""
    with suppress(OSError):  # EIO: the other end is closed
        while more := os.read(ours, 1 << 16):
            said += more
    os.close(ours)
    assert process.wait(LIMIT_S) == 0
    shown = said.decode()
    assert re.search(r"inner step \d+/200 \(\d+%\), version \d+, .*0:\d\d left\r\njob default: running", shown), shown
    after_table = shown[shown.rindex("job default: ") :]
    assert "\x1b[2K" in after_table[: after_table.index("The job ran for")]


def test_a_launch_that_has_joined_and_is_stopped_says_that_nothing_failed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.create()
    child = Child("b0", [sys.executable, "-c", "import time; time.sleep(600)"], log=folder.log("b0"), life=1, env={})
    child.terminate()
    child.process.wait()
    ends = Ends(folder)
    ends.take(child)
    child.end(0.0)
    told = ends.account("x.py", ["b0"], {})
    assert told.startswith(
        "b0 left before the end of x.py.\n1 replica of this launch took 0 inner steps. No replica was"
    )
    plan = Plan("x.py", join="http://127.0.0.1:1")
    signals = Interrupts(Story(0), ["b0"])
    signals.come(signal.SIGTERM)
    said = f"{leaving(plan, signals[0], [{'checkpoints': 'kept'}]).text} {interrupted(plan, signals, Story(0))}"
    assert "ftopt.Checkpoints" not in said, "the job's other replicas have the model"
    assert "asked to end by SIGTERM" in said and "Ctrl-C" not in said and "interrupted" not in said


def test_one_replica_that_fails_is_named_and_the_job_is_done(launch: Start) -> None:
    source = """
        import os, time
        if os.environ["FTOPT_REPLICA"] == "r1":
            time.sleep(1.0)
            raise SystemExit(1)
    """
    status, said = ended(launch(source, "-n", "3"))
    assert status == 0
    assert re.search(r"r1 has failed \(exit status 1\), and is not started again: (others have|it had not)", said)


def test_output_of_any_kind_is_shown_and_a_dash_is_an_argument(launch: Start) -> None:
    source = r"""
        import os, sys, time
        print(sys.argv[1:])
        for part in (b"a\r\n", b"10%\r20%\n", b"\xc3", b"\xa9 \xff\n"):
            os.write(1, part)
            time.sleep(0.3)
    """
    status, said = ended(launch(source, words=("a", "--", "b"), PYTHONIOENCODING="ascii"))
    assert status == 0, said
    for text in ("['a', '--', 'b']", "a", "20%", r"\xe9 \ufffd"):
        assert f"r0 | {text}\n" in said


def test_of_a_coordinator_with_several_jobs_only_the_launch_s_own_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    folder = RunFolder(tmp_path / "launch")
    launch = Launch(Plan("script.py", n=2, job="mine"), folder, "a token", said.append)
    log = EventLog(JsonLines(folder.events, time.time()))
    for job, replica in (("other", "x0"), ("mine", "r0")):
        log(Event("join", replica, 2, inner_step=5, job=job))
    launch._follow()
    assert launch._joined == {"r0": 2}
    assert "r0 (incarnation 2) is back; the job is at inner step 5" in "".join(said) and "x0" not in "".join(said)


def test_a_launch_remembers_the_policy_that_a_new_coordinator_does_not_know_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Launch(Plan("script.py"), RunFolder(tmp_path / "launch"), "a token", lambda line: None)
    launch.url = "http://127.0.0.1:1"
    jobs = [[], [{"job": "default", "evict_after_s": 20.0}], [{"job": "default"}], []]
    monkeypatch.setattr("ftopt.run.scripts.launch.ask", lambda *_, **__: jobs.pop(0))
    assert [launch._evict_after_s() for _ in range(4)] == [600.0, 20.0, 20.0, 20.0]


@pytest.mark.parametrize("joined", [True, False])
def test_without_a_coordinator_a_launch_that_has_joined_says_of_when_its_last_figures_are(joined: bool) -> None:
    """Its replicas' own lines may name newer versions. The launch that has started the coordinator knows more by the
    events, and starts it again."""
    at = {"version": 34, "inner_step": 340}
    row = {"replica": "b0", "state": "training", "inner_step": 345, "incarnation": 1, "loss": 2.5, "step_s": 0.1}
    answers: list[list[Job]] = [[{"phase": "running", "fragments": [at], "replicas": [row]}]]

    def look() -> list[Job]:
        if not answers:
            raise Unreachable("no coordinator answers")
        return answers.pop()

    said: list[str] = []
    screen, story = Screen(said.append, look, quiet=False, dated=joined), Story(0)
    for now_s in (1.0, 101.0):
        story.now_s = now_s
        screen._plain._last, screen._plain._looked = now_s - 1000.0, -1000.0  # it is time for a line
        screen.refresh(story)
    fresh, last = (text.partition("  ")[2] for text in said[:1] + said[-1:])
    assert "inner step 345, version 34, loss 2.500, 10.0 steps/s, 1 training" in fresh
    told = r"no coordinator answers; last known, at \d\d:\d\d:\d\d: inner step 345, version 34"
    assert bool(re.fullmatch(told, last)) is joined


@pytest.mark.parametrize(
    ("end", "deaths"),
    [
        (
            {"early": True, "pending": 7, "mistake": "the job has ended at version 3"},
            ["it came when the job had ended"],
        ),
        ({"early": True, "pending": 0, "steps": 40}, []),
    ],
)
def test_after_a_signal_a_replica_that_has_not_left_its_job_counts_as_dead(
    tmp_path: Path, end: dict[str, object], deaths: list[str]
) -> None:
    """As one that was stopped until the others had come to the end: its pending steps are in no version."""
    folder = RunFolder(tmp_path / "launch")
    launch = Launch(Plan("script.py"), folder, "a token", lambda line: None)
    EventLog(JsonLines(folder.events, time.time()))(Event("join", "r0", 1, job="default"))
    launch._follow()
    launch._ends.begin("r0").write_text(json.dumps(end))
    command = [sys.executable, "-c", f"raise SystemExit({2 if 'mistake' in end else 0})"]
    launch._children["r0"] = child = Child("r0", command, log=folder.log("r0"), life=1, env={})
    child.process.wait()
    launch._interrupts.append(signal.SIGINT)
    launch._look_at_processes()
    found = [e["data"]["status"] for e in read_lines(folder.events) if e["event"] == "death"]
    assert found == deaths


def test_the_folder_of_an_earlier_launch_is_refused(launch: Start, tmp_path: Path) -> None:
    assert ended(launch("pass", "--folder", "again"))[0] == 0
    status, said = ended(launch("pass", "--folder", "again"))
    assert (status, "(--folder) holds another launch; give a new folder" in said) == (2, True), said
    folder = RunFolder(tmp_path / "at once")
    assert folder.claim() and not folder.claim()
    (tmp_path / "file").touch()
    status, said = ended(launch("pass", "--folder", "file/x"))
    assert (status, "Traceback" in said) == (2, False), said


def test_a_refused_launch_leaves_the_terminal_as_it_was(launch: Start, tmp_path: Path) -> None:
    assert ended(launch("pass", "--folder", "again"))[0] == 0
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ftopt", "launch", "--folder", "again", "script.py"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"}
    )
    os.close(theirs)
    assert process.wait(LIMIT_S) == 2
    said = os.read(ours, 1 << 16)
    os.close(ours)
    assert b"holds another launch" in said
    assert b"\x1b[?25l" not in said, "the cursor is hidden"


def command_of(pid: int) -> bytes:
    """A process' command line; empty: it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_ctrl_c_ends_a_launch_whose_coordinator_does_not_start(launch: Start, tmp_path: Path) -> None:
    process = launch("pass", "--bind", "127.0.0.1:0")
    until(lambda: any(b"coordinator" in command_of(child) for child in children(process.pid)))  # not before its exec
    (coordinator,) = children(process.pid)
    os.kill(coordinator, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 130
    assert not alive(coordinator)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "ftopt: the following arguments are required: SCRIPT; `ftopt launch --help` shows"),
        (["nosuch.py"], "ftopt: 'nosuch.py': no such file; give the script that each replica runs, or -m MODULE"),
        (["--ids", "\U0001f600" * 70, "-m", "x"], "must be a short name without /"),
        (["--bind", "127.0.0.1:1x", "-m", "x"], "ftopt: "),
        (["-n", "0", "x.py"], "'0'; must be a whole number of at least 1"),
        (["--join", "head", "-m", "x"], "ftopt: --join 'head'; must be http://HOST:PORT"),
        (["--ids", "a/b", "-m", "x"], "ftopt: --ids 'a/b"),
        (["--bind", "nowhere", "-m", "x"], "ftopt: "),
    ],
)
def test_bad_input_is_one_message(words: list[str], message: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ftopt", "launch", *words]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert found.returncode == 2, found.stderr
    assert message in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_asks_the_replicas_to_leave_and_a_second_one_ends_them(
    launch: Start, tmp_path: Path, number: int, status: int
) -> None:
    source = """
        import signal, time
        signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
        print("begun", flush=True)
        while True:
            time.sleep(0.1)
    """
    process = launch(source, "-n", "2")
    logs = lambda: "".join(path.read_text() for path in tmp_path.glob("runs/*/logs/r*.log"))  # noqa: E731
    until(lambda: logs().count("begun") == 2)
    process.send_signal(number)
    until(lambda: logs().count("asked") == 2)
    process.send_signal(number)
    assert ended(process)[0] == status
    assert not any(map(alive, pids(tmp_path)))


def test_nothing_is_left_of_a_launch_that_is_killed(launch: Start, tmp_path: Path) -> None:
    process = launch("import time; time.sleep(600)", "-n", "2")
    until(lambda: len(pids(tmp_path)) == 3)
    process.kill()
    until(lambda: not any(map(alive, pids(tmp_path))))


def test_gpus_are_found_and_shared(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert devices_of({}, tmp_path) == ["0", "1", "2"]
    assert devices_of({"CUDA_VISIBLE_DEVICES": "1, 3"}, tmp_path) == ["1", "3"]
    assert devices_of({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
    assert devices_of({"CUDA_VISIBLE_DEVICES": "2,-1,0"}, tmp_path) == ["2"]
    assert devices_of({"CUDA_VISIBLE_DEVICES": "GPU-ab12"}, tmp_path) == ["GPU-ab12"]
    plan = Plan("x", n=2, ranks=2)
    assert plan.own(1, "u", "", ["0", "1", "2", "3"])["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert plan.own(1, "u", "", ["0"])["CUDA_VISIBLE_DEVICES"] == "0"
    assert "CUDA_VISIBLE_DEVICES" not in plan.own(0, "u", "", [])
    with pytest.raises(UserError, match=r"--job 'a\\nb'"):
        Plan("x", module=True, job="a\nb").check()


@pytest.mark.long
def test_a_replica_that_dies_and_a_coordinator_that_dies_come_back(launch: Start, tmp_path: Path) -> None:
    process = launch(TRAINS, "-n", "2", words=("100000",))
    until(lambda: sorted(joined(tmp_path)) == ["r0", "r1"])
    os.kill(pids(tmp_path, "r1")[0], signal.SIGKILL)
    until(lambda: len(joined(tmp_path)) == 3)
    os.kill(pids(tmp_path, "coordinator")[0], signal.SIGKILL)
    until(lambda: len(pids(tmp_path, "coordinator")) == 2)
    before = sum(e["event"] == "decide" for e in events(tmp_path))
    until(lambda: sum(e["event"] == "decide" for e in events(tmp_path)) > before + 1)
    (tmp_path / "enough").touch()
    status, said = ended(process)
    assert status == 0, said
    assert "r1 died (SIGKILL)" in said
    assert "r1 is started again" in said
    assert "the coordinator died (SIGKILL); it is started again" in said
    assert said.count("| pending 0") == 2
    deaths = [e for e in events(tmp_path) if e["event"] == "death" and e["replica"] == "r1"]
    assert [death["incarnation"] for death in deaths] == [1]
    assert (next(tmp_path.glob("runs/*")) / "report.html").exists()
    assert not any(map(alive, pids(tmp_path)))


@pytest.mark.long
def test_at_its_end_it_says_what_happened_to_each_inner_step(launch: Start, tmp_path: Path) -> None:
    process = launch(TRAINS, "-n", "2", words=("100000",))
    until(lambda: sum(e["event"] == "decide" for e in events(tmp_path)) > 1)
    (listed,) = [job for job in local_jobs() if job.pid == process.pid]
    assert (listed.kind, listed.folder) == ("launch", str(next(tmp_path.glob("runs/*"))))
    assert [job["job"] for job in status_of(listed)] == ["default"]
    until(lambda: any(e["event"] == "counts" and "r1" in e["data"]["counts"] for e in events(tmp_path)))  # type: ignore[index]
    os.kill(pids(tmp_path, "r1")[0], signal.SIGKILL)
    until(lambda: len(joined(tmp_path)) == 3)
    said, training = "", re.compile(r"s  inner step \d+, version \d+, .* training")
    assert process.stdout is not None
    for line in process.stdout:  # a line of progress comes every few seconds
        said += line
        if training.search(line):
            (tmp_path / "enough").touch()
    assert process.wait() == 0, said
    assert training.search(said), said
    one = " ".join(said.split())
    assert re.search(r"1 death: r1 died at \S+ \(SIGKILL\), and was back", one), said
    assert re.search(
        r"(Of [\d,]+ inner steps on record, [\d,]+ .*|All [\d,]+ inner steps on record )are in the model", one
    )
    summary = json.loads((next(tmp_path.glob("runs/*")) / "summary.json").read_text())
    most = summary["dead_inner_steps_unreported"]
    assert 0 < most < 100
    assert f"replicas that died may have taken up to {most} more step" in one
    assert summary["survivor_inner_steps_lost"] == 0
    assert 0 < summary["stall_s"]["median"] <= summary["stall_s"]["max"] and summary["wire_bytes"] > 0
    assert summary["inner_steps_executed"] == (
        summary["inner_steps_committed"] + summary["inner_steps_pending"] + summary["dead_inner_steps_lost"]
    )
    assert process.pid not in [job.pid for job in local_jobs()]


@pytest.mark.long
def test_a_script_that_fails_again_and_again_is_given_up(launch: Start, tmp_path: Path) -> None:
    source = TRAINS.replace("optimizer.step()", "raise SystemExit('no gradient')")
    status, said = ended(launch(source, "--restarts", "9", words=("100",)))
    assert status == 1
    assert len(pids(tmp_path, "r0")) == 3
    assert "not started again: its script has failed 3 times in a row, each time within 30 s" in said


@pytest.mark.long
def test_a_bug_that_ends_all_replicas_again_at_the_same_line_ends_the_launch(launch: Start, tmp_path: Path) -> None:
    source = TRAINS.replace("optimizer.step()", "[0][optimizer.inner_step == 15]; optimizer.step()")
    status, said = ended(launch(source, "-n", "2", "--restarts", "9", words=("100",)))
    assert status == 1
    assert len(pids(tmp_path, "r0")) == len(pids(tmp_path, "r1")) == 3
    assert said.count("is not started again: it has failed again and again at the same inner step, at the same") == 2
    last = "r0 and r1 have failed, and were not started again, since no restart mends this: IndexError: list index out"
    assert said.splitlines()[-2].startswith(last)
    assert re.fullmatch(r"    at .*script.py, line \d+: \[0\]\[optimizer.inner_step == 15\].*", said.splitlines()[-1])


def test_a_token_that_cannot_be_written_is_one_message(launch: Start, tmp_path: Path) -> None:
    (tmp_path / "there" / "token").mkdir(parents=True)
    status, said = ended(launch("pass", "--bind", "0.0.0.0:0", "--folder", "there"))
    assert (status, "Traceback" in said) == (2, False), said
    assert "there/token: Is a directory; give a --folder that can be written" in said


@pytest.mark.long
def test_replicas_leave_with_their_steps_on_ctrl_c(launch: Start, tmp_path: Path) -> None:
    process = launch(TRAINS, "-n", "2", words=("100000",))
    until(lambda: sum(e["event"] == "decide" for e in events(tmp_path)) > 1)
    process.send_signal(signal.SIGINT)
    status, said = ended(process)
    assert status == 130, said
    assert re.search(r"interrupted at inner step \d+\. The model is lost unless script.py has saved it", said)
    assert said.count("leaves its job: SIGTERM") == 2, said
    assert sum(e["event"] == "leave" for e in events(tmp_path)) == 2
    assert "no committed state contains" not in said


@pytest.mark.long
def test_a_replica_that_is_asked_to_leave_is_not_done(launch: Start, tmp_path: Path) -> None:
    """Nor does the coordinator's death twice in a row end the job."""
    process = launch(TRAINS, "-n", "2", words=("100000",))
    until(lambda: sum(e["event"] == "decide" for e in events(tmp_path)) > 1)
    os.kill(pids(tmp_path, "r1")[0], signal.SIGTERM)
    until(lambda: not alive(pids(tmp_path, "r1")[0]))
    time.sleep(3.0)
    os.kill(pids(tmp_path, "r0")[0], signal.SIGKILL)
    until(lambda: len(pids(tmp_path, "r0")) == 2)
    for life in (1, 2):
        os.kill(pids(tmp_path, "coordinator")[-1], signal.SIGKILL)
        until(lambda life=life: len(pids(tmp_path, "coordinator")) == life + 1)  # type: ignore[misc]
    until(lambda: joined(tmp_path).count("r0") == 2)
    (tmp_path / "enough").touch()
    status, said = ended(process)
    assert status == 0, said
    assert "r1 was asked to leave, and is not started again" in said
    assert "to go on:" not in said


@pytest.mark.long
def test_a_second_launch_joins_the_job_of_the_first(launch: Start, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    first = launch(TRAINS, "-n", "1", "--bind", "0.0.0.0:0", "--folder", str(folder), words=("100000",))
    token = folder / "token"
    until(token.exists)
    until(lambda: joined(tmp_path) == ["r0"])
    assert token.stat().st_mode & 0o077 == 0
    assert first.stdout is not None
    said = ""
    while "--join" not in said:
        said = first.stdout.readline()
    port = re.search(r"--join http://THIS-HOST:(\d+) --token-file token", said)
    assert port is not None
    second = launch(
        TRAINS, "--join", f"http://127.0.0.1:{port[1]}", "--token-file", str(token), "--ids", "b", words=("100000",)
    )
    until(lambda: joined(tmp_path) == ["r0", "b0"])
    (tmp_path / "enough").touch()
    (status, said), one = ended(second), ended(first)
    assert status == one[0] == 0
    assert "b0 came to the end of script.py." in said and "The job 'default'" in said.splitlines()[-1]
    assert joined(tmp_path) == ["r0", "b0"]


@pytest.mark.long
def test_a_replica_of_a_launch_that_joins_which_is_told_to_leave_has_not_come_to_the_end(
    launch: Start, tmp_path: Path
) -> None:
    first = launch(TRAINS, "--folder", str(tmp_path / "runs" / "one"), words=("100000",))
    until(lambda: joined(tmp_path) == ["r0"])
    (listed,) = [job for job in local_jobs() if job.pid == first.pid]
    assert listed.replicas() == {"r0": pids(tmp_path, "r0")[0]}
    shown = subprocess.run([sys.executable, "-m", "ftopt", "status", listed.name], capture_output=True, text=True)
    assert f"processes: r0 {listed.replicas()['r0']}" in shown.stdout, shown
    second = launch(TRAINS, "--join", listed.url, "--ids", "b", words=("100000",))
    until(lambda: joined(tmp_path) == ["r0", "b0"])
    (pid,) = children(second.pid)
    os.kill(pid, signal.SIGTERM)
    status, said = ended(second)
    assert status == 1, said
    dated = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  b0 was asked to leave, and is not started again"
    assert re.search(dated, said, re.MULTILINE) and "b0 left before the end of script.py." in said
    (tmp_path / "enough").touch()
    assert ended(first)[0] == 0


def test_a_launch_whose_script_joins_no_job_says_so(launch: Start) -> None:
    status, said = ended(launch("pass"))
    assert status == 0
    assert "no replica has joined the job: does script.py call ftopt.wrap, and train with what it returns?" in said
    status, said = ended(launch("pass", words=("-n", "2")))
    assert status == 0
    assert "no replica has joined the job: -n follows SCRIPT, so it went to the script" in said


@pytest.mark.long
def test_a_launch_on_this_machine_only_is_joined_by_its_user_whatever_its_job_is_called(
    launch: Start, tmp_path: Path
) -> None:
    first = launch(TRAINS, "--job", "three", "--folder", str(tmp_path / "runs" / "one"), words=("100000",))
    until(lambda: joined(tmp_path) == ["r0"])
    (listed,) = [job for job in local_jobs() if job.pid == first.pid]
    status, said = ended(launch(TRAINS, "--join", listed.url, "--job", "four"))
    assert (status, "Traceback" in said) == (2, False), said
    assert "runs three; it has no job 'four'; leave out --job, or give one" in said
    second = launch(TRAINS, "--join", listed.url, "--ids", "b", words=("100000",))
    until(lambda: joined(tmp_path) == ["r0", "b0"])
    assert [job.name for job in chosen(["three"], local_jobs(), everything=False)] == [listed.name]
    assert [job.name for job in serving(local_jobs()) if job.url == listed.url] == [listed.name]
    (joiner,) = [job for job in local_jobs() if job.pid == second.pid]
    command = [sys.executable, "-m", "ftopt"]
    shown = subprocess.run([*command, "ps"], capture_output=True, text=True, check=True).stdout
    assert f"{joiner.name}  joined {listed.url}  (process {second.pid}," in shown
    assert f"  processes: b0 {joiner.replicas()['b0']}" in shown
    stopped = subprocess.run([*command, "stop", joiner.name], capture_output=True, text=True, check=True).stdout
    assert f"{joiner.name} ends: its replicas contribute their steps and leave\n1 job ended" in stopped
    status, said = ended(second)
    assert status == 143
    assert re.search(r"b0 left before the end of script.py\.\n1 replica of this launch took \d+ inner step", said), said
    assert "The job 'three' goes on with 1 replica: version " in said
    assert first.poll() is None
    (tmp_path / "enough").touch()
    assert ended(first)[0] == 0


@pytest.mark.long
def test_a_replica_of_another_model_is_refused_and_the_other_trains_on_without_it(
    launch: Start, tmp_path: Path
) -> None:
    source = TRAINS.replace("Linear(2, 1)", "Linear(2, 1 + int(__import__('os').environ['FTOPT_REPLICA'] == 'r1'))")
    status, said = ended(launch(source, "-n", "2", words=("60",)))
    assert status == 1, said
    (refused,) = {str(e["replica"]) for e in events(tmp_path) if e["event"] == "refuse"}  # whichever came second
    assert len(pids(tmp_path)) == 3 and not [e for e in events(tmp_path) if e["event"] == "death"]
    assert f"{refused} | ftopt: replica {refused} does not fit job 'default': another model" in said
    assert f"{refused} has failed (exit status 2) by a mistake that no restart can mend" in said
    assert "Traceback" not in said and "No replica died." in said
    last = said.splitlines()[-1]
    assert last.startswith(f"ftopt: {refused} has failed, and was not started again, since no restart mends this: ")
    assert "does not fit job 'default': another model" in last
    summary = json.loads((next(tmp_path.glob("runs/*")) / "summary.json").read_text())
    assert (summary["ended_before_joining"], summary["inner_steps_committed"]) == (1, 60)
    assert summary["stall_s"]["max"] > 0 and summary["wire_bytes"] == 0, "one replica sends nothing"


@pytest.mark.long
def test_a_script_that_ends_with_status_2_is_not_started_again(launch: Start, tmp_path: Path) -> None:
    source = TRAINS.replace("optimizer.step()", "sys.exit('no' and 2)")
    status, said = ended(launch(source, "--restarts", "9", words=("100",)))
    assert status == 1
    assert len(pids(tmp_path, "r0")) == 1
    assert "r0 has failed, and was not started again, since no restart mends this: " in said


@pytest.mark.long
def test_a_stranger_does_not_join_a_launch_without_its_token(launch: Start, tmp_path: Path) -> None:
    first = launch(TRAINS, "--folder", str(tmp_path / "runs" / "one"), words=("100000",))
    until(lambda: joined(tmp_path) == ["r0"])
    (listed,) = [job for job in local_jobs() if job.pid == first.pid]
    token = tmp_path / "other"
    token.write_text("another-token-of-some-length\n")
    token.chmod(0o600)
    status, said = ended(launch(TRAINS, "--join", listed.url, "--token-file", str(token)))
    assert (status, "Traceback" in said) == (2, False), said
    assert "lets nobody join without its token" in said or "does not accept this token" in said
    (tmp_path / "enough").touch()
    assert ended(first)[0] == 0


@pytest.mark.long
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_launch_keeps_its_coordinator_for_replicas_of_other_machines(
    launch: Start, tmp_path: Path, interrupted: bool
) -> None:
    folder = tmp_path / "runs" / "one"
    first = launch(TRAINS, "-n", "1", "--bind", "0.0.0.0:0", "--folder", str(folder), words=("100000",))
    until((folder / "token").exists)
    until(lambda: joined(tmp_path) == ["r0"])
    (listed,) = [job for job in local_jobs() if job.pid == first.pid]
    words = ("--join", listed.url, "--token-file", str(folder / "token"), "--ids", "b")
    second = launch(TRAINS.replace("enough", "later"), *words, words=("100000",))
    until(lambda: joined(tmp_path) == ["r0", "b0"])
    if interrupted:
        until(lambda: any(e["event"] == "decide" and "b0" in str(e["data"]["members"]) for e in events(tmp_path)))
        first.send_signal(signal.SIGINT)
        status, said = ended(first)
        assert status == 130
        assert "b0 of other machines still trains, and will find no coordinator; to start it: ftopt coordinator" in said
        last = said.splitlines()[-1]
        assert "The model is not lost: b0 has it. Start the coordinator again by the command above" in last
        assert "b0 of other launches trained on, and holds the model." in " ".join(said.split())
        assert "No replica died." in said and "died at" not in said and "were lost with" not in said
        second.send_signal(signal.SIGINT)
    else:
        (tmp_path / "enough").touch()
        until(lambda: any(e["event"] == "leave" and e["replica"] == "r0" for e in events(tmp_path)))
        until(lambda: not alive(pids(tmp_path, "r0")[0]))
        time.sleep(3.0)
        os.kill(pids(tmp_path, "coordinator")[0], signal.SIGKILL)
        until(lambda: len(pids(tmp_path, "coordinator")) == 2)
        assert first.poll() is None
        (tmp_path / "later").touch()
        status, said = ended(first)
        assert status == 0, said
        assert "b0 of other machines still trains; this launch waits for the job's end" in said
    assert ended(second)[0] == (130 if interrupted else 0)
    assert "The run is still going on" not in said
