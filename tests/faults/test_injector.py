"""Faults strike real processes, at their point, once."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from ftopt.events import Event
from ftopt.run.fault_injector import FaultInjector
from ftopt.run.fault_spec import Fault

_PROCESS = """
import sys
from ftopt.events import Event
from ftopt.run.fault_injector import FaultInjector
from ftopt.run.fault_spec import Fault

def say(text):
    sys.stdout.write(text + "\\n")
    sys.stdout.flush()

injector = FaultInjector([{fault}], lambda event: say(event.event))
for step in range(5):
    injector(Event("propose", "r0", 1, inner_step=step))
    say(str(step))
sys.stdin.read()  # it ends when its parent has seen what there is to see
"""


class Struck:
    """An injector with a recorded sleep."""

    def __init__(self, *faults: Fault, incarnation: int | None = None) -> None:
        self.slept: list[float] = []
        self.told: list[Event] = []
        self.injector = FaultInjector(faults, self.told.append, incarnation=incarnation, sleep=self.slept.append)


def process(fault: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _PROCESS.format(fault=fault)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_kill_strikes_before_the_points_effect_and_is_on_record() -> None:
    child = process("Fault(point='propose', at_step=2, do='kill')")
    out, _ = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    assert out.decode().split() == ["0", "1", "fault"]


def test_a_stopped_process_goes_on_by_itself() -> None:
    child = process("Fault(point='propose', at_step=2, do='stop', for_s=0.5)")
    _, status = os.waitpid(child.pid, os.WUNTRACED | os.WCONTINUED)
    assert os.WIFSTOPPED(status) or os.WIFCONTINUED(status)  # that is over when this process comes late
    out, _ = child.communicate(timeout=60)
    assert out.decode().split() == ["0", "1", "fault", "2", "3", "4"]


def test_a_process_of_many_threads_goes_on_however_early_the_stop_ends() -> None:
    program = """
import threading
from ftopt.run.fault_injector import stop_for

def work():
    while True:
        sum(range(1000))

def stops():
    for _ in range(10):
        stop_for(0.01)

for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
stopping = threading.Thread(target=stops, daemon=True)
stopping.start()
stopping.join()
"""
    child = subprocess.Popen([sys.executable, "-c", program])
    try:
        assert child.wait(timeout=60) == 0
    finally:
        child.kill()
        child.wait()


def test_a_stopped_process_that_somebody_else_continues_goes_on_at_once() -> None:
    child = process("Fault(point='propose', at_step=2, do='stop', for_s=600)")
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    os.kill(child.pid, signal.SIGCONT)
    out, _ = child.communicate(timeout=60)
    assert out.decode().split() == ["0", "1", "fault", "2", "3", "4"]


def test_a_hang_on_the_training_thread_sleeps_right_there_and_once() -> None:
    struck = Struck(Fault(point="propose", at_step=3, do="hang", for_s=8.0))
    for step in range(6):
        struck.injector(Event("propose", "r0", 1, inner_step=step))
    assert struck.slept == [8.0]
    assert [(event.event, event.inner_step, event.data["do"]) for event in struck.told] == [("fault", 3, "hang")]


def test_a_hang_elsewhere_waits_for_the_training_threads_next_event() -> None:
    struck = Struck(Fault(point="reduce", do="hang", for_s=8.0))
    thread = threading.Thread(target=struck.injector, args=(Event("reduce", "r0", 1, inner_step=5),))
    thread.start()
    thread.join()
    assert struck.slept == []
    struck.injector(Event("inner", "r0", 1, inner_step=6))
    assert struck.slept == [8.0]


def test_a_fault_waits_for_its_incarnation_and_its_step() -> None:
    struck = Struck(Fault(point="apply", at_step=10, do="hang", for_s=1.0, incarnation=2))
    for incarnation, step in ((1, 50), (2, 9), (2, None)):
        struck.injector(Event("apply", "r0", incarnation, inner_step=step))
    assert struck.slept == []
    struck.injector(Event("inner", "r0", 2, inner_step=10))
    struck.injector(Event("apply", "r0", 2))
    assert struck.slept == [1.0]


def test_a_newcomers_fetch_does_not_wait_for_a_step() -> None:
    struck = Struck(Fault(point="fetch", at_step=120, do="hang", for_s=1.0, incarnation=2))
    struck.injector(Event("fetch", "r0", 2, inner_step=0))
    assert struck.slept == [1.0]


def test_a_fault_strikes_as_often_as_it_says_and_does_what_was_learnt() -> None:
    struck, done = Struck(Fault(point="reduce.after", do="corrupt", times=2)), list[str]()
    struck.injector.learn({"corrupt": lambda fault, event: done.append(fault.aim)})
    for attempt in range(4):
        struck.injector(Event("reduce.after", "r0", 1, attempt=attempt))
    assert done == ["sum", "sum"]
    assert [event.attempt for event in struck.told] == [0, 1]


def test_a_burst_strikes_every_so_often_for_ever_and_is_told_once() -> None:
    burst = Fault(point="aggregated", do="corrupt", size=0.1, times=None, every=3)
    struck, done = Struck(burst), list[int | None]()
    struck.injector.learn({"corrupt": lambda fault, event: done.append(event.inner_step)})
    for step in range(1, 9):
        struck.injector(Event("aggregated", "r0", 1, inner_step=step))
    assert done == [1, 4, 7]
    assert [event.inner_step for event in struck.told] == [1]


def test_a_slow_trainers_inner_steps_take_so_many_times_as_long() -> None:
    slept, now = list[float](), [0.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    injector = FaultInjector(
        [Fault(do="slow", factor=3.0, at_step=2, for_s=0.75)], lambda event: None, sleep=sleep, clock=lambda: now[0]
    )
    for step in range(8):
        injector(Event("inner", "r0", 1, inner_step=step))
        now[0] += 0.1
        injector(Event("stepped", "r0", 1, inner_step=step))
    assert [round(seconds, 3) for seconds in slept] == [0.2, 0.2]


def test_the_coordinators_life_stands_for_its_incarnation() -> None:
    struck = Struck(Fault(replica="coordinator", point="decide", do="stop", for_s=1.0), incarnation=2)
    struck.injector(Event("decide", "coordinator", 0, inner_step=5))
    assert struck.told == []


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"point": "nowhere"}, "allowed: inner"),
        ({"do": "corrupt", "what": "sum"}, "allowed: 'reduce.after'"),
        ({"do": "corrupt", "what": "weights"}, "allowed: params, grads, inner, payload, sum, result, anchor, outer"),
        ({"do": "corrupt", "what": "grads", "point": "propose"}, "allowed: 'inner'"),
        ({"do": "corrupt", "what": "payload"}, "allowed: 'payload'"),
        ({"do": "corrupt", "bit": 32}, "a bit is 0 to 31"),
        ({"do": "corrupt", "element": -1}, "an element at least 0"),
        ({"do": "nan", "bit": 3}, "for corrupt"),
        ({"do": "corrupt", "for_s": 1.0}, "use times"),
        ({"do": "corrupt", "point": "aggregated"}, "a variance above 0"),
        ({"do": "corrupt", "point": "inner", "what": "bit"}, "allowed: 'aggregated'"),
        ({"do": "corrupt", "size": 1.0}, "nothing else has one"),
        ({"do": "kill", "every": 2}, "corrupt and nan only"),
        ({"do": "nan", "point": "reduce"}, "allowed: inner, propose"),
        ({"do": "slow"}, "factor"),
        ({"do": "slow", "factor": 3.0, "point": "apply"}, "allowed: inner"),
        ({"do": "kill", "times": 2}, "corrupt and nan only"),
        ({"do": "partition"}, "seconds above 0"),
        ({"replica": "coordinator", "point": "decide", "do": "corrupt"}, "does not train"),
        ({"do": "explode"}, "allowed: kill, stop, hang"),
        ({"do": "kill", "for_s": 1.0}, "no effect"),
        ({"do": "stop"}, "seconds above 0"),
        ({"do": "stop", "for_s": 1.0, "rejoin_s": 1.0}, "for kill only"),
        ({"replica": "coordinator", "point": "reduce"}, "allowed: join"),
        ({"replica": "coordinator", "point": "decide", "do": "hang", "for_s": 1.0}, "does not train"),
        ({"journal": "burn"}, "allowed: keep, delete"),
    ],
)
def test_a_fault_that_cannot_strike_is_refused(fields: dict[str, object], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        Fault(**fields)  # type: ignore[arg-type]
