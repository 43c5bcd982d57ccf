"""Kernels give the bits of torch's operations, and whatever prevents them leaves torch's in use."""

from __future__ import annotations

import errno
import logging
import math
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ftopt
from ftopt.events import Event
from ftopt.kernels import loader
from ftopt.methods import Method
from ftopt.methods.method import ReplicaView, Round
from ftopt.outer import SGD, Adam, CosineRate, LinearRate
from ftopt.step.outer.frozen import flat_parts
from ftopt.step.tensors import fused, pieces
from ftopt.step.tensors.digest import block_sums
from ftopt.step.tensors.fused import OUTER_STEPS, Kernels
from ftopt.step.tensors.mapped import Mapped
from ftopt.step.tensors.memory import Memory
from ftopt.step.tensors.pieces import Measured

numba = pytest.importorskip("numba")

BLOCK, FEW, PIECE = 16_384, pieces._FEW, pieces._ON_CPU
METHODS: dict[str, Method] = {
    "nesterov": ftopt.DiLoCo(sync_every=1),
    "heavy ball": ftopt.DiLoCo(sync_every=1, outer=SGD(lr=0.7, momentum=0.9)),
    "plain": ftopt.DiLoCo(sync_every=1, outer=SGD(lr=0.3)),
    "scheduled": ftopt.DiLoCo(sync_every=1, outer=SGD(momentum=0.9, nesterov=True, schedule=CosineRate(steps=9))),
    "falling": ftopt.DiLoCo(sync_every=1, outer=SGD(momentum=0.9, momentum_schedule=LinearRate(steps=9))),
    "streaming": ftopt.StreamingDiLoCo(sync_every=8, delay=1),
    "adam": ftopt.DiLoCo(sync_every=1, outer=Adam()),
    "adam, scheduled": ftopt.DiLoCo(sync_every=1, outer=Adam(schedule=CosineRate(steps=9))),
    "slowmo": ftopt.SlowMo(sync_every=1),
    "local_sgd": ftopt.LocalSGD(sync_every=1),
}
ROUND = Round(0, 3, 7, (), scalars=((0.3,),))
SIZES = [1, 2, 1023, BLOCK - 1, BLOCK, BLOCK + 1, PIECE + 3, 3 * PIECE + 777, 7 * PIECE + 5]
SPECIAL = [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-39, 1.1754944e-38, 3.4e38, -3.4e38, 1e19]


@cache  # the tests of this file may run in several parts
def _loaded() -> Kernels:
    thread = OUTER_STEPS.prepare(torch.device("cpu"), 1 << 20, fused.difference)
    assert thread is not None
    thread.join()
    found, OUTER_STEPS._kernels = OUTER_STEPS._kernels, None  # the tests of other files run without
    assert found is not None
    return found


@pytest.fixture(scope="module")
def loaded() -> Kernels:
    return _loaded()


@pytest.fixture
def use(loaded: Kernels, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    return lambda on: monkeypatch.setattr(OUTER_STEPS, "ready", lambda: loaded if on else None)


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are the same; a NaN is like any other."""
    return torch.equal(torch.where(a.isnan(), 0, a.view(torch.int32)), torch.where(b.isnan(), 0, b.view(torch.int32)))


def stepped(
    method: Method, anchor: Tensor, state: Mapping[str, Tensor], mean: Tensor, *, memory: Memory | None = None
) -> tuple[pieces.Steps, Tensor, dict[str, Tensor], tuple[Tensor, dict[str, Tensor]]]:
    lossy = replace(ROUND, lossy=True) if not mean.numel() % 2 else ROUND
    steps = pieces.Steps(method, anchor, state, mean.clone(), lossy, memory or Memory())
    steps.there(0, mean.numel() // 3)
    return steps, *steps.finish()


def state_of(method: Method, anchor: Tensor) -> dict[str, Tensor]:
    found = method.init(anchor)
    return {name: t.fill_(4.0) if not t.dim() else t.uniform_(0, 1e-3) for name, t in found.items()}


@pytest.mark.parametrize("name", METHODS)
def test_an_outer_step_has_the_same_bits_sums_and_measurements(name: str, use: Callable[[bool], None]) -> None:
    method = METHODS[name]
    for size in SIZES:
        anchor, mean = torch.randn(size), torch.randn(size) * 1e-2
        state = state_of(method, anchor)
        use(False)
        expected, anchor_then, state_then, sums_then = stepped(method, anchor, state, mean)
        use(True)
        steps, made, made_state, (of_anchor, of_state) = stepped(method, anchor, state, mean)
        assert steps._fused is not None
        assert alike(made, anchor_then) and torch.equal(of_anchor, sums_then[0]) and steps.moved == expected.moved
        assert made_state.keys() == state_then.keys() and of_state.keys() == sums_then[1].keys()
        assert all(alike(made_state[k], t) for k, t in state_then.items())
        assert all(
            torch.equal(of_state[k], t) and torch.equal(t, block_sums(made_state[k])) for k, t in sums_then[1].items()
        )


@pytest.mark.parametrize("name", METHODS)
def test_special_values_give_the_same_bits_and_are_detected(name: str, use: Callable[[bool], None]) -> None:
    method, size = METHODS[name], BLOCK + 5
    for value in SPECIAL:
        for where in ("anchor", "mean", *method.init(torch.empty(1))):
            tensors = {"anchor": torch.randn(size), "mean": torch.randn(size) * 1e-2}
            tensors |= state_of(method, tensors["anchor"])
            if not tensors[where].dim():
                continue
            tensors[where][size // 2 :: 97] = value
            state = {k: t for k, t in tensors.items() if k not in ("anchor", "mean")}
            found = []
            for on in (False, True):
                use(on)
                found.append(stepped(method, tensors["anchor"], state, tensors["mean"]))
            (expected, anchor_then, state_then, _), (steps, made, made_state, _) = found
            assert steps.moved == expected.moved, (value, where)
            assert alike(made, anchor_then) and all(alike(made_state[k], t) for k, t in state_then.items())
            assert math.isfinite(value) or steps.moved == math.inf


def test_an_empty_slice_has_the_names_of_the_state(use: Callable[[bool], None]) -> None:
    use(True)
    _, made, state, (sums, _) = stepped(
        METHODS["adam"], torch.empty(0), state_of(METHODS["adam"], torch.empty(0)), torch.empty(0)
    )
    assert (made.numel(), sums.numel(), state.keys()) == (0, 0, {"m", "v", "step"})


def test_a_state_in_a_file_has_the_same_bits(use: Callable[[bool], None], tmp_path: Path) -> None:
    method, anchor, mean = METHODS["nesterov"], torch.randn(PIECE + 5), torch.randn(PIECE + 5)
    state = state_of(method, anchor)
    use(False)
    _, anchor_then, state_then, sums_then = stepped(method, anchor, state, mean)
    use(True)
    _, made, made_state, sums = stepped(method, anchor, state, mean, memory=Mapped(tmp_path))
    assert alike(made, anchor_then) and alike(made_state["momentum"], state_then["momentum"])
    assert torch.equal(sums[0], sums_then[0]) and torch.equal(sums[1]["momentum"], sums_then[1]["momentum"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [None, 0.3])
@pytest.mark.parametrize("name", ["nesterov", "local_sgd"])
def test_payloads_and_copies_have_the_same_bits_and_measurements(
    name: str, share: float | None, dtype: torch.dtype, use: Callable[[bool], None]
) -> None:
    for value in [1.0, 1e-18, 1e-17, 1e18, 2e18, *SPECIAL]:
        for size in (0, 1, 777, FEW - 1, FEW, FEW + 777, PIECE, PIECE + 3):
            start, params = torch.randn(size), torch.randn(size).to(dtype)
            params[size // 2 :: 1001] = value
            if abs(value) < 1e-16:
                start, params = start * 0, params * value
            anchor = start if dtype == torch.float32 else start + 1e-3
            view, found = ReplicaView(anchor=anchor, start=start, params=torch.empty(0), layout=()), []
            for on in (False, True):
                use(on)
                out, kept, measured, unmeasured = torch.empty(size), torch.empty(size), Measured(), torch.empty(size)
                pieces.payload(METHODS[name], view, flat_parts(params, PIECE), out, share, measured)
                pieces.payload(METHODS[name], view, flat_parts(params, PIECE), unmeasured, share)
                again = pieces.copy(flat_parts(params, PIECE), start, kept, size, size)
                assert alike(kept, params.float()) and alike(out, unmeasured)
                found.append((out, measured.numbers(), again.numbers()))
            (out_then, *expected), (out, *numbers) = found
            assert alike(out, out_then) and numbers == expected, (value, size)
            if measured.finite:
                norm = float((start.double() - params.double()).norm())
                assert measured.norm == pytest.approx(norm, rel=1e-5, abs=0) and again.numbers() == measured.numbers()


def test_parameters_of_other_forms_have_their_payload(use: Callable[[bool], None]) -> None:
    use(True)
    start, out = torch.randn(12), torch.empty(12)
    for part in (torch.randn(4, 3).t(), torch.randn(12).bfloat16(), torch.randn(24)[::2]):
        view, measured = ReplicaView(anchor=start, start=start, params=torch.empty(0), layout=()), Measured()
        pieces.payload(METHODS["nesterov"], view, [(part, slice(0, 12))], out, None, measured)
        assert torch.equal(out, start - part.reshape(-1).float())
        assert measured.peak == float(out.abs().max())


class Doubled(ftopt.DiLoCo):
    def outer_step(
        self, anchor: Tensor, state: object, mean: Tensor, round: object
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return anchor - 2 * mean, dict(state)  # type: ignore[call-overload]


class OwnSGD(SGD):
    def step(self, anchor: Tensor, state: object, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return anchor - gradient, {}


@dataclass(frozen=True)
class OwnRate:
    moves: bool = False

    def factor(self, t: int) -> float:
        return 1.0


class OwnAverage(ftopt.LocalSGD):
    def average(self, anchor: Tensor, mean: Tensor, round: object) -> Tensor:
        return mean


@pytest.mark.parametrize(
    "method",
    [
        Doubled(sync_every=1),
        ftopt.DiLoCo(sync_every=1, outer=OwnSGD()),
        ftopt.DiLoCo(sync_every=1, outer=SGD(schedule=OwnRate())),
        ftopt.DiLoCo(sync_every=1, outer=SGD(momentum=0.9, momentum_schedule=OwnRate())),
        OwnAverage(sync_every=1),
        ftopt.DiLoCo(sync_every=1, outer=SGD(lr=1e39)),  # beyond fp32
    ],
)
def test_code_of_the_users_own_is_called(method: Method, loaded: Kernels) -> None:
    anchor = torch.randn(5)
    assert fused.fused(loaded, method, anchor, method.init(anchor), torch.randn(5), ROUND) is None


def test_a_state_of_other_names_is_left_to_the_method(loaded: Kernels) -> None:
    anchor, mean, method = torch.randn(5), torch.randn(5), METHODS["nesterov"]
    assert fused.fused(loaded, method, anchor, {"momentum": anchor.clone(), "more": mean}, mean, ROUND) is None
    assert fused.fused(loaded, method, anchor, {"momentum": torch.randn(6)}, mean, ROUND) is None


def test_a_replica_with_kernels_and_one_without_agree(loaded: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    used, lock = dict[int, bool](), threading.Lock()

    def ready() -> Kernels | None:
        """On every other thread: on one of the training threads, and on one of the reducer threads."""
        name, me = threading.current_thread().name, threading.get_ident()
        with lock:
            used.setdefault(me, name == "one" if name in ("one", "other") else len(used) % 2 == 0)
        return loaded if used[me] else None

    monkeypatch.setattr(OUTER_STEPS, "ready", ready)
    events = list[Event]()
    groups = ftopt.local_groups(2, on_event=events.append)
    models = [nn.Linear(300, 1000) for _ in groups]
    finals = dict[str, str]()

    def train(name: str, model: nn.Module, group: ftopt.ReplicaGroup) -> None:
        inner, chance = torch.optim.SGD(model.parameters(), lr=1e-3), torch.Generator().manual_seed(len(name))
        with ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=2), group=group) as optimizer:
            for _ in range(8):
                model(torch.randn(4, 300, generator=chance)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            finals[name] = optimizer.digest()

    threads = [
        threading.Thread(target=train, args=(name, model, group), name=name)
        for name, model, group in zip(("one", "other"), models, groups, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(finals.values())) == 1 and len(finals) == 2
    assert sorted(used.values()) == [False, False, True, True]
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    assert max(event.version or 0 for event in events) >= 4
    assert not [event for event in events if event.event in ("mismatch", "abort", "damaged")]


def test_small_models_and_other_devices_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OUTER_STEPS, "_thread", None)
    assert OUTER_STEPS.prepare(torch.device("cpu"), 1000, fused.difference) is None
    assert OUTER_STEPS.prepare(torch.device("meta"), 1 << 30, fused.difference) is None


@pytest.fixture
def reload(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Loads the kernels again; returns the lines of the log."""
    monkeypatch.setattr(OUTER_STEPS, "_kernels", None)
    monkeypatch.delitem(sys.modules, "ftopt.kernels.outer_steps", raising=False)
    monkeypatch.delattr("ftopt.kernels.outer_steps", raising=False)
    caplog.set_level(logging.INFO, loader.__name__)

    def load(difference: Callable[[Kernels], str] = fused.difference) -> list[str]:
        OUTER_STEPS._load(difference)
        return [record.getMessage() for record in caplog.records if record.name == loader.__name__]

    return load


def test_more_threads_than_a_kernel_replaces_do_without(loaded: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OUTER_STEPS, "_kernels", loaded)
    for threads, found in ((1, loaded), (4, loaded), (5, None)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert OUTER_STEPS.ready() is found


def test_without_a_place_for_compiled_code_torch_computes(
    reload: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)  # by which numba looks for a folder that it may write to
    [line] = reload()
    assert "cannot be compiled (RuntimeError: cannot cache function" in line and OUTER_STEPS.ready() is None


def test_a_numba_that_cannot_be_imported_leaves_torch_in_use(
    reload: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ftopt.kernels.outer_steps", None)
    [line] = reload()
    assert "cannot be compiled (ModuleNotFoundError" in line and OUTER_STEPS.ready() is None


def test_a_kernel_with_other_bits_is_found(
    loaded: Kernels, reload: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fused.difference(loaded) == ""

    def other(anchor: object, mean: Tensor, *rest: object) -> object:
        found = loaded.adam(anchor, mean, *rest)
        mean.view("int32")[-1] ^= 1  # type: ignore[call-overload, operator]
        return found

    assert fused.difference(loaded._replace(adam=other)) == "Adam"
    [line] = reload(lambda found: "Adam")
    assert "kernel of Adam gives other bits" in line and OUTER_STEPS.ready() is None


@pytest.mark.long
def test_a_process_that_forks_or_ends_waits_for_the_loader() -> None:
    code = (
        "import os, sys, torch\n"
        "from ftopt.step.tensors.fused import OUTER_STEPS, difference\n"
        "thread = OUTER_STEPS.prepare(torch.device('cpu'), 1 << 20, difference)\n"
        "if sys.argv[1:] and not (child := os.fork()):\n"
        "    os._exit(OUTER_STEPS._kernels is None)\n"
        "sys.exit(os.waitpid(child, 0)[1] if sys.argv[1:] else 0)\n"
    )
    for arguments in ([], ["fork"]):
        subprocess.run([sys.executable, "-W", "ignore", "-c", code, *arguments], check=True, timeout=240)
