"""A loop over `ReplicaOptimizer.steps`, and what else makes a script short."""

from __future__ import annotations

import logging
import os
import random
import socket
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import ftopt
from ftopt._connect import _id_of, local_groups
from ftopt.common.launched import END, read_end
from ftopt.errors import UserError
from ftopt.methods import Method
from ftopt.optimizer.ending.last_round import last_round
from ftopt.sync.group import ReplicaGroup
from tests.optimizer.running import PATIENT, together
from tests.problems import seeded


def wrapped(group: ReplicaGroup | None = None, method: Method | None = None) -> ftopt.ReplicaOptimizer:
    with seeded(0):
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    method = method or ftopt.DiLoCo(sync_every=4)
    return ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, method, group=group)


def model_of(optimizer: ftopt.ReplicaOptimizer) -> nn.Module:
    assert optimizer._core.model is not None
    return optimizer._core.model


def backward(optimizer: ftopt.ReplicaOptimizer) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model_of(optimizer)(torch.randn(2, 4)).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize(
    "method",
    [
        ftopt.DiLoCo(sync_every=4),
        ftopt.PAFT(sync_every=4),
        ftopt.SyncSGD(),
        ftopt.StreamingDiLoCo(sync_every=4, fragments=ftopt.fragments.Strided(n=2), delay=1),
    ],
    ids=lambda method: method.name,
)
def test_all_replicas_end_with_the_planned_steps_and_the_same_parameters(method: Method) -> None:
    optimizers = [wrapped(group, method) for group in ftopt.local_groups(2, policy=PATIENT)]
    seen: dict[int, list[int]] = {0: [], 1: []}

    def train(number: int) -> None:
        with (optimizer := optimizers[number]):
            for step in optimizer.steps(10):
                seen[number].append(step)
                optimizer.step(loss=backward(optimizer))

    together([lambda: train(0), lambda: train(1)])
    assert seen[0][0] == seen[1][0] == 0
    assert all(steps == sorted(set(steps)) and steps[-1] < 10 for steps in seen.values())
    assert optimizers[0].status.versions == optimizers[1].status.versions
    assert all(optimizer.status.committed_step >= 10 for optimizer in optimizers)
    pairs = zip(*(model_of(optimizer).parameters() for optimizer in optimizers), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    with optimizers[0].global_parameters():
        committed = [parameter.clone() for parameter in model_of(optimizers[0]).parameters()]
    assert all(map(torch.equal, committed, model_of(optimizers[0]).parameters()))


def test_steps_that_are_left_when_a_call_in_has_brought_the_job_to_its_end_are_not_offered() -> None:
    """As of a late joiner: it was called in for the last version, and has trained on until that was made."""

    class CalledIn:
        status, pending_steps = SimpleNamespace(started=True, versions=(2,), committed_step=32), 8
        proposed = 0

        def sync(self, *, propose: bool = True) -> bool:
            self.proposed += propose
            self.status, self.pending_steps = SimpleNamespace(started=True, versions=(3,), committed_step=40), 3
            return True

    optimizer = CalledIn()
    assert not last_round(optimizer, 40) and not optimizer.proposed
    assert last_round(CalledIn(), 41), "others still train"


def test_the_loop_joins_the_job_and_leaves_it_by_itself() -> None:
    optimizer = wrapped(ftopt.solo())
    taken = 0
    for _ in optimizer.steps(6):
        backward(optimizer)
        optimizer.step()
        taken += 1
    assert taken == 6
    with pytest.raises(RuntimeError):
        optimizer.step()


def test_a_stopped_job_ends_the_loop_and_a_break_leaves_it_to_the_with() -> None:
    optimizer = wrapped(ftopt.solo())
    taken = 0
    with optimizer:
        for step in optimizer.steps(1_000):
            backward(optimizer)
            optimizer.step()
            taken += 1
            if step == 4:
                optimizer.stop("it is good enough")
    assert taken == 5
    optimizer = wrapped(ftopt.solo())
    with optimizer:
        for _ in optimizer.steps(1_000):
            backward(optimizer)
            optimizer.step()
            break
        backward(optimizer)
        optimizer.step()
    assert optimizer.status.committed_step == 2


def test_the_number_of_steps_is_checked_where_it_is_given() -> None:
    with pytest.raises(UserError, match=r"planned=0; must be a whole number of inner steps, at least 1"):
        wrapped(ftopt.solo()).steps(0)


def test_a_loss_given_to_step_is_counted_and_a_bad_one_takes_no_step() -> None:
    optimizer = wrapped(ftopt.solo())
    with optimizer:
        loss = backward(optimizer)
        with pytest.raises(UserError, match="loss"):
            optimizer.step(loss=torch.zeros(2))
        assert optimizer.local_steps == 0
        optimizer.step(loss=loss, tokens=7)
        assert optimizer.local_steps == 1


def test_a_seed_is_the_same_at_each_start_and_another_one_for_each_replica() -> None:
    one, other = (wrapped(group) for group in ftopt.local_groups(2))
    assert (one.replica, other.replica) == ("r0", "r1")
    assert one.seed == wrapped(ftopt.solo()).seed == 2_047_424_807
    assert 0 <= other.seed < 2**32
    assert one.seed != other.seed


def test_without_a_group_a_process_trains_alone_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("FTOPT_COORDINATOR", raising=False)
    with caplog.at_level(logging.WARNING), wrapped() as optimizer:
        backward(optimizer)
        optimizer.step()
    assert caplog.text.count("this process trains alone; `ftopt launch -n 4 SCRIPT` starts 4 replicas") == 1


def test_without_a_group_a_launched_process_takes_the_job_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTOPT_COORDINATOR", "http://127.0.0.1:9")
    monkeypatch.setenv("FTOPT_REPLICA", "host-3")
    assert wrapped().replica == "host-3"


@pytest.mark.parametrize(
    ("environment", "replica"),
    [
        ({"SLURM_ARRAY_TASK_ID": "3"}, "r3"),
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, "r3-1"),
        ({"JOB_COMPLETION_INDEX": "0"}, "r0"),
    ],
)
def test_a_scheduler_s_number_makes_an_id_that_survives_a_restart(environment: dict[str, str], replica: str) -> None:
    assert _id_of(environment) == replica
    assert _id_of({}) == f"{socket.gethostname()}-{os.getpid()}"


def test_the_loader_is_of_the_same_job() -> None:
    optimizer = wrapped(ftopt.solo())
    loader = optimizer.loader(torch.utils.data.TensorDataset(torch.randn(12, 4)), 4, epochs=2, seed=3)
    batches = 0
    with optimizer:
        for (inputs,) in loader:
            optimizer.zero_grad()
            model_of(optimizer)(inputs).square().mean().backward()
            optimizer.step()
            batches += 1
    assert batches == 6


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_the_outer_parameters_are_exported_and_a_file_is_replaced(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    optimizer = wrapped(ftopt.solo())
    with optimizer:
        backward(optimizer)
        optimizer.step()
        optimizer.export(path)  # the global parameters are those of the start: nothing is committed yet
        first = path.read_bytes()
        for _ in optimizer.steps(5):
            backward(optimizer)
            optimizer.step()
    optimizer.export(str(path))
    assert path.read_bytes() != first
    read = safetensors.torch.load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    expected = model_of(optimizer).state_dict()
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[key], expected[key]) for key in expected)
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_an_export_has_the_names_from_before_compilation(tmp_path: Path) -> None:
    model = torch.compile(nn.Sequential(nn.Linear(2, 1)), backend="eager")
    optimizer = ftopt.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1), model, ftopt.LocalSGD(sync_every=2), group=ftopt.solo()
    )
    with optimizer:
        optimizer.export(tmp_path / "model.pt")
    assert list(torch.load(tmp_path / "model.pt")) == ["0.weight", "0.bias"]


def test_an_export_that_cannot_be_made_is_one_message(tmp_path: Path) -> None:
    optimizer = wrapped(ftopt.solo())
    with pytest.raises(RuntimeError, match="not started"):
        optimizer.export(tmp_path / "model.pt")
    with optimizer:
        with pytest.raises(UserError, match=r"the ending says the format"):
            optimizer.export(tmp_path / "model.bin")
        with pytest.raises(UserError, match=r"cannot be written"):
            optimizer.export(tmp_path / "nowhere" / "model.pt")


class Odd(nn.Module):
    """A model with tensors that cannot be written in place, and with a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)
        self.register_buffer("mask", torch.ones(1, 3).expand(5, 3))
        self.frozen = nn.Parameter(torch.ones(1, 3).expand(5, 3), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.inference_mode():
            self.register_buffer("cache", torch.ones(2))
        found: Tensor = self.inner(inputs)
        return found

    def get_extra_state(self) -> dict[str, int]:
        return {"kind": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def test_tensors_that_nobody_trains_are_left_alone_at_the_end(tmp_path: Path) -> None:
    model = Odd()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = ftopt.wrap(torch.optim.SGD(trained, lr=0.1), model, ftopt.LocalSGD(sync_every=2), group=ftopt.solo())
    before = model.inner.weight.clone()
    for _ in optimizer.steps(3):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
    assert not torch.equal(before, model.inner.weight)
    with pytest.raises(UserError, match=r"_extra_state is a dict, which a .safetensors file cannot hold"):
        optimizer.export(tmp_path / "model.safetensors")
    optimizer.export(tmp_path / "model.pt")


def test_a_loop_of_a_replica_that_has_left_raises_and_one_at_its_end_takes_no_step() -> None:
    optimizer = wrapped(ftopt.solo())
    with pytest.raises(RuntimeError, match=r"steps\(10\) after close\(\): this replica has left .* inner step 5"):
        for _ in optimizer.steps(10):
            for _ in optimizer.steps(5):
                backward(optimizer)
                optimizer.step()
    assert list(optimizer.steps(5)) == []


def test_the_anchor_is_exported_while_it_is_in_the_model(tmp_path: Path) -> None:
    optimizer = wrapped(ftopt.solo())
    with optimizer:
        backward(optimizer)
        optimizer.step()
        with optimizer.global_parameters():
            expected = {name: tensor.clone() for name, tensor in model_of(optimizer).state_dict().items()}
            optimizer.export(tmp_path / "model.pt")
        assert optimizer.pending_steps == 1
    read = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(torch.equal(read[name], expected[name]) for name in expected)


def test_replicas_that_fetch_what_they_have_missed_do_not_say_that_they_cannot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Loops without pauses: a replica is late for many rounds of single fragments."""
    events: list[str] = []
    groups = local_groups(3, on_event=lambda event: events.append(event.event))

    def train(group: ReplicaGroup) -> int:
        optimizer = wrapped(group, ftopt.DecoupledDiLoCo(sync_every=20))
        for _ in optimizer.steps(100):
            backward(optimizer)
            optimizer.step()
        return optimizer.inner_step

    ends = together([lambda group=group: train(group) for group in groups])  # type: ignore[misc]
    assert len(set(ends)) == 1 and ends[0] >= 100
    assert "fetch_failed" in events or "no version" not in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_replicas_that_are_beyond_the_end_wait_for_the_others_version(seed: int) -> None:
    """With a delay a replica has steps beyond the last version, and another one may still make one more."""
    chance, policy = random.Random(seed), replace(PATIENT, grace_s=0.02, dead_after_s=30.0)
    method = ftopt.StreamingDiLoCo(sync_every=4, fragments=ftopt.fragments.Strided(n=1), delay=1 + 2 * (seed % 2))
    optimizers = [wrapped(group, method) for group in ftopt.local_groups(3, policy=policy)]
    pauses = [chance.choice((0.0, 0.002, 0.01)) for _ in optimizers]

    def train(number: int) -> None:
        with (optimizer := optimizers[number]):
            for _ in optimizer.steps(20):
                backward(optimizer)
                optimizer.step()
                time.sleep(pauses[number])

    together([lambda number=number: train(number) for number in range(3)])  # type: ignore[misc]
    assert len({optimizer.status.versions for optimizer in optimizers}) == 1
    digests = [torch.cat([p.flatten() for p in model_of(optimizer).parameters()]) for optimizer in optimizers]
    assert all(torch.equal(digests[0], each) for each in digests)


def test_a_loop_that_takes_no_step_warns_and_then_ends_with_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(UserError, match=r"steps\(10\): 100,000 passes in a row have not called step\(\)"):
        for _ in wrapped(ftopt.solo()).steps(10):
            pass
    assert caplog.text.count("steps(10): 10,000 passes in a row have not called step() of the wrapped optimizer") == 1


def test_a_loop_that_accumulates_hears_nothing(caplog: pytest.LogCaptureFixture) -> None:
    optimizer, passes = wrapped(ftopt.solo()), 0
    for _ in optimizer.steps(12):
        passes += 1
        if passes % 2_000 == 0:
            backward(optimizer)
            optimizer.step()
    assert passes == 24_000 and "passes in a row" not in caplog.text


def test_a_loop_that_waits_for_long_is_warned_and_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, passes, now_s = wrapped(ftopt.solo()), 0, time.monotonic()
    with optimizer:
        monkeypatch.setattr("ftopt.optimizer.wrapper.time", SimpleNamespace(monotonic=lambda: now_s + passes * 0.1))
        for _ in optimizer.steps(1):
            passes += 1
            if passes > 100_000:
                backward(optimizer)
                optimizer.step()
    assert optimizer.inner_step == 1 and "steps(1): 100,000 passes in a row" in caplog.text


@pytest.mark.parametrize("gradient", [None, 0.0], ids=str)
def test_a_step_at_rate_zero_that_changes_nothing_is_counted(gradient: float | None) -> None:
    optimizer = wrapped(ftopt.solo())
    optimizer.param_groups[0]["lr"] = 0.0
    passes = 0
    for _ in optimizer.steps(4):
        passes += 1
        for parameter in model_of(optimizer).parameters():
            parameter.grad = None if gradient is None else torch.full_like(parameter, gradient)
        optimizer.step()
    assert (passes, optimizer.inner_step, optimizer.local_steps) == (4, 4, 4)


def test_a_launched_replica_has_left_early_unless_a_later_job_of_the_script_ends_in_good_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(END, str(tmp_path / "r0.end"))
    with wrapped(ftopt.solo()) as first:
        first.close(early=True)
    end = {"early": True, "steps": 0, "pending": 0, "version": 0, "inner_step": 0}
    assert read_end(tmp_path / "r0.end") == end
    with wrapped(ftopt.solo()) as second:
        backward(second)
        second.step()
    assert read_end(tmp_path / "r0.end") == end | {"early": False, "steps": 1, "version": 1, "inner_step": 1}
