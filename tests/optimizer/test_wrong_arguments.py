"""What a user passes by mistake to `wrap`, `connect` and `local_groups` is refused in plain words."""

from __future__ import annotations

from typing import Any

import numpy
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


def _step(optimizer: ftopt.OuterOptimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize(
    "wrong",
    [
        1.5, 2.0, "3", None, True, [3], float("nan"), numpy.float32(3), numpy.bool_(True), numpy.ones(1),
        torch.tensor(0.5), torch.tensor(3.0), torch.tensor(True), torch.tensor([3]), torch.tensor([1, 2]),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("what", ["tokens", "samples"])
def test_counts_are_whole_numbers(what: str, wrong: Any) -> None:
    with pytest.raises(ftopt.UserError, match=rf"(?s)count\({what}=.*\); must be a whole number"):
        _wrapped().count(**{what: wrong})


@pytest.mark.parametrize(
    "number", [3, torch.tensor(3), torch.tensor(3, dtype=torch.int8), numpy.int64(3), numpy.array(3)]
)
def test_a_count_may_be_a_number_of_torch_or_numpy(number: Any) -> None:
    with _wrapped(method=ftopt.LocalSGD(sync_every=1, weights="tokens")) as optimizer:
        optimizer.count(tokens=number, samples=number)
        optimizer.count(tokens=number)
        _step(optimizer)
        assert optimizer.versions == (1,) and optimizer._core.started().counters.tokens == 6


def test_a_count_that_is_negative_or_beyond_what_a_message_holds_is_refused() -> None:
    with _wrapped() as optimizer:
        for what in ("tokens", "samples"):
            with pytest.raises(ftopt.UserError, match=rf"count\({what}=-1\); must be 0 or more"):
                optimizer.count(**{what: -1})
            with pytest.raises(ftopt.UserError, match=rf"9007199254740992 {what} in all; at most 2\^53 - 1"):
                optimizer.count(**{what: 1 << 53})
        optimizer.count(tokens=(1 << 53) - 2)
        _step(optimizer)
        optimizer.count(tokens=1)
        with pytest.raises(ftopt.UserError, match="9007199254740992 tokens in all"):
            optimizer.count(tokens=1)
        _step(optimizer)
        assert optimizer.versions == (1,)


@pytest.mark.parametrize("wrong", ["0.5", [0.5], True, torch.ones(2), torch.ones(()) * 1j, torch.ones(0)], ids=repr)
def test_a_loss_is_one_number(wrong: Any) -> None:
    with pytest.raises(ftopt.UserError, match=r"count\(loss=.*; must be one real number; use loss.mean"):
        _wrapped().count(loss=wrong, tokens=3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_loss_that_is_not_finite_is_left_out_of_the_mean(kind: Any, bad: float) -> None:
    seen: list[float | None] = []
    trigger = ftopt.triggers.AdaComm(initial=3, least=3, most=3)
    optimizer = _wrapped(method=ftopt.LocalSGD(sync_every=3, trigger=trigger))
    with optimizer:
        for loss in (2.0, bad, 4.0, 5.0, 5.0, 5.0):
            optimizer.count(loss=kind(loss))
            _step(optimizer)
            fragment = optimizer._core.started().fragments[0]
            seen.append(fragment.trigger_metrics.agreed(fragment.applied.outer).loss)
    assert seen == [None, None, 3.0, 3.0, 3.0, 5.0]


@pytest.mark.parametrize("method", [ftopt.LocalSGD(sync_every=2), ftopt.SyncSGD()], ids=lambda method: method.name)
@pytest.mark.parametrize("rate", [float("nan"), float("inf"), "0.1", torch.tensor(float("nan")), torch.ones(2), True])
def test_a_rate_that_is_no_finite_number_is_refused_before_the_step(method: ftopt.Method, rate: Any) -> None:
    model = nn.Linear(4, 2)
    with _wrapped(inner=torch.optim.SGD(model.parameters(), lr=0.1), model=model, method=method) as optimizer:
        _step(optimizer)
        before = [p.clone() for p in model.parameters()]
        optimizer.param_groups[0]["lr"] = rate
        with pytest.raises(ftopt.UserError, match=r"lr=.* in a parameter group; must be a finite number; mend"):
            _step(optimizer)
        assert optimizer.local_steps == 1 and all(map(torch.equal, before, model.parameters()))
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
        _step(optimizer)
        assert optimizer.local_steps == 2


@pytest.mark.parametrize(
    ("weights", "counted", "said"),
    [
        ("tokens", [5, 0, 5], "for 1 of 2 inner steps so far: this contribution weighs 5;"),
        ("tokens_per_step", [0, 0, 0], "for 2 of 2 inner steps so far: this contribution weighs 2;"),
    ],
)
def test_weights_by_tokens_that_nobody_counts_are_told_of_once(weights: str, counted: list[int], said: str) -> None:
    with _wrapped(method=ftopt.LocalSGD(sync_every=2, weights=weights)) as optimizer:
        with pytest.warns(UserWarning, match=rf"local_sgd\(weights='{weights}'\).*{said}.*optimizer.count") as told:
            for tokens in (*counted, *counted):
                optimizer.count(tokens=tokens)
                _step(optimizer)
        assert len(told) == 1


def test_weights_of_nothing_since_no_tokens_are_counted_are_told_of() -> None:
    optimizer = _wrapped(method=ftopt.LocalSGD(sync_every=2, weights="tokens"))
    with pytest.warns(UserWarning, match="for 2 of 2 inner steps so far: the contribution weighs nothing") as told:
        optimizer.__enter__()
        for _ in range(2):
            _step(optimizer)
        optimizer.close(flush=False)
    assert len(told) == 1


def test_weights_by_tokens_that_are_counted_are_not_warned_of() -> None:
    for method in (ftopt.LocalSGD(sync_every=2, weights="tokens"), ftopt.LocalSGD(sync_every=2)):
        with _wrapped(method=method) as optimizer:
            for _ in range(4):
                optimizer.count(tokens=3 * (method.weights == "tokens"))
                _step(optimizer)
            assert optimizer.versions == (2,)


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
