"""`undo_step` on torch's own optimizers: whole steps taken back within the bounds, and what is refused."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD, Adam, AdamW, Optimizer

import ftopt
from ftopt.errors import UserError
from tests.optimizer.undo.undoing import (
    KINDS,
    RULES,
    Held,
    assert_undone,
    give_gradients,
    optimizer,
    parameters,
    same,
)
from tests.pages import ROOT, programs

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


def _works(rule: str, kind: str, dtype: torch.dtype) -> bool:
    if kind != "fused":
        return True
    return RULES[rule][0] in (SGD, Adam, AdamW) and not (dtype == torch.bfloat16 and RULES[rule][0] is SGD)


def _stepped(made: Optimizer, times: int) -> None:
    for _ in range(times):
        give_gradients(made)
        made.step()


@pytest.mark.parametrize(
    ("recorded", "dtype"), [(True, "fp32"), (True, "fp64"), (True, "bf16"), (False, "fp32"), (False, "bf16")]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES)
def test_a_step_is_undone_within_the_bounds(rule: str, kind: str, dtype: str, recorded: bool) -> None:
    if not _works(rule, kind, DTYPES[dtype]):
        return
    torch.manual_seed(1)
    for steps in (0, 3):
        made = optimizer(rule, kind, dtype=DTYPES[dtype])
        if recorded:
            ftopt.undo.undoable(made)
        _stepped(made, steps)
        give_gradients(made)
        before, gradients = Held.by(made), [p.grad.clone() for p in parameters(made) if p.grad is not None]
        made.step()
        after = Held.by(made)
        assert not same(before.parameters, after.parameters)
        assert ftopt.undo.undo_step(made) == ftopt.undo.Undone(whole=True, reverted=5, untouched=0)
        assert_undone(made, before, after)
        assert same(gradients, [p.grad for p in parameters(made) if p.grad is not None])
        made.step()
        assert_undone(made, after, after)  # the step taken again: the same bounds, around where it led


@settings(max_examples=40, deadline=None)
@given(
    rule=st.sampled_from(sorted(RULES)),
    kind=st.sampled_from(sorted(KINDS)),
    dtype=st.sampled_from(sorted(DTYPES)),
    lr=st.floats(1e-6, 1.0),
    scales=st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=6),
    cycles=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_whatever_the_gradients_were(
    rule: str, kind: str, dtype: str, lr: float, scales: list[float], cycles: int, seed: int
) -> None:
    if not _works(rule, kind, DTYPES[dtype]):
        return
    torch.manual_seed(seed)
    made = ftopt.undo.undoable(optimizer(rule, kind, dtype=DTYPES[dtype], lr=lr))
    for scale in scales[:-1]:
        give_gradients(made, scale=scale)
        made.step()
    give_gradients(made, scale=scales[-1])
    before = Held.by(made)
    for _ in range(cycles):
        made.step()
        after = Held.by(made)
        ftopt.undo.undo_step(made)
    assert_undone(made, before, after, cycles=2 * cycles)


def test_errors_add_up_over_many_cycles() -> None:
    torch.manual_seed(3)
    for rule in ("momentum", "adamw"):
        made = ftopt.undo.undoable(optimizer(rule, "foreach"))
        _stepped(made, 3)
        give_gradients(made)
        before = Held.by(made)
        for _ in range(40):
            made.step()
            after = Held.by(made)
            ftopt.undo.undo_step(made)
        assert assert_undone(made, before, after, cycles=40) > 0


def test_the_steps_own_rates_are_used_and_not_those_that_a_scheduler_has_set_since() -> None:
    torch.manual_seed(4)
    for settings_ in ({}, {"lr": torch.tensor(0.05)}):
        made = ftopt.undo.undoable(optimizer("adamw", "loop", **settings_))
        scheduler = torch.optim.lr_scheduler.OneCycleLR(made, max_lr=[0.5, 0.5], total_steps=10)
        _stepped(made, 2)
        before_group = [{**group, "lr": float(group["lr"])} for group in made.param_groups]
        give_gradients(made)
        before = Held.by(made)
        made.step()
        after = Held.by(made)
        scheduler.step()
        ftopt.undo.undo_step(made)
        for group, then in zip(made.param_groups, before_group, strict=True):
            assert float(group["lr"]) != then["lr"]
            group.update(lr=then["lr"], betas=then["betas"])
        assert_undone(made, before, after)


def test_momentum_that_began_with_the_step_is_gone_again() -> None:
    for rule in ("momentum", "momentum, decay, dampening", "nesterov", "adamw"):
        for recorded in (True, False):
            made = optimizer(rule, "foreach")
            if recorded:
                ftopt.undo.undoable(made)
            give_gradients(made)
            made.step()
            ftopt.undo.undo_step(made)
            assert not made.state, rule


def test_moments_that_were_there_at_zero_before_a_first_step_are_kept_at_zero() -> None:
    made = ftopt.undo.undoable(optimizer("adamw", "loop"))
    give_gradients(made)
    made.step()
    ftopt.undo.undo_step(made)
    for p in parameters(made):
        made.state[p] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    held = {p: state["exp_avg"] for p, state in made.state.items()}
    made.step()
    ftopt.undo.undo_step(made)
    for p, state in made.state.items():
        assert state["exp_avg"] is held[p]
        assert float(state["step"]) == 0
        assert not state["exp_avg"].any()
        assert not state["exp_avg_sq"].any()


def test_parameters_without_a_gradient_are_left_alone() -> None:
    for rule in ("momentum", "adam"):
        made = ftopt.undo.undoable(optimizer(rule, "loop"))
        _stepped(made, 2)
        give_gradients(made)
        parameters(made)[1].grad = None
        before = Held.by(made)
        made.step()
        assert ftopt.undo.undo_step(made).untouched == 1
        now = Held.by(made)
        assert torch.equal(now.parameters[1], before.parameters[1])
        assert all(torch.equal(now.states[1][name], value) for name, value in before.states[1].items())


def test_large_tensors_are_done_in_pieces_and_strided_ones_as_a_whole() -> None:
    torch.manual_seed(5)
    large = torch.nn.Parameter(torch.randn(3, 50_000))
    strided = torch.nn.Parameter(torch.randn(6, 4, 5, 3).contiguous(memory_format=torch.channels_last))
    made = ftopt.undo.undoable(AdamW([large, strided], lr=0.1))
    _stepped(made, 1)
    give_gradients(made)
    before = Held.by(made)
    made.step()
    after = Held.by(made)
    ftopt.undo.undo_step(made)
    assert_undone(made, before, after)


def test_the_record_keeps_no_gradient_alive() -> None:
    made = ftopt.undo.undoable(optimizer("adamw", "foreach"))
    _stepped(made, 2)
    gradients = [weakref.ref(p.grad) for p in parameters(made) if p.grad is not None]
    made.zero_grad()
    gc.collect()
    assert [gradient() for gradient in gradients] == [None] * len(gradients)
    with pytest.raises(UserError, match=r"gradient that the step was taken with is gone"):
        ftopt.undo.undo_step(made)


def test_a_step_that_grad_scaler_skipped_inside_changes_nothing() -> None:
    made = ftopt.undo.undoable(optimizer("adamw", "fused"))
    _stepped(made, 1)
    before = Held.by(made)
    give_gradients(made)
    made.grad_scale, made.found_inf = torch.tensor(8.0), torch.tensor(1.0)  # type: ignore[attr-defined]
    made.step()
    assert ftopt.undo.undo_step(made).reverted == 0
    assert same(before.parameters, Held.by(made).parameters)
    made.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    made.step()  # unscales the gradients in place
    after = Held.by(made)
    ftopt.undo.undo_step(made)
    assert_undone(made, before, after)


# What is refused, with nothing changed.

Spoil = Callable[[Optimizer], Any]


def _refuses(made: Optimizer, spoil: Spoil, match: str, *, recorded: bool = True) -> None:
    if recorded:
        ftopt.undo.undoable(made)
    _stepped(made, 2)
    spoil(made)
    before = Held.by(made)
    for _ in range(2):
        with pytest.raises(UserError, match=match):
            ftopt.undo.undo_step(made)
    now = Held.by(made)
    assert same([p for p in before.parameters if p.isfinite().all()], [p for p in now.parameters if p.isfinite().all()])
    assert [s.keys() for s in now.states] == [s.keys() for s in before.states]


@pytest.mark.parametrize(
    ("rule", "more", "match"),
    [
        (
            "adam",
            {"amsgrad": True},
            r"Adam cannot be inverted in parameter group 0: amsgrad=True.* amsgrad=False can",
        ),
        ("adamw", {"betas": (0.0, 0.9)}, r"betas=\(0.0, 0.9\) leave too little .* must be 0.01 or more"),
        ("adam", {"betas": (0.9, 0.0)}, r"betas=\(0.9, 0.0\) leave too little"),
        ("momentum", {"momentum": 1e-4}, r"momentum=0.0001 leaves too little .* or 0 can be"),
        ("adamw", {"weight_decay": 15.0}, r"lr \* weight_decay = 0.75 leaves too little .* 0.5 or less"),
        ("sgd", {"weight_decay": 20.0}, r"lr \* weight_decay = 1 leaves too little"),
    ],
)
def test_settings_that_lose_what_was_before(rule: str, more: dict[str, Any], match: str) -> None:
    _refuses(optimizer(rule, "loop", **more), lambda _: None, match, recorded=False)


def test_a_differentiable_step_is_refused() -> None:
    made = optimizer("adam", "loop")
    _stepped(made, 1)
    made.param_groups[1]["differentiable"] = True
    with pytest.raises(UserError, match="in parameter group 1: differentiable=True"):
        ftopt.undo.undo_step(made)


def _drop_gradients(made: Optimizer) -> None:
    made.zero_grad()


def _clip_afterwards(made: Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(parameters(made), 0.1)


def _new_gradient(made: Optimizer) -> None:
    p = parameters(made)[2]
    assert p.grad is not None
    p.grad = p.grad.clone()


def _change_a_parameter(made: Optimizer) -> None:
    with torch.no_grad():
        parameters(made)[3].add_(1.0)


def _load(made: Optimizer) -> None:
    made.load_state_dict(copy.deepcopy(made.state_dict()))


def _nan(made: Optimizer) -> None:
    p = parameters(made)[0]
    assert p.grad is not None
    p.grad[0, 0] = float("nan")
    made.step()


@pytest.mark.parametrize("rule", ["momentum", "adamw"])
@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (_drop_gradients, r"is gone or has been changed: parameter 0 \(7, 5\) of group 0.* and 2 more; call it before"),
        (_clip_afterwards, r"is gone or has been changed"),
        (_new_gradient, r"changed: parameter 2 \(\) of group 0; "),
        (_change_a_parameter, r"parameter 0 \(2, 3, 4\) of group 1 has been changed since the step"),
        (_load, r"no step to undo: its state has been loaded since"),
        (_nan, r"NaN or Inf"),
    ],
)
def test_what_the_record_finds_changed(rule: str, spoil: Spoil, match: str) -> None:
    _refuses(optimizer(rule, "foreach"), spoil, match)


def test_gradients_set_to_zero_in_place_are_not_the_steps() -> None:
    _refuses(optimizer("sgd", "loop"), lambda made: made.zero_grad(set_to_none=False), "has been changed")


def test_without_a_record_missing_or_larger_gradients_are_found_out() -> None:
    _refuses(optimizer("sgd", "loop"), _drop_gradients, "is gone", recorded=False)
    made = optimizer("adamw", "loop")
    _stepped(made, 3)
    last = parameters(made)[-1]
    last.grad = None
    with pytest.raises(UserError, match=r"is gone or has been changed: parameter 1 \(64,\) of group 1; "):
        ftopt.undo.undo_step(made)
    give_gradients(made, scale=1e3)
    with pytest.raises(UserError, match="is not the one that the step was taken with"):
        ftopt.undo.undo_step(made)


def test_without_a_record_a_schedulers_rate_is_not_guessed() -> None:
    made = optimizer("adamw", "loop")
    torch.optim.lr_scheduler.ConstantLR(made)
    _stepped(made, 1)
    with pytest.raises(UserError, match=r"call ftopt\.undo\.undoable\(optimizer\) before training"):
        ftopt.undo.undo_step(made)


def test_without_a_record_dampening_equal_to_momentum_hides_a_first_step() -> None:
    made = optimizer("momentum", "loop", dampening=0.9)
    _stepped(made, 1)
    with pytest.raises(UserError, match="as after a first step, or after two alike"):
        ftopt.undo.undo_step(made)


def test_a_step_is_undone_once() -> None:
    for recorded in (True, False):
        made = optimizer("adamw", "foreach")
        if recorded:
            with pytest.raises(UserError, match="none has been taken since its steps are recorded"):
                ftopt.undo.undo_step(ftopt.undo.undoable(made))
        _stepped(made, 2)
        ftopt.undo.undo_step(made)
        with pytest.raises(UserError, match="the last one is undone already; it goes one step back"):
            ftopt.undo.undo_step(made)
        made.step()
        ftopt.undo.undo_step(made)


def test_without_a_record_other_optimizers_are_refused() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    made = torch.optim.Adamax([p])
    made.step()
    with pytest.raises(UserError, match=r"a step of Adamax cannot be inverted in parameter group 0: .*undoable"):
        ftopt.undo.undo_step(made)
    odd = SGD([torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1)
    odd.param_groups[0]["params"][0].grad = torch.ones(2, dtype=torch.complex64)
    odd.step()
    with pytest.raises(UserError, match="real and dense ones"):
        ftopt.undo.undo_step(odd)


def test_fused_sgd_of_half_precision_on_a_cpu_has_no_inverse_as_torch_leaves_tensors_as_they_are() -> None:
    made = optimizer("momentum", "fused", dtype=torch.bfloat16)
    _refuses(made, lambda _: None, r"pytorch issue 191763\); foreach=True can be undone", recorded=False)


def test_the_example_in_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [example] = [block for block in programs(ROOT / "docs" / "checkpoints.md") if "undo=True" in block.text]
    exec(example.text, {})
    assert capsys.readouterr().out == "Undone(whole=True, reverted=2, untouched=0)\n"
