from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from ftopt.methods import SGD

SETTINGS = [
    SGD(lr=0.7, momentum=0.9, nesterov=True),
    SGD(lr=0.4, momentum=0.5),
    SGD(lr=1.0),
]

# torch.randn itself depends on the CPU's capability; integers do not.
_PROGRAM = """
import hashlib, torch
from ftopt.methods import SGD
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(7)
def numbers():
    return torch.randint(-(2**20), 2**20, (10_007,), generator=generator).float() / 1_000_003
anchor = numbers()
rule = SGD(lr=0.7, momentum=0.9, nesterov=True)
state = rule.init(anchor)
for _ in range(20):
    anchor, state = rule.step(anchor, state, numbers() / 997, version=1)
print(torch.backends.cpu.get_cpu_capability(), hashlib.sha256(anchor.numpy().tobytes()).hexdigest())
"""


@pytest.mark.parametrize("rule", SETTINGS)
def test_sgd_equals_torchs(rule: SGD) -> None:
    theirs = torch.randn(501)
    ours, state = theirs.clone(), rule.init(theirs)
    reference = torch.optim.SGD([theirs], lr=rule.lr, momentum=rule.momentum, nesterov=rule.nesterov)
    for _ in range(20):
        theirs.grad = torch.randn(501)
        ours, state = rule.step(ours, state, theirs.grad.clone(), version=1)
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", SETTINGS)
def test_a_step_leaves_its_arguments_alone_and_shares_no_memory_with_them(rule: SGD) -> None:
    anchor, gradient = torch.randn(64), torch.randn(64)
    _, state = rule.step(anchor, rule.init(anchor), gradient, version=1)
    kept = [t.clone() for t in (anchor, gradient, *state.values())]
    new_anchor, new_state = rule.step(anchor, state, gradient, version=1)
    new_anchor.zero_()
    for tensor in new_state.values():
        tensor.zero_()
    assert all(torch.equal(a, b) for a, b in zip(kept, (anchor, gradient, *state.values()), strict=True))


def test_unlike_cpus_compute_the_same_bits() -> None:
    lines = []
    for capability in ("default", "avx2"):
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
        run = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        lines.append(run.stdout.split())
    if len({line[0] for line in lines}) == 1:
        pytest.skip(f"this machine has one CPU capability only: {lines[0][0]}")
    assert len({line[-1] for line in lines}) == 1, lines


def test_nesterov_by_hand() -> None:
    rule = SGD(lr=0.5, momentum=0.5, nesterov=True)
    anchor, state = rule.step(torch.tensor([1.0]), rule.init(torch.zeros(1)), torch.tensor([1.0]), version=1)
    assert (anchor.item(), state["momentum"].item()) == (0.25, 1.0)  # u = 1, d = 1 + 0.5 = 1.5
    anchor, state = rule.step(anchor, state, torch.tensor([2.0]), version=2)
    assert (anchor.item(), state["momentum"].item()) == (-1.375, 2.5)  # u = 0.5 + 2, d = 2 + 1.25 = 3.25


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": 0.0}, "outer.lr=0.0"),
        ({"lr": float("nan")}, "outer.lr=nan"),
        ({"momentum": 1.0}, "outer.momentum=1.0"),
        ({"nesterov": True}, "has no effect"),
    ],
)
def test_wrong_settings_are_refused_with_what_to_use(settings: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SGD(**settings)  # type: ignore[arg-type]
