"""What a user passes by mistake to `wrap`, `connect` and `local_groups` is refused in plain words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ftopt


def _wrapped(**other: Any) -> ftopt.OuterOptimizer:
    model = nn.Linear(4, 2)
    inner = other.pop("inner", torch.optim.SGD(model.parameters(), lr=0.1))
    arguments = {"model": model, "method": ftopt.LocalSGD(sync_every=2), "group": ftopt.solo()} | other
    return ftopt.wrap(inner, arguments["model"], arguments["method"], group=arguments["group"])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"inner": ftopt.outer.SGD(lr=0.1)}, "inner is a SGD; must be a torch.optim.Optimizer"),
        ({"inner": None}, "inner is a NoneType; must be"),
        ({"inner": torch.optim.SGD}, "inner is a type; must be"),
        ({"model": nn.Linear(1, 1).parameters()}, "model is a generator; must be the torch.nn.Module"),
        ({"method": ftopt.DiLoCo}, "method=<class .*; must be a method of ftopt"),
        ({"method": "diloco"}, "method='diloco'; must be a method of ftopt"),
        ({"group": None}, "group=None; must be one group"),
        ({"group": ftopt.local_groups(2)}, r"group=\[.*; must be one group; use .* one of ftopt.local_groups"),
    ],
)
def test_wrap_names_the_argument_that_is_of_another_kind(other: dict[str, Any], said: str) -> None:
    with pytest.raises(ftopt.UserError, match=said):
        _wrapped(**other)


def test_a_group_is_for_one_optimizer() -> None:
    group = ftopt.solo()
    with _wrapped(group=group), pytest.raises(ftopt.UserError, match=r"group of replica 'r0' is in use"):
        _wrapped(group=group).__enter__()
    with pytest.raises(ftopt.UserError, match=r"or was closed; .* make another one"):
        _wrapped(group=group).__enter__()


@pytest.mark.parametrize("tokens", [1.5, "3", None, torch.tensor(0.5)])
def test_counts_are_whole_numbers(tokens: Any) -> None:
    with pytest.raises(ftopt.UserError, match=r"count\(tokens=.*; both must be whole numbers"):
        _wrapped().count(tokens=tokens)


def test_a_count_may_be_a_number_of_torch() -> None:
    with _wrapped() as optimizer:
        optimizer.count(tokens=torch.tensor(3))  # type: ignore[arg-type]
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert optimizer.sync() and optimizer.versions == (1,)


@pytest.mark.parametrize(
    ("n", "other", "said"),
    [
        (0, {}, "n=0; must be a whole number of replicas, at least 1"),
        ("2", {}, "n='2'; must be a whole number"),
        (True, {}, "n=True; must be a whole number"),
        (2, {"names": ["a", "b", "c"]}, "must be 2 names"),
        (1, {"names": [0]}, "replica 0: it is no string"),
        (2, {"sync": {"grace_s": 1}}, r"sync=\{'grace_s': 1\}; must be settings of ftopt"),
    ],
)
def test_local_groups_checks_its_arguments(n: Any, other: dict[str, Any], said: str) -> None:
    with pytest.raises(ftopt.UserError, match=said):
        ftopt.local_groups(n, **other)


@pytest.mark.parametrize(
    "url", ["localhost:29400", "http://localhost:99999", "http://localhost:x", "http://[::1", 29400]
)
def test_connect_refuses_what_is_no_address(url: Any) -> None:
    with pytest.raises(ftopt.UserError, match=r"must be http://HOST:PORT"):
        ftopt.connect(url)


def test_connect_refuses_names_and_settings_of_another_kind() -> None:
    with pytest.raises(ftopt.UserError, match="replica 3: it is no string"):
        ftopt.connect("http://localhost:1", 3)  # type: ignore[arg-type]
    with pytest.raises(ftopt.UserError, match="must be settings of ftopt"):
        ftopt.connect("http://localhost:1", "r0", sync={})  # type: ignore[arg-type]
