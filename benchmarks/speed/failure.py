"""What a failure costs: the same kills with ftopt, and with DDP, checkpoints and restarts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import pictures
from benchmarks.speed.figures import Row
from benchmarks.speed.restarting import BATCH, CONTEXT_BYTES, EVERY
from ftopt.data.corpus import stdlib_bytes
from ftopt.watch.folder import RunFolder
from ftopt.watch.jsonl import read_lines

REPLICAS = 4
ABOUT = (
    f"The same small GPT in {REPLICAS} processes, batch {BATCH} each, whose steps take 0.1 s at least (so that a death "
    "does not make the others faster), with the same method: gradients averaged in every step, AdamW. *ftopt*: "
    "`ftopt run` with SyncSGD, `restarts: 20`. *DDP*: DistributedDataParallel under `torchrun --max-restarts`; rank 0 "
    f"writes a checkpoint every {EVERY} steps, atomically, and all restore it when they are started again. First one, "
    "then the other, each for 100 s from its first steps. The process of replica (rank) 1 gets SIGKILL after 15 s, and "
    "again 20 s after all train once more; ftopt's runner or torchrun starts it again at once. *samples*: trained and "
    "not lost again, at the end. *rate*: before the first kill. *lost*: inner steps of single processes that are not "
    "in the model (DDP: done again). *seconds lost*: the time that the missing samples take at that rate. *longest "
    "stop*: time without a new sample."
)
GOALS = "none; a comparison"
_LIMIT_S = 180.0
_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Otherwise ranks that torchrun has started again find the addresses of dead ones in the store, and cannot connect."""
Point = tuple[float, float]


class Plan(NamedTuple):
    """Seconds: of a step, until the first kill, from when all train again until the next one, and in all. No kill comes
    later than ``between_s`` before the end."""

    step_s: float = 0.1
    first_s: float = 15.0
    between_s: float = 20.0
    over_s: float = 100.0


QUICK = Plan(step_s=0.02, first_s=4.0, between_s=8.0, over_s=15.0)


class Course(NamedTuple):
    """One way's run, in seconds since its first steps.

    Args:
        curve: moment, samples trained and not lost again by then.
        kills: when they were.
        lost: inner steps of one process that were lost, in all.
        over_s: when the measurement ended.
    """

    curve: list[Point]
    kills: list[float]
    lost: int
    over_s: float


def run(quick: bool) -> list[Row]:
    """A row a way."""
    plan = QUICK if quick else Plan()
    with tempfile.TemporaryDirectory(prefix="ftopt-bench-") as name:
        folder = Path(name)
        corpus = folder / "corpus.txt"
        corpus.write_bytes(stdlib_bytes().train[: 4 << 20].tobytes())
        courses = {"ftopt": _ftopt(folder / "ftopt", corpus, plan), "DDP": _ddp(folder / "ddp", corpus, plan)}
    return [row(way, course) for way, course in courses.items()]


def row(way: str, course: Course) -> Row:
    """What the kills have cost."""
    rate = slope(course)
    samples = course.curve[-1][1]
    deaths = len(course.kills)
    return {
        "way": way,
        "kills": deaths,
        "samples": round(samples),
        "rate, samples/s": rate,
        "inner steps lost per kill": course.lost / deaths,
        "seconds lost per kill": (course.over_s - samples / rate) / deaths,
        "longest stop, s": longest_stop(course),
        "curve": course.curve,
        "killed": course.kills,
    }


def slope(course: Course) -> float:
    """Samples per second before the first kill."""
    before = [point for point in course.curve if point[0] < course.kills[0]]
    return before[-1][1] / before[-1][0]


def longest_stop(course: Course) -> float:
    """The longest time without a new sample."""
    gains = [at for (_, before), (at, after) in zip(course.curve, course.curve[1:], strict=False) if after > before]
    return max(b - a for a, b in zip([0.0, *gains], [*gains, course.over_s], strict=True))


def _ftopt(folder: Path, corpus: Path, plan: Plan) -> Course:
    settings = [
        f"replicas={REPLICAS}", "restarts=20", "method={name: sync_sgd, sync_every: 1}",
        f"data.path={corpus}", "data.name=text",
        "model={name: factory, factory: 'benchmarks.speed.restarting:Paced', "
        f"context: {CONTEXT_BYTES}, args: {{step_s: {plan.step_s:g}}}}}",
        f"data.batch_size={BATCH}", "train.inner_steps=1000000", "train.eval_every=0", "checkpoint.every=0",
        "inner={name: adamw, lr: 4e-3, schedule: {name: constant, warmup: 0}}", "log.wandb=off", f"log.dir={folder}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "ftopt", "run", "diloco_bytes", *settings]

    def files() -> RunFolder | None:
        return next((RunFolder(path) for path in folder.glob("*") if path.is_dir()), None)

    def steps() -> list[dict[str, Any]]:
        found = files()
        lines = {path.stem: read_lines(path) for path in found.replicas.glob("*.jsonl")} if found else {}
        return [line | {"replica": replica} for replica, each in lines.items() for line in each]

    def trains(life: int) -> bool:
        lives = {x["replica"]: x["incarnation"] for x in steps()}
        return len(lives) == REPLICAS and lives["r1"] >= life

    def pid() -> int:
        found = files()
        assert found is not None
        return [e["data"]["pid"] for e in read_lines(found.events) if e["event"] == "spawn" and e["replica"] == "r1"][
            -1
        ]

    folder.mkdir()
    with _process(command, folder / "said.log", signal.SIGINT) as process:
        began, kills, over = _measure(process, plan, pid, trains)
    found = files()
    assert found is not None
    zero = found.about.stat().st_mtime  # written at the run's start
    return course_of_ftopt(
        read_lines(found.events), steps(), began - zero, [kill - zero for kill in kills], over - zero
    )


def course_of_ftopt(
    events: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]], began: float, kills: list[float], over: float
) -> Course:
    """From the run's record; ``began``, ``kills`` and ``over`` by its clock."""
    done = Counter((x["replica"], x["incarnation"]) for x in steps)
    committed: Counter[tuple[str, int]] = Counter()
    for event in events:
        if event["event"] == "decide":
            for replica, incarnation, count, *_ in event["data"]["members"]:
                committed[replica, incarnation] += count
    gains = [(x["t_s"], BATCH) for x in steps]
    lost = 0
    for event in events:
        if event["event"] == "death" and event["t_s"] <= over:
            who = (event["replica"], event["incarnation"])
            lost += done[who] - committed[who]
            gains.append((event["t_s"], -BATCH * (done[who] - committed[who])))
    return _course(gains, began, kills, over, lost)


def _ddp(folder: Path, corpus: Path, plan: Plan) -> Course:
    folder.mkdir()
    started = time.time()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={REPLICAS}",
        "--max-restarts=20", "-m", "benchmarks.speed.restarting",
        str(folder), str(corpus), str(plan.step_s), repr(started),
    ]  # fmt: skip

    def pid() -> int:
        return [x["pid"] for x in read_lines(folder / "starts.jsonl") if x["rank"] == 1][-1]

    def trains(life: int) -> bool:
        starts = [x["t_s"] for x in read_lines(folder / "starts.jsonl") if x["rank"] == 0]
        steps = read_lines(folder / "steps.jsonl")
        return len(starts) >= life and bool(steps) and steps[-1]["t_s"] > starts[-1]

    with _process(command, folder / "said.log", signal.SIGTERM) as process:
        began, kills, over = _measure(process, plan, pid, trains)
    return course_of_ddp(
        read_lines(folder / "starts.jsonl"), read_lines(folder / "steps.jsonl"),
        *(began - started, [kill - started for kill in kills], over - started),
    )  # fmt: skip


def course_of_ddp(
    starts: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]], began: float, kills: list[float], over: float
) -> Course:
    """A kill takes back what was done since the checkpoint from which the next start goes on."""
    gains = [(x["t_s"], REPLICAS * BATCH) for x in steps]
    lost = 0
    for kill in kills:
        reached = max((x["step"] for x in steps if _last_life(x, starts, kill)), default=0)
        resumed = next((x["step"] for x in starts if x["t_s"] > kill), reached // EVERY * EVERY)
        lost += REPLICAS * (reached - resumed)
        gains.append((kill, -BATCH * REPLICAS * (reached - resumed)))
    return _course(gains, began, kills, over, lost)


def _last_life(step: dict[str, Any], starts: Sequence[dict[str, Any]], kill: float) -> bool:
    """Whether a step was done in the life that a kill has ended; its ranks may take one more step after the kill."""
    again = next((x["t_s"] for x in starts if x["t_s"] > kill), float("inf"))
    since = max((x["t_s"] for x in starts if x["t_s"] <= kill), default=0.0)
    return bool(since <= step["t_s"] < again)


def _course(gains: list[tuple[float, int]], began: float, kills: list[float], over: float, lost: int) -> Course:
    curve: list[Point] = [(0.0, 0.0)]
    total = 0
    for at, gain in sorted(gains):
        if began < at <= over:  # the first steps, before all were there, do not count
            total += gain
            curve.append((at - began, total))
    return Course(curve, [kill - began for kill in kills], lost, over - began)


def _measure(
    process: subprocess.Popen[bytes], plan: Plan, pid: Callable[[], int], trains: Callable[[int], bool]
) -> tuple[float, list[float], float]:
    """Kills by the plan; when it began, when the kills were, and when it was over: seconds since the epoch.

    Args:
        process: runs the job.
        plan: when to kill.
        pid: of the process to kill.
        trains: whether all train, the one to kill in its life of that number, or a later one.
    """

    deadline = time.time() + _LIMIT_S
    while not trains(1):
        if process.poll() is not None or time.time() > deadline:
            raise RuntimeError(f"the job did not start (exit status {process.poll()})")
        time.sleep(0.1)
    began, kills = time.time(), list[float]()
    over, due = began + plan.over_s, began + plan.first_s
    while due <= over - plan.between_s:
        time.sleep(max(0.0, due - time.time()))
        os.kill(pid(), signal.SIGKILL)
        kills.append(time.time())
        while not trains(len(kills) + 1) and time.time() < over:
            time.sleep(0.1)
        due = time.time() + plan.between_s
    time.sleep(max(0.0, over - time.time()))
    return began, kills, time.time()


@contextmanager
def _process(command: list[str], log: Path, end: signal.Signals) -> Iterator[subprocess.Popen[bytes]]:
    """A process with children, which are gone when the block ends."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **_OWN_STORE}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
    try:
        yield process
    except RuntimeError as error:
        raise RuntimeError(f"{error}; it said:\n{log.read_text(errors='replace')[-3000:]}") from error
    finally:
        process.send_signal(end)
        try:
            process.wait(60.0)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def draw(rows: list[Row], path: Path) -> None:
    """Samples in the model over time, with the kills."""
    curves = {row["way"]: (row["curve"], row["killed"]) for row in rows}
    pictures.course(curves, path, x="seconds", y="samples trained and not lost again", steps=True, least=0)
