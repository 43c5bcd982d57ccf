"""Averaged buffers that user code replaces, resizes or removes while the job trains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import ftopt
from ftopt.errors import UserError
from ftopt.methods import Method
from tests.optimizer.running import PATIENT, together

Change = Callable[[nn.Module, int], None]


def becomes(made: Callable[[int], object], since: int = 3) -> Change:
    def change(module: nn.Module, step: int) -> None:
        if step >= since:
            module.b = made(step)  # type: ignore[assignment]

    return change


def deleted(module: nn.Module, step: int) -> None:
    if step == 3:
        del module.b


def resized(module: nn.Module, step: int) -> None:
    if step == 3:
        module.b.resize_(7)  # type: ignore[operator]


def in_inference(module: nn.Module, step: int) -> None:
    with torch.inference_mode():
        module.b = torch.full((3,), float(step))


def late(module: nn.Module, step: int) -> None:
    if step == 3:
        module.register_buffer("late", torch.ones(2))


CHANGES: dict[str, tuple[Callable[[], Tensor], Change]] = {
    "grows": (lambda: torch.zeros(3), becomes(lambda step: torch.zeros(3 + step), 0)),
    "None": (lambda: torch.zeros(3), becomes(lambda step: None)),
    "deleted": (lambda: torch.zeros(3), deleted),
    "resized": (lambda: torch.zeros(3), resized),
    "another dtype": (lambda: torch.zeros(3), becomes(lambda step: torch.zeros(3, dtype=torch.float64))),
    "sparse": (lambda: torch.zeros(3), becomes(lambda step: torch.zeros(3).to_sparse())),
}
FITS: dict[str, tuple[Callable[[], Tensor], Change]] = {
    "expanded": (lambda: torch.ones(1, 1).expand(8, 8), lambda module, step: None),
    "expanded anew": (lambda: torch.ones(4), becomes(lambda step: torch.ones(1).expand(4), 0)),
    "overlapping": (lambda: torch.ones(6).unfold(0, 3, 1), lambda module, step: None),
    "replaced": (lambda: torch.zeros(3), becomes(lambda step: torch.full((3,), float(step)), 0)),
    "inference": (lambda: torch.zeros(3), in_inference),
    "late": (lambda: torch.zeros(3), late),
    "scalar": (lambda: torch.tensor(0.0), becomes(lambda step: torch.tensor(float(step)), 0)),
    "empty": (lambda: torch.zeros(0), lambda module, step: None),
    "transposed": (lambda: torch.zeros(2, 3).t(), lambda module, step: None),
}


def small() -> nn.Linear:
    """Weights that all replicas share, so that none of them is still fetching while another steps."""
    model = nn.Linear(4, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.1)
    return model


def run(method: Method, first: Callable[[], Tensor], changes: list[Change]) -> list[str]:
    groups = ftopt.local_groups(len(changes), policy=PATIENT)

    def replica(m: int) -> str:
        model = small()
        model.register_buffer("b", first())
        optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, method, group=groups[m])
        with optimizer:
            for step in range(8):
                changes[m](model, step)
                optimizer.zero_grad()
                model(torch.ones(2, 4) * (m + 1)).square().mean().backward()
                optimizer.step()
            optimizer.sync()
            assert optimizer.inner_step >= 8 and optimizer.status.versions[-1] >= 4
            with optimizer.global_parameters():
                return optimizer.digest()

    return together([partial(replica, m) for m in range(len(changes))])


METHODS = {
    "local": ftopt.LocalSGD(sync_every=2, buffers="mean"), "paft": ftopt.PAFT(sync_every=2, buffers="mean"),
    "streaming": ftopt.StreamingDiLoCo(
        sync_every=2, delay=1, fragments=ftopt.fragments.Balanced(n=1), buffers="mean", wait_for_result_s=60.0
    ),
}  # fmt: skip


def cases(kinds: Iterable[str], of_all: Sequence[str]) -> pytest.MarkDecorator:
    """All kinds with one method, some with all: views of buffers are made alike, and kept for different times."""
    found = [(kind, method) for kind in kinds for method in METHODS if method == "local" or kind in of_all]
    return pytest.mark.parametrize(("kind", "method"), found)


@cases(CHANGES, ["grows", "deleted"])
def test_a_buffer_that_fits_no_more_is_left_alone_and_said_once(
    kind: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, change = CHANGES[kind]
    with caplog.at_level(logging.WARNING):
        one, other = run(METHODS[method], first, [change, change])
    assert one == other
    said = [record.message for record in caplog.records if "buffer b was (3,) torch.float32" in record.message]
    assert said and "keep its shape and dtype" in said[0]
    assert len(said) <= 4, "each view of it says so once"


@pytest.mark.parametrize("kind", CHANGES)
def test_one_replica_alone_may_lose_its_buffer(kind: str) -> None:
    first, change = CHANGES[kind]
    one, other = run(METHODS["local"], first, [change, lambda module, step: None])
    assert one == other


@cases(FITS, ["expanded", "replaced", "late"])
def test_a_buffer_that_is_replaced_or_shares_memory_is_averaged(
    kind: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, change = FITS[kind]
    with caplog.at_level(logging.WARNING):
        one, other = run(METHODS[method], first, [change, change])
    assert one == other
    assert not [record for record in caplog.records if "buffer b" in record.message]


def test_values_of_replaced_buffers_are_averaged() -> None:
    groups = ftopt.local_groups(2, policy=PATIENT)

    def replica(m: int) -> list[float]:
        model = small()
        model.register_buffer("b", torch.zeros(1).expand(3))
        method = ftopt.LocalSGD(sync_every=1, buffers="mean")
        optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, method, group=groups[m])
        with optimizer:
            model.b = torch.tensor([1.0 + 2 * m]).expand(3)
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.sync()
            found: list[float] = model.b.tolist()
            return found

    assert together([partial(replica, m) for m in range(2)]) == [[2.0] * 3] * 2


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.ones(3).to(torch.float8_e4m3fn)])
def test_a_buffer_that_cannot_be_averaged_is_refused_at_the_start(tensor: Tensor) -> None:
    model = nn.Linear(4, 2)
    model.register_buffer("b", tensor)
    method = ftopt.LocalSGD(sync_every=1, buffers="mean")
    with (
        pytest.raises(UserError, match=r"buffer b is .* use buffers=local"),
        ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, method, group=ftopt.solo()),
    ):
        pass
