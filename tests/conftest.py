"""What all tests share."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Iterator

import hypothesis
import pytest

from tests.forkserver import CONTEXT
from tests.ports import hold_port

# An example may take long, and so may drawing it: the machine is busy. The same examples each time: a red run tells of
# the change. `--hypothesis-profile=other_examples` tries others, and twice as many.
_BUSY = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("other_examples", _BUSY)
hypothesis.settings.register_profile("busy", _BUSY, derandomize=True, database=None, max_examples=50)
hypothesis.settings.load_profile("busy")

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["WANDB_MODE"] = "disabled"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's `pytest &` has it, and all processes started here
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist's own
def pytest_cmdline_main(config: pytest.Config) -> None:
    """All default tests and all long ones go to worker processes; another choice is run by this one, as with ``-n 0``.

    Most tests wait for processes and threads half of the time. What measures time is not among the default ones.
    """
    if not config.pluginmanager.hasplugin("xdist") or hasattr(config, "workerinput"):
        return
    all_files = config.args_source is config.ArgsSource.TESTPATHS
    many = config.option.markexpr.startswith("long") or config.option.markexpr in config.getini("addopts")
    watched = config.option.usepdb or config.option.capture == "no" or config.option.collectonly
    if config.option.numprocesses is None and all_files and many and not watched:
        config.option.numprocesses, config.option.dist = 3, "worksteal"


def pytest_sessionstart() -> None:
    """Nobody forks this process, which has threads: a child has their locks as they are, and finalizers of what they
    serve, without them. So workers of loaders come from the fork server, too.
    """
    multiprocessing.set_start_method(CONTEXT.get_start_method(), force=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What torch draws does not depend on the tests before. What needs a CUDA device is skipped where there is none,
    also when it is asked for."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("there is no CUDA device here")


def pytest_collection_finish() -> None:
    """What has been imported lives on to the end: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def local_jobs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A list of jobs of the tests' own: they do not see the user's, and the user does not see theirs."""
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("runtime"))


@pytest.fixture
def port() -> Iterator[int]:
    """A free port of this machine, for several servers one after the other (`hold_port`)."""
    with hold_port() as holder:
        yield holder.getsockname()[1]


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> Iterator[random.Random]:
    """Random inputs: the same in each run of a default test, others in each run of a slow one. ``FTOPT_SEED`` gives
    those of the run that has failed, which prints it."""
    slow = request.node.get_closest_marker("slow") is not None
    seed = int(os.environ.get("FTOPT_SEED") or (random.SystemRandom().randrange(1 << 32) if slow else 0))
    print(f"FTOPT_SEED={seed}")  # noqa: T201
    yield random.Random(seed)
