"""Work in pieces gives the bits of the same work on the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ftopt
from ftopt.methods import Method
from ftopt.methods.method import ReplicaView, Round
from ftopt.step.outer.frozen import flat_parts
from ftopt.step.tensors import pieces
from ftopt.step.tensors.digest import block_sums
from ftopt.step.tensors.memory import Memory

N = 2 * pieces._ON_CPU + 777
METHODS: dict[str, Method] = {
    "local_sgd": ftopt.LocalSGD(sync_every=1),
    "nesterov": ftopt.DiLoCo(sync_every=1),
    "scheduled": ftopt.DiLoCo(
        sync_every=1, outer=ftopt.outer.SGD(momentum=0.9, schedule=ftopt.outer.ConstantRate(warmup=3))
    ),
    "adam": ftopt.DiLoCo(sync_every=1, outer=ftopt.outer.Adam()),
    "slowmo": ftopt.SlowMo(sync_every=1),
}
ROUND = Round(0, 1, 0, (), scalars=((0.1,),))


@pytest.mark.parametrize("name", METHODS)
def test_an_outer_step_in_pieces_is_that_of_the_whole_and_so_are_its_sums(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(pieces, "_AT_ONCE", 1)  # with kernels, too, if another test has loaded them
    method, anchor, mean = METHODS[name], torch.randn(N), torch.randn(N)
    state = {k: torch.rand_like(t) for k, t in method.init(anchor).items()}
    expected, expected_state = method.outer_step(anchor, state, mean.clone(), ROUND)
    steps = pieces.Steps(method, anchor, state, mean, ROUND, Memory())
    steps.there(pieces._ON_CPU - 7, 2 * pieces._ON_CPU)  # the mean comes in while it is at work, in any order
    steps.there(2 * pieces._ON_CPU + 5, N)
    assert torch.equal(steps.waiting(), mean[2 * pieces._ON_CPU :])
    made, made_state, (of_anchor, of_state) = steps.finish()
    assert torch.equal(made, expected)
    assert torch.equal(of_anchor, block_sums(made))
    assert made_state.keys() == expected_state.keys()
    assert all(torch.equal(made_state[k], t) for k, t in expected_state.items())
    assert all(torch.equal(found, block_sums(made_state[k])) for k, found in of_state.items())
    assert of_state.keys() == {k for k, t in made_state.items() if t.dim()}


@pytest.mark.parametrize("lossy", [True, False])
@pytest.mark.parametrize("name", METHODS)
def test_a_payload_in_pieces_is_that_of_the_whole(name: str, lossy: bool) -> None:
    torch.manual_seed(0)
    method, anchor = METHODS[name], torch.randn(N)
    start = anchor.bfloat16().float()
    mine = ReplicaView(anchor=anchor, start=start, params=torch.randn(N), layout=(), lossy=lossy)
    expected, found = method.payload(mine, torch.empty(N)).mul_(0.3), torch.empty(N)
    parts = flat_parts(mine.params, 1 << 16)
    measured = pieces.Measured()
    pieces.payload(method, replace(mine, params=torch.empty(0)), parts, found, 0.3, measured)
    assert torch.equal(found, expected)
    assert measured.finite and measured.norm == pytest.approx(float((start - mine.params).double().norm()))


def test_many_small_tensors_are_read_together_in_order_and_nothing_else_is_copied() -> None:
    few, most = pieces._FEW - 1, pieces._ON_CPU
    sizes = [3, 0, few, most, few, 5, *[few] * (most // few), most // 2, 7]
    flat = torch.randn(sum(sizes))
    tensors = torch.split(flat, sizes)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    places = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    found = list(pieces.gathered(zip(tensors, places, strict=True)))
    assert torch.equal(torch.cat([part for part, _ in found]), flat)
    assert all(torch.equal(part, flat[where]) for part, where in found)
    assert all(part.numel() <= most for part, _ in found) and len(found) < len(sizes) // 2 + 4
    begins = {part.data_ptr() for part, _ in found}
    assert all(t.data_ptr() in begins for t in tensors if t.numel() > few)


def test_what_is_copied_is_measured_also_if_it_is_not_finite_or_overflows() -> None:
    a, kept = torch.randn(N), torch.empty(N)

    def measured() -> pieces.Measured:
        return pieces.copy(flat_parts(a, 1 << 16), torch.zeros(N), kept, N, N)

    found = measured()
    assert torch.equal(kept, a)
    assert found.finite and found.norm == pytest.approx(float(torch.linalg.vector_norm(a.double())))
    assert found.peak == pytest.approx(float(a.abs().max()))
    a[-1] = 3e38
    assert measured().finite
    assert measured().norm == pytest.approx(3e38) and measured().peak == pytest.approx(3e38)
    a.normal_().mul_(1e-30)
    assert measured().norm == pytest.approx(float(a.double().norm()), rel=1e-5, abs=0) and measured().norm > 0
    a[-1] = torch.nan
    assert not measured().finite
