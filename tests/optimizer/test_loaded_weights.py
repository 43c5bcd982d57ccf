"""Weights that user code loads into the model after the join: they are no training, and go to no other replica."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _pytest.mark.structures import ParameterSet
from torch import Tensor, nn

import ftopt
from ftopt.errors import UserError
from ftopt.events import Event
from ftopt.methods import PAFT, DecoupledDiLoCo, DiLoCo, LocalSGD, Method, SlowMo, StreamingDiLoCo, SyncSGD
from ftopt.optimizer import ReplicaOptimizer
from tests.optimizer.running import PATIENT, together
from tests.problems import seeded

PARAMETERS: list[Method] = [
    LocalSGD(sync_every=4),
    DiLoCo(sync_every=4),
    SlowMo(sync_every=4),
    StreamingDiLoCo(sync_every=4, delay=2, fragments=ftopt.fragments.Strided(n=2), wait_for_result_s=60.0),
    DecoupledDiLoCo(sync_every=4, delay=1, fragments=ftopt.fragments.Balanced(n=2), wait_for_result_s=60.0),
]
GRADIENTS: list[Method] = [SyncSGD(), PAFT(sync_every=3), PAFT(sync_every=3, delay=1)]
IDS = [f"{method.name}, delay {method.overlap.delay}" for method in (*PARAMETERS, *GRADIENTS)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.b(torch.tanh(self.a(x))))


def far(model: nn.Module) -> dict[str, Tensor]:
    """Weights that no training leads to."""
    return {name: value + 100.0 for name, value in model.state_dict().items()}


def loads_all(model: Net) -> None:
    model.load_state_dict(far(model))


def loads_a_part(model: Net) -> None:
    """An adapter, say."""
    model.load_state_dict({k: v for k, v in far(model).items() if k.startswith("b.")}, strict=False)


def loads_a_module(model: Net) -> None:
    model.b.load_state_dict(far(model.b))


def fails_to_load(model: Net) -> None:
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**far(model), "c": torch.ones(1)})


LOADS: list[Callable[[Net], None]] = [loads_all, loads_a_part, loads_a_module, fails_to_load]


def train(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()


def wrapped(method: Method, group: ftopt.ReplicaGroup | None = None, **more: Any) -> tuple[ReplicaOptimizer, Net]:
    model = Net()
    group = group or ftopt.solo()
    return ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.05), model, method, group=group, **more), model


def size(model: nn.Module) -> float:
    return max(float(p.detach().abs().max()) for p in model.parameters())


STEPS_BEFORE = (0, 3, 5, 6)


def cases() -> Iterator[ParameterSet]:
    """The whole product; by default, each method with two loads, after one number of steps each."""
    for a, (method, name) in enumerate(zip((*PARAMETERS, *GRADIENTS), IDS, strict=True)):
        for b, load in enumerate(LOADS):
            for c, steps in enumerate(STEPS_BEFORE):
                few = (a + b + c) % len(STEPS_BEFORE) == 0 and (b - a) % len(LOADS) < 2
                marks = [] if few else [pytest.mark.slow]
                yield pytest.param(method, load, steps, marks=marks, id=f"{name}-{load.__name__}-{steps}")


@pytest.mark.parametrize(("method", "load", "steps_before"), list(cases()))
def test_loaded_weights_reach_no_other_replica(method: Method, load: Callable[[Net], None], steps_before: int) -> None:
    events: list[Event] = []
    policy = replace(PATIENT, outlier_ratio=None)  # it would be noticed otherwise, at times
    groups, both = ftopt.local_groups(2, policy=policy, on_event=events.append), threading.Barrier(2, timeout=60.0)

    def replica(m: int) -> list[float]:
        optimizer, model = wrapped(method, groups[m])
        sizes = []
        with optimizer:
            train(optimizer, model, steps_before)
            if m == 0:
                load(model)
                assert size(model) > 50
                train(optimizer, model, 1)  # of which none is taken
            sizes.append(size(model))
            train(optimizer, model, 12)
            sizes.append(size(model))
            both.wait()
            optimizer.sync()
            sizes.append(size(model))
            both.wait()
            assert optimizer.local_steps == steps_before + 12
        sizes.append(size(model))
        return sizes

    with pytest.warns(UserWarning, match="weights were loaded") as warned:
        sizes = together([lambda m=m: replica(m) for m in range(2)])  # type: ignore[misc]
    assert len(warned) == 1 and "load them before `with optimizer:`" in str(warned[0].message)
    assert max(max(each) for each in sizes) < 2.0, sizes
    dropped = [e for e in events if e.event == "discarded"]
    assert all(e.replica == "r0" and e.data is not None and e.data["reason"] == "loaded" for e in dropped)
    for fragment in {e.fragment for e in events if e.event == "decide"} if method in PARAMETERS else ():
        members = [
            m for e in events if e.event == "decide" and e.fragment == fragment and e.data for m in e.data["members"]
        ]
        gone = sum(e.data["steps"] for e in dropped if e.fragment == fragment and e.data)
        assert sum(steps for _, _, steps, *_ in members) + gone == 2 * (steps_before + 12)


@pytest.mark.parametrize("method", [*PARAMETERS, *GRADIENTS], ids=IDS)
def test_weights_that_are_looked_at_and_taken_out_again_change_nothing(method: Method) -> None:
    optimizer, model = wrapped(method)
    plain, unlooked = wrapped(method)
    with optimizer, plain:
        for _ in range(9):
            own = copy.deepcopy(model.state_dict())
            model.load_state_dict(far(model))
            assert size(model) > 50
            model.load_state_dict(own)
            train(optimizer, model, 1)
            train(plain, unlooked, 1)
        assert optimizer.local_steps == 9
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), unlooked.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # in one process it is
@pytest.mark.parametrize("method", PARAMETERS, ids=IDS[: len(PARAMETERS)])
def test_weights_that_a_distributed_checkpoint_reads_into_the_parameters_are_loaded(
    method: Method, tmp_path: Path
) -> None:
    """It writes into the tensors of the state dict, which are the model's, before the model loads them."""
    optimizer, model = wrapped(method)
    dcp.save({"model": far(model)}, checkpoint_id=tmp_path, no_dist=True)
    with optimizer:
        for _ in range(3):
            train(optimizer, model, 3)
            optimizer.sync(propose=False)  # else a change in place may reach the contribution that is being frozen
            state = {"model": model.state_dict()}
            dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
            assert size(model) > 50
            model.load_state_dict(state["model"])
            with pytest.warns(UserWarning, match="weights were loaded"):
                train(optimizer, model, 1)
            assert size(model) < 2.0
        optimizer.sync()
        with optimizer.global_parameters():
            assert size(model) < 2.0


def test_loaded_before_the_join_they_are_what_the_job_starts_from() -> None:
    optimizer, model = wrapped(DiLoCo(sync_every=4))
    model.load_state_dict(far(model))
    with optimizer:
        train(optimizer, model, 1)
        assert size(model) > 50


@pytest.mark.parametrize("method", [DiLoCo(sync_every=4), SyncSGD()], ids=lambda method: method.name)
def test_the_best_weights_loaded_at_the_end_are_in_the_model_and_not_in_the_job(method: Method) -> None:
    groups, both = ftopt.local_groups(2, policy=PATIENT), threading.Barrier(2, timeout=60.0)

    def replica(m: int) -> tuple[float, float]:
        optimizer, model = wrapped(method, groups[m])
        with optimizer:
            train(optimizer, model, 6)
            both.wait()
            if m == 0:
                model.load_state_dict(far(model))
        anchor = optimizer._core.started().fragments[0].state.anchor
        return size(model), float(anchor.abs().max())

    with pytest.warns(UserWarning, match="then the loaded ones are in the model again"):
        (loaded, first), (own, second) = together([lambda m=m: replica(m) for m in range(2)])  # type: ignore[misc]
    assert loaded > 50 and max(first, own, second) < 2.0


def test_a_copy_of_a_model_in_a_job_loads_what_it_likes() -> None:
    optimizer, model = wrapped(DiLoCo(sync_every=4))
    with optimizer:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other.load_state_dict(far(model))
            assert size(other) > 50
        train(optimizer, model, 1)
        assert optimizer.pending_steps == 1


def test_weights_loaded_into_the_outer_parameters_go_with_them() -> None:
    optimizer, model = wrapped(DiLoCo(sync_every=4))
    with optimizer:
        train(optimizer, model, 2)
        with optimizer.global_parameters():
            model.load_state_dict(far(model))
        train(optimizer, model, 1)
        assert optimizer.pending_steps == 3 and size(model) < 2.0


def test_a_frozen_base_that_is_given_its_own_tensors_is_not_loaded() -> None:
    """As LoRA's, beside adapters that are loaded back."""
    model = Net()
    model.a.requires_grad_(False)
    method = DiLoCo(sync_every=9)
    with ftopt.wrap(torch.optim.SGD(model.b.parameters(), lr=0.05), model, method, group=ftopt.solo()) as optimizer:
        train(optimizer, model, 2)
        own = model.state_dict()
        model.load_state_dict({name: value.clone() if name.startswith("b.") else value for name, value in own.items()})
        train(optimizer, model, 1)
        assert optimizer.pending_steps == 3


@pytest.mark.parametrize("call", ["step", "sync"])
def test_the_warning_names_the_line_of_the_script(call: str) -> None:
    optimizer, model = wrapped(DiLoCo(sync_every=4))
    with optimizer, pytest.warns(UserWarning, match="weights were loaded") as warned:
        model.load_state_dict(far(model))
        optimizer.step() if call == "step" else optimizer.sync()
    assert warned[0].filename == __file__


def test_a_step_before_loaded_weights_cannot_be_undone() -> None:
    optimizer, model = wrapped(DiLoCo(sync_every=4), undo=True)
    with optimizer:
        train(optimizer, model, 2)
        model.load_state_dict(far(model))
        with (
            pytest.warns(UserWarning, match="weights were loaded"),
            pytest.raises(UserError, match="no step"),
        ):
            ftopt.undo.undo_step(optimizer)


def test_a_closure_computes_the_gradient_anew() -> None:
    optimizer, model = wrapped(DiLoCo(sync_every=4))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(3, 4)).square().mean()
        loss.backward()
        return loss

    with optimizer:
        model.load_state_dict(far(model))
        with pytest.warns(UserWarning, match="weights were loaded"):
            assert optimizer.step(closure) < 10
        assert optimizer.pending_steps == 1


def test_an_inner_state_that_replicas_have_alike_is_not_loaded_by_one() -> None:
    model = Net()
    optimizer = ftopt.wrap(torch.optim.AdamW(model.parameters()), model, SyncSGD(), group=ftopt.solo())
    with optimizer:
        train(optimizer, model, 1)
        saved = copy.deepcopy(optimizer.state_dict())
        train(optimizer, model, 1)
        with pytest.warns(UserWarning, match="the inner optimizer's state is not loaded"):
            optimizer.load_state_dict(saved)
        assert optimizer.state[model.a.weight]["step"] == 2
    optimizer.load_state_dict(saved)
    assert optimizer.state[model.a.weight]["step"] == 1


def test_units_of_steps_that_a_load_has_dropped_are_used_again() -> None:
    class Rows:
        random = False

        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Tensor:
            return torch.full((4,), index / 12)

    (group,) = ftopt.local_groups(1)
    optimizer, model = wrapped(LocalSGD(sync_every=4), group)
    loader, used = ftopt.DataLoader(Rows(), 1, group=group), 0
    with optimizer, pytest.warns(UserWarning, match="2 pending inner steps are dropped"):
        for rows in loader:
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
            used += 1
            if used == 6:
                model.load_state_dict(far(model))
    assert used == 14 and size(model) < 2.0


@pytest.mark.parametrize("method", GRADIENTS, ids=IDS[len(PARAMETERS) :])
@pytest.mark.parametrize("what", [*LOADS[:3], "global_parameters"])
def test_what_is_in_the_model_for_a_while_goes_to_no_joiner(method: Method, what: Callable[[Net], None] | str) -> None:
    """A peer that joins meanwhile fetches the model and the inner state that the replicas have agreed on."""
    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with ftopt.wrap(inner, model, method, group=ftopt.solo()) as optimizer:

        def step() -> None:
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(4):
            step()
        fragment = optimizer._core.started().gradients
        assert fragment is not None
        live = fragment.live

        def served() -> str:
            with live.at_rest():
                return fragment.serve()[0]

        own, before = served(), optimizer.digest()
        compared = fragment.live.compared()
        if isinstance(what, str):
            with optimizer.global_parameters():
                assert served() == own
                assert fragment.live.compared() == compared
        else:
            what(model)
            assert served() == own
            assert fragment.live.compared() == compared
            assert optimizer.digest() == before
            with pytest.warns(UserWarning, match="weights were loaded"):
                step()
            assert served() == own, "that step is dropped"
        step()
        assert served() != own
