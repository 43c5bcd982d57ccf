"""Memory is used again when nobody looks at it any more, and not before."""

from __future__ import annotations

import gc
import signal
import time
import weakref

import pytest
import torch
from torch import Tensor, nn

import ftopt
from ftopt.step.tensors.memory import _KEPT, Memory

CPU = torch.device("cpu")


def test_memory_is_used_again_when_the_last_view_of_it_is_gone() -> None:
    memory = Memory()
    tensor = memory.take(1000, CPU)
    address = tensor.data_ptr()
    view, array = tensor.view(10, 100)[3], tensor.numpy()
    del tensor
    assert memory.take(1000, CPU).data_ptr() != address
    del view
    assert memory.take(1000, CPU).data_ptr() != address
    array[:] = 7.0
    del array
    held = [memory.take(1000, CPU) for _ in range(_KEPT)]
    assert address in {tensor.data_ptr() for tensor in held}


def test_a_state_that_is_superseded_is_let_go_of() -> None:
    model = nn.Linear(8, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=1), group=ftopt.solo()) as optimizer:
        states = []
        for _ in range(3):
            state = optimizer._core.started().fragments[0].state
            states += [weakref.ref(state.anchor), weakref.ref(state.outer["momentum"])]
            del state
            model(torch.ones(8)).sum().backward()
            optimizer.step()
        gc.collect()
        assert [state() for state in states] == [None] * 6


def test_memory_goes_to_sizes_near_its_own() -> None:
    memory = Memory()
    address = _taken_and_given(memory, 1000)
    assert memory.take(700, CPU).data_ptr() != address
    assert memory.take(1001, CPU).data_ptr() != address
    nearly = memory.take(900, CPU)
    assert nearly.data_ptr() == address and nearly.numel() == 900


def test_only_a_few_blocks_are_kept() -> None:
    memory = Memory()
    tensors = [memory.take(1000, CPU) for _ in range(2 * _KEPT)]
    tensors.clear()
    assert len(memory._free) == _KEPT


def _taken_and_given(memory: Memory, numel: int) -> int:
    return memory.take(numel, CPU).data_ptr()


def test_ctrl_c_within_a_finalizer_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, before = Memory(), signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(self: Memory, block: Tensor) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Memory, "_give", interrupted)
    tensor = memory.take(1000, torch.device("cpu"))
    try:
        with pytest.raises(KeyboardInterrupt):
            del tensor
            for _ in range(3000):  # a pending interrupt does not end a sleep
                time.sleep(0.01)
    finally:
        signal.signal(signal.SIGINT, before)
