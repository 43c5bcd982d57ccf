"""What torch puts around an optimizer's step: `torch.compile`, and hooks of all optimizers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import ftopt
from ftopt.methods import DiLoCo, LocalSGD, Method, StreamingDiLoCo, SyncSGD
from tests.optimizer.running import patient_solo
from tests.optimizer.test_loaded_weights import Net, train

METHODS: list[Method] = [
    LocalSGD(sync_every=2),
    DiLoCo(sync_every=2),
    StreamingDiLoCo(sync_every=4, delay=1, wait_for_result_s=60.0, fragments=ftopt.fragments.Strided(n=2)),
    SyncSGD(),
    DiLoCo(sync_every=2, outer=ftopt.outer.Torch(args={"lr": 0.1})),
]


def wrapped(method: Method, **more: Any) -> tuple[ftopt.ReplicaOptimizer, Net]:
    model = Net()
    return ftopt.wrap(torch.optim.AdamW(model.parameters()), model, method, group=patient_solo(), **more), model


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def step_alone(optimizer: ftopt.ReplicaOptimizer, model: Net) -> Callable[[], None]:
    compiled = torch.compile(optimizer.step, backend="eager")

    def run() -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        compiled()

    return run


def whole_step(optimizer: ftopt.ReplicaOptimizer, model: Net) -> Callable[[], None]:
    def run() -> None:
        train(optimizer, model, 1)

    return torch.compile(run, backend="eager")


@pytest.mark.long
@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("compiled", [step_alone, whole_step])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler
def test_a_compiled_step_does_what_the_plain_one_does(
    method: Method, compiled: Callable[[ftopt.ReplicaOptimizer, Net], Callable[[], None]], undo: bool
) -> None:
    optimizer, model = wrapped(method, undo=undo and method.gradients is None)
    plain, other = wrapped(method)
    with optimizer, plain:
        run = compiled(optimizer, model)
        for _ in range(6):
            run()
            train(plain, other, 1)
        assert optimizer.local_steps == plain.local_steps == 6
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_hooks_of_all_optimizers_fire_once_a_step_and_not_in_the_probe(method: Method) -> None:
    calls: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: calls.append(f"pre {type(optimizer).__name__}")),
        register_optimizer_step_post_hook(lambda optimizer, *_: calls.append(f"post {type(optimizer).__name__}")),
    ]
    try:
        optimizer, model = wrapped(method)
        optimizer.register_step_pre_hook(lambda *_: calls.append("own"))
        with optimizer:
            train(optimizer, model, 3)
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["own", "pre AdamW", "post AdamW"] * 3


def test_a_pre_hook_may_replace_the_closure() -> None:
    optimizer, _ = wrapped(LocalSGD(sync_every=2))
    optimizer.register_step_pre_hook(lambda o, args, kwargs: ((args[0], lambda: torch.tensor(7.0)), {}))
    with optimizer:
        assert optimizer.step() == 7
        optimizer.register_step_pre_hook(lambda *_: "no pair")  # type: ignore[arg-type, return-value]
        with pytest.raises(RuntimeError, match="must return"):
            optimizer.step()


def test_importing_ftopt_imports_no_compiler() -> None:
    code = "import sys, ftopt; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
