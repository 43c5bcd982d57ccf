"""Jobs on a CUDA device: the same bits as on the CPU, whatever the streams do, and training that waits for nothing.

What has no mark runs the same code on the CPU, so that it is in order when there is a device.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from ftopt._connect import local_groups, solo
from ftopt.events import ignore
from ftopt.fragments import Strided
from ftopt.methods import DiLoCo, LocalSGD, Method, StreamingDiLoCo, SyncSGD
from ftopt.optimizer import ReplicaOptimizer, wrap
from ftopt.outer import Torch
from ftopt.step.inner_state import device_of
from ftopt.step.outer.fragment import Fragment
from ftopt.step.outer.usual import USUAL, first_usual
from ftopt.step.tensors import pieces
from ftopt.step.tensors.digest import digest
from ftopt.step.tensors.pieces import Measured
from ftopt.sync.group import ReplicaGroup
from ftopt.sync.local import LocalHub, LocalLink
from ftopt.sync.protocol.policy import FaultPolicy
from ftopt.sync.replica.client import Client
from ftopt.sync.replica.loop import LoopThread
from ftopt.sync.replica.session import Session
from ftopt.transport.gloo import GlooTransport
from ftopt.transport.state_transfer import HttpState
from ftopt.undo import undo_step
from tests.checkpoint.test_checkpoints import BIT_EQUAL, run, whole
from tests.optimizer.running import PATIENT, note_digest, together
from tests.problems import MODELS, flat, pulled

STREAMING = StreamingDiLoCo(sync_every=6, fragments=Strided(n=3), delay=4, mix=0.5, wait_for_result_s=30)
CASES: dict[str, dict[str, Any]] = {
    "diloco": {"method": DiLoCo(sync_every=5)},
    "diloco, bf16 parameters": {"method": DiLoCo(sync_every=5), "dtype": torch.bfloat16},
    "diloco, bf16 on the wire": {"method": DiLoCo(sync_every=3), "codec": "bf16", "model": "wide"},
    "streaming, mixed": {"method": STREAMING},
    "streaming, rebased": {"method": replace(STREAMING, mix=None, delay=3), "codec": "bf16"},
    "local_sgd": {"method": LocalSGD(sync_every=4)},
    "sync_sgd": {"method": SyncSGD()},
}
ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
ON_BOTH = pytest.mark.parametrize("device", ["cpu", ON_GPU])


@dataclass(frozen=True)
class Ended:
    """A replica at its end: parameters, on the CPU; the digest of anchor and outer state; and their bits without the
    record of norms, which a GPU adds up in another order."""

    params: Tensor
    digest: str
    bits: list[str]


def groups_over_the_network(count: int, policy: FaultPolicy) -> list[ReplicaGroup]:
    """Groups of one process that send payloads and states as processes do."""
    hub, network = LocalHub("local", ignore), LoopThread()
    return [
        Client(
            Session(
                f"r{number}",
                "local",
                policy,
                link=LocalLink(hub),
                transport=GlooTransport("127.0.0.1", policy.dead_after_s, piece_bytes=1 << 10),
                state=HttpState("127.0.0.1", None),
                network=network,
                on_event=ignore,
            )
        )
        for number in range(count)
    ]


@contextmanager
def busy(device: str, own_stream: bool) -> Iterator[None]:
    """On a GPU the host runs far ahead: what does not wait for what it needs finds it undone."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()) if own_stream else nullcontext():  # type: ignore[no-untyped-call]
        yield


def late(device: str) -> None:
    """Some milliseconds of work before whatever comes."""
    if device != "cpu":
        torch.cuda._sleep(5_000_000)


def train(
    devices: str | Sequence[str],
    method: Method,
    *,
    groups: Sequence[ReplicaGroup] | None = None,
    codec: str = "fp32",
    dtype: torch.dtype = torch.float32,
    model: str = "deep",
    own_stream: bool = False,
    steps: int = 20,
) -> list[Ended]:
    """Two replicas, each with its own pulls, on one device or one each."""
    each = [devices] * 2 if isinstance(devices, str) else devices
    tasks = [pulled(device, model) for device in each]
    found, method = groups or local_groups(2, policy=PATIENT), replace(method, codec=codec)
    models = [task.model(0).to(dtype) for task in tasks]
    all_have_looked = threading.Barrier(2, timeout=60.0)

    def replica(m: int) -> Ended:
        task, device, inner = tasks[m], each[m], tasks[m].inner(models[m].parameters())
        with busy(device, own_stream), wrap(inner, models[m], method, group=found[m]) as o:
            for step in range(steps):
                o.zero_grad()
                task.backward(models[m], m, step)
                late(device)
                o.step()
            assert o.sync(propose=False)
            ended = Ended(flat(models[m]).cpu(), o.digest(), [_bits(f) for f in o._core.started().fragments])
            all_have_looked.wait()  # who leaves sooner hands in its pending steps
            return ended

    return together([lambda m=m: replica(m) for m in range(2)])


def check(got: Sequence[Ended], expected: Sequence[Ended]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours.params, theirs.params)
        assert ours.bits == theirs.bits
    assert got[0].digest == got[1].digest


def _bits(fragment: Fragment) -> str:
    tensors = fragment.state.tensors()
    return digest({name: tensor for name, tensor in tensors.items() if name != f"outer.{USUAL}"})


@pytest.mark.gpu
@pytest.mark.parametrize("own_stream", [False, True], ids=["on the default stream", "on a stream of its own"])
@pytest.mark.parametrize("case", CASES)
def test_a_job_on_a_gpu_has_the_bits_of_one_on_the_cpu(case: str, own_stream: bool) -> None:
    check(train("cuda", **CASES[case], own_stream=own_stream), train("cpu", **CASES[case]))


@ON_BOTH
@pytest.mark.parametrize("case", ["diloco", "diloco, bf16 on the wire", "streaming, rebased", "sync_sgd"])
def test_over_the_network_it_has_the_same_bits(device: str, case: str) -> None:
    policy = replace(PATIENT, start_replicas=2)
    check(train(device, **CASES[case], groups=groups_over_the_network(2, policy)), train("cpu", **CASES[case]))


@pytest.mark.parametrize("device", [ON_GPU])  # of two on the CPU the test before tells
@pytest.mark.parametrize("case", ["diloco", "diloco, bf16 on the wire", "streaming, rebased"])
def test_a_replica_on_the_cpu_and_one_elsewhere_agree(device: str, case: str) -> None:
    policy = replace(PATIENT, start_replicas=2)
    groups = groups_over_the_network(2, policy)
    check(train(("cpu", device), **CASES[case], groups=groups), train("cpu", **CASES[case]))


@pytest.mark.gpu
def test_payloads_of_several_pieces_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_ELSEWHERE", 1 << 14)
    monkeypatch.setitem(MODELS, "large", _large)
    for codec in ("fp32", "bf16"):
        case: dict[str, Any] = {"method": DiLoCo(sync_every=2), "codec": codec, "model": "large", "steps": 7}
        check(train("cuda", **case), train("cpu", **case))


def _large(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(300, 201)


@pytest.mark.long
@ON_BOTH
@pytest.mark.parametrize(
    ("method", "inner"),
    [
        (DiLoCo(sync_every=5), lambda p: SGD(p, lr=0.05, momentum=0.9)),
        (DiLoCo(sync_every=5, outer=Torch(cls="torch.optim.Adam", args={"lr": 0.1})), lambda p: AdamW(p, lr=1e-3)),
        (SyncSGD(), lambda p: AdamW(p, lr=1e-3)),
        (SyncSGD(), lambda p: AdamW(p, lr=1e-3, fused=True)),
    ],
    ids=["diloco", "diloco, outer Adam", "sync_sgd", "sync_sgd, fused"],
)
def test_a_newcomer_fetches_the_state_and_goes_on_alike(device: str, method: Method, inner: Any) -> None:
    groups = groups_over_the_network(2, FaultPolicy(grace_s=60.0, dead_after_s=60.0, start_replicas=1))
    task = pulled(device, inner=inner)
    models = [task.model(seed) for seed in range(2)]
    running, joined = threading.Event(), threading.Event()
    digests: tuple[dict[int, str], dict[int, str]] = ({}, {})
    all_have_looked = threading.Barrier(2, timeout=60.0)

    def steps(m: int, optimizer: ReplicaOptimizer, numbers: range) -> None:
        for step in numbers:
            optimizer.zero_grad()
            task.backward(models[m], m, step)
            late(device)
            optimizer.step()
            note_digest(digests[m], optimizer)

    def first() -> None:
        with busy(device, False), wrap(inner(models[0].parameters()), models[0], method, group=groups[0]) as optimizer:
            steps(0, optimizer, range(10))
            running.set()
            with optimizer._core.started().at_rest():  # else the other one fetches at the next step
                assert joined.wait(60)
            steps(0, optimizer, range(10, 30))
            all_have_looked.wait()

    def second() -> None:
        assert running.wait(60)
        with busy(device, False), wrap(inner(models[1].parameters()), models[1], method, group=groups[1]) as optimizer:
            assert optimizer.start_step == 10
            joined.set()
            steps(1, optimizer, range(20))
            all_have_looked.wait()

    together([first, second])
    common = digests[0].keys() & digests[1].keys()
    assert len(common) >= 3
    assert all(digests[0][version] == digests[1][version] for version in common)


RESUMED = ["diloco", "streaming with delay, mixed", "sync_sgd", "diloco, error feedback"]


@pytest.mark.parametrize(
    ("device", "case"),
    [
        ("cpu", "streaming with delay, mixed"),  # each case: tests/checkpoint
        *(pytest.param("cuda", case, marks=pytest.mark.gpu) for case in RESUMED),
    ],
)
def test_a_resume_goes_on_bit_for_bit(tmp_path: Path, device: str, case: str) -> None:
    settings = BIT_EQUAL[case]() | {"task": pulled(device, inner=_adamw)}
    uninterrupted = run(tmp_path / "a", **settings)
    there = whole(tmp_path / "a")
    resumed = run(tmp_path / "b", **settings, resume=there[len(there) // 2 - 1])
    for a, b in zip(uninterrupted, resumed, strict=True):
        assert torch.equal(a.params, b.params)
        assert (a.digest, a.chain, a.rate) == (b.digest, b.chain, b.rate)


def _adamw(parameters: Iterator[nn.Parameter]) -> AdamW:
    return AdamW(parameters, lr=1e-3, fused=True)


@pytest.mark.gpu
@pytest.mark.parametrize("inner", [{}, {"fused": True}], ids=["foreach", "fused"])
@pytest.mark.parametrize(
    "method",
    [DiLoCo(sync_every=20), LocalSGD(sync_every=20), StreamingDiLoCo(sync_every=20, fragments=Strided(n=2), delay=2)],
    ids=lambda method: method.name,
)
def test_between_two_outer_steps_no_step_waits_for_the_gpu(method: Method, inner: dict[str, Any]) -> None:
    model = pulled("cuda").model(0)
    with wrap(AdamW(model.parameters(), lr=1e-3, **inner), model, method, group=solo()) as optimizer:
        for step in range(8):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            with nullcontext() if step < 3 else _no_waiting():
                optimizer.log(tokens=1, loss=torch.ones((), device="cuda"))
                optimizer.step()
        optimizer.close(flush=False)


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Operations that wait for the device raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_round_with_delay_is_decided_while_the_gpu_is_busy_training() -> None:
    task = pulled("cuda")
    model, (group,) = task.model(0), local_groups(1, policy=PATIENT)
    method = StreamingDiLoCo(sync_every=4, fragments=Strided(n=1), delay=3, wait_for_result_s=30)
    with wrap(task.inner(model.parameters()), model, method, group=group) as optimizer:
        outer = optimizer._core.started()
        for step in range(12):  # two rounds before: memory and kernels are there
            optimizer.zero_grad()
            task.backward(model, 0, step)
            optimizer.step()
        assert group.outstanding(0) or outer.fragments[0].state is not outer.fragments[0].applied, "the third round"
        torch.cuda._sleep(6_000_000_000)  # seconds
        trained = torch.cuda.current_stream().record_event()
        deadline = time.monotonic() + 20
        while outer.fragments[0].state is outer.fragments[0].applied and time.monotonic() < deadline:
            time.sleep(0.001)
        assert outer.fragments[0].state is not outer.fragments[0].applied
        assert not trained.query(), "it has waited for training"


@ON_BOTH
@pytest.mark.parametrize("inner", [{}, {"fused": True}], ids=["foreach", "fused"])
def test_a_step_that_a_scaler_skips_is_no_inner_step(device: str, inner: dict[str, Any]) -> None:
    task, scaler = pulled(device), torch.amp.GradScaler(device, init_scale=4.0)
    model = task.model(0)
    made = AdamW(model.parameters(), lr=1e-3, **inner)
    with wrap(made, model, DiLoCo(sync_every=2), group=solo()) as optimizer:
        for step in range(5):
            optimizer.zero_grad()
            x, y = (tensor.to(device) for tensor in task.batch(0, step))
            with torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16):
                loss = (model(x) - y).square().mean()
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if step == 2:
                next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()
        assert (optimizer.local_steps, optimizer.status.versions, scaler.get_scale()) == (4, (2,), 2.0)
        assert flat(model).isfinite().all()


@ON_BOTH
@pytest.mark.parametrize("inner", [{}, {"fused": True}], ids=["foreach", "fused"])
def test_a_step_is_undone(device: str, inner: dict[str, Any]) -> None:
    task = pulled(device)
    model = task.model(0)
    made = AdamW(model.parameters(), lr=1e-3, **inner)
    with wrap(made, model, DiLoCo(sync_every=9), group=solo(), undo=True) as optimizer:
        for step in range(3):
            before = flat(model).clone()
            optimizer.zero_grad()
            task.backward(model, 0, step)
            optimizer.step()
        assert not torch.equal(flat(model), before)
        assert undo_step(optimizer).whole
        assert optimizer.local_steps == 2
        torch.testing.assert_close(flat(model), before, rtol=0, atol=1e-7)


def test_step_counters_are_put_where_torch_keeps_them() -> None:
    parameter, count = torch.empty(2, device="meta"), torch.zeros(())
    assert device_of("step", count, parameter, {"fused": None, "capturable": False}).type == "cpu"
    assert device_of("step", count, parameter, {"fused": True}).type == "meta"
    assert device_of("step", count, parameter, {"capturable": True}).type == "meta"
    assert device_of("exp_avg", torch.zeros(2), parameter, {}).type == "meta"


@pytest.mark.gpu
def test_the_record_begins_as_on_the_cpu() -> None:
    for numel in (1, 999, 100_003, 5_000_000):
        anchor = torch.randn(numel)
        assert torch.equal(first_usual(anchor)[USUAL], first_usual(anchor.cuda())[USUAL])


@pytest.mark.gpu
def test_norms_are_looked_at_once_and_say_what_is_not_finite() -> None:
    measured = Measured()
    with _no_waiting():
        for scale in (1.0, 1e30):
            measured.see(torch.full((3, 5), scale, device="cuda"))
    assert measured.finite
    assert measured.norm == pytest.approx(15**0.5 * 1e30)
    measured.see(torch.tensor([1.0, float("nan")], device="cuda"))
    assert not measured.finite
