"""Several inner optimizers behind one: states and state dicts, as trainers and torch's own checkpoints use them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)

import ftopt
from tests.optimizer.test_loaded_weights import Net, train
from tests.versions import needs_muon

pytestmark = needs_muon


def muon_and_adamw(model: Net) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return [
        torch.optim.Muon(matrices, lr=0.01),
        torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=0.01),
    ]


def wrapped() -> tuple[ftopt.ReplicaOptimizer, Net, list[torch.optim.Optimizer]]:
    model = Net()
    inner = muon_and_adamw(model)
    method = ftopt.LocalSGD(sync_every=100)
    return ftopt.wrap(inner, model, method, group=ftopt.solo()), model, inner


def test_looking_at_the_state_of_a_parameter_adds_nothing_to_the_other_optimizer() -> None:
    optimizer, model, inner = wrapped()
    with optimizer:
        train(optimizer, model, 2)
        for p in model.parameters():
            assert optimizer.state[p]
        assert [len(each.state) for each in inner] == [2, 2]
        assert list(optimizer.state) == [model.a.weight, model.b.weight, model.a.bias, model.b.bias]
        assert model.a.weight in optimizer.state and nn.Parameter(torch.ones(1)) not in optimizer.state
        assert len(optimizer.state) == 4 and optimizer.state.get(nn.Parameter(torch.ones(1))) is None
        loaded, _, _ = wrapped()
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(loaded.state_dict()["state"][n].keys() == optimizer.state_dict()["state"][n].keys() for n in range(4))


def test_the_state_of_a_parameter_is_made_and_set_in_its_own_optimizer() -> None:
    optimizer, model, inner = wrapped()
    optimizer.state[model.a.bias]["step"] = torch.tensor(3.0)
    optimizer.state[model.a.weight] = {"momentum_buffer": torch.ones(4, 4)}
    assert inner[1].state[model.a.bias]["step"] == 3
    assert [list(each.state) for each in inner] == [[model.a.weight], [model.a.bias]]
    del optimizer.state[model.a.weight]
    assert not inner[0].state
    with pytest.raises(KeyError):
        optimizer.state[nn.Parameter(torch.ones(1))]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.filterwarnings("ignore:the state dict has no key 'ftopt'")
def test_distributed_checkpoints_hold_and_restore_them(flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    optimizer, model, inner = wrapped()
    other, other_model, other_inner = wrapped()
    with optimizer:
        train(optimizer, model, 2)
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
        weights, _ = get_state_dict(model, optimizer, options=options)
        other_model.load_state_dict(weights)
    with other:
        set_optimizer_state_dict(other_model, other, saved, options=options)
        for one, two in zip(inner, other_inner, strict=True):
            for mine, theirs in zip(one.state.values(), two.state.values(), strict=True):
                assert mine.keys() == theirs.keys()
                assert all(torch.equal(torch.as_tensor(mine[k]), torch.as_tensor(theirs[k])) for k in mine)
        train(other, other_model, 1)
