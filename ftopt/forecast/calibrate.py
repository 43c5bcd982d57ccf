"""The measurements of `ftopt plan --calibrate` on this machine: a step, an outer step, memory, and the loopback link.

The outer step is a real one: two replicas in this process, through the protocol and in memory, with a small and a
larger model. The time per element is the arithmetic's; the rest is the round's.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

import ftopt
from ftopt.codecs.named import CODECS
from ftopt.config.optimizers import inner_optimizers
from ftopt.config.schema import Recipe
from ftopt.config.tasks import task_of
from ftopt.errors import FtoptError
from ftopt.run.devices import compile_model, device_of

_STEPS, _WARM = 8, 3
_SMALL, _LARGE = 16_000, 1_600_000
_TENSORS = 16
_ROUNDS, _TURNS = 8, 3
_COPIED = 1 << 26
_SENT, _PINGS = 1 << 28, 50


@dataclass(frozen=True)
class Measured:
    """The measurements of a machine.

    Args:
        step_s: median of an inner step of the recipe.
        round_s, element_s, codec_s: an outer step without the network; see `ftopt.forecast.plan.Machines`.
        memory_gb_s: 10^9 bytes per second that a copy reads and writes.
        loopback_gbit_s, loopback_latency_s: of one TCP connection within this machine; no network is faster.
    """

    step_s: float
    round_s: float
    element_s: float
    codec_s: Mapping[str, float]
    memory_gb_s: float
    loopback_gbit_s: float
    loopback_latency_s: float


def calibrate(recipe: Recipe) -> Measured:
    """Measures for some seconds; the rest of the machine should be idle. UserError: the recipe's model or data are not
    available."""
    threads = torch.get_num_threads()
    torch.set_num_threads(recipe.train.threads)
    try:
        step_s = step_seconds(recipe)
        round_s, element_s, codec_s = outer_step_seconds()
        memory_gb_s = _memory_gb_s()
    finally:
        torch.set_num_threads(threads)
    gbit_s, latency_s = _loopback()
    return Measured(step_s, round_s, element_s, codec_s, memory_gb_s, gbit_s, latency_s)


def step_seconds(recipe: Recipe) -> float:
    """Seconds of an inner step of one replica: its micro-batches and the inner optimizer."""
    torch.manual_seed(recipe.train.seed)
    task = task_of(recipe)
    device = device_of(recipe.train.device, "r0")
    task.to(device)
    if recipe.train.compile:
        compile_model(task)
    optimizers = inner_optimizers(recipe.inner_sections(), task.model)
    draws = task.batches(recipe.train.seed)
    parts = recipe.train.accumulate
    if (whole := recipe.data.global_batch) is not None:
        parts = max(1, round(whole / recipe.data.batch_size / recipe.replicas))
    task.model.train()

    def step() -> None:
        for _ in range(parts):
            (task.loss(draws.batch()) / parts).backward()  # type: ignore[no-untyped-call]
        if recipe.train.clip_norm is not None:
            nn.utils.clip_grad_norm_(task.model.parameters(), recipe.train.clip_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return _median_s(step, _STEPS, warm=_WARM)


def outer_step_seconds() -> tuple[float, float, dict[str, float]]:
    """Measures two replicas that send nothing over a network: seconds of an outer step, seconds per element in fp32,
    and additional seconds per element with each codec. FtoptError: one of the replicas has failed."""
    pairs = [(_outer_step_s(_SMALL, "fp32"), _outer_step_s(_LARGE, "fp32")) for _ in range(_TURNS)]
    small_s, large_s = (statistics.median(each) for each in zip(*pairs, strict=True))
    element_s = max(0.0, large_s - small_s) / (_LARGE - _SMALL)
    codec_s = {codec: max(0.0, _outer_step_s(_LARGE, codec) - large_s) / _LARGE for codec in CODECS if codec != "fp32"}
    return max(0.0, small_s - _SMALL * element_s), element_s, codec_s


def _outer_step_s(elements: int, codec: str) -> float:
    found: list[list[float]] = [[], []]
    errors: list[Exception] = []

    def train(place: int, group: ftopt.ReplicaGroup) -> None:
        model = nn.ParameterList([torch.zeros(elements // _TENSORS) for _ in range(_TENSORS)])
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        inner = torch.optim.SGD(model.parameters(), lr=1e-3)
        optimizer = ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=1, codec=codec), group=group)
        try:
            with optimizer:
                for _ in range(_ROUNDS):
                    found[place].append(_taken_s(optimizer.step))
        except Exception as error:
            errors.append(error)

    pair = enumerate(ftopt.local_groups(2))
    threads = [threading.Thread(target=train, args=each, name=f"ftopt-calibrate-{each[0]}") for each in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise FtoptError(f"an outer step could not be measured: {errors[0]}") from errors[0]
    slower = [max(each) for each in zip(*(times[_WARM:] for times in found), strict=True)]
    return float(statistics.median(slower))


def _memory_gb_s() -> float:
    source = torch.ones(_COPIED // 4)
    target = torch.empty_like(source)
    return 2 * _COPIED / _median_s(lambda: target.copy_(source), 5, warm=1) / 1e9


def _loopback() -> tuple[float, float]:
    """Gbit/s of one TCP connection, and seconds of its round trip."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as here,
        server.accept()[0] as there,
    ):
        for end in (here, there):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def echo() -> None:
            for _ in range(_PINGS):
                there.sendall(there.recv(1))
            left = _SENT
            while left:
                left -= len(there.recv(min(left, 1 << 20)))
            there.sendall(b".")

        thread = threading.Thread(target=echo, name="ftopt-calibrate-echo")
        thread.start()

        def ping() -> None:
            here.sendall(b".")
            here.recv(1)

        latency_s = statistics.median(_taken_s(ping) for _ in range(_PINGS))
        piece = bytes(1 << 20)

        def send() -> None:
            for _ in range(_SENT >> 20):
                here.sendall(piece)
            here.recv(1)

        gbit_s = 8 * _SENT / _taken_s(send) / 1e9
        thread.join()
        return gbit_s, latency_s


def _median_s(work: Callable[[], object], times: int, *, warm: int) -> float:
    return statistics.median([_taken_s(work) for _ in range(warm + times)][warm:])


def _taken_s(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
