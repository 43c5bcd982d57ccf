from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from ftopt.step.tensors.flat import FlatView
from ftopt.step.tensors.mapped import Mapped, is_mapped
from ftopt.step.tensors.pieces import piece_of


def _mixed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3).bfloat16(), nn.Linear(3, 2), nn.Linear(2, 2).half())


def test_reading_and_writing_back_changes_no_bit() -> None:
    model = _mixed()
    view = FlatView(model)
    before = [p.detach().clone() for p in model.parameters()]
    flat = view.read(view.empty())
    view.write(torch.zeros_like(flat))
    assert not any(p.any() for p in model.parameters())
    view.write(flat)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_casting_gives_what_writing_leaves_in_the_parameters() -> None:
    view = FlatView(_mixed())
    flat = torch.randn(view.numel)
    cast = view.cast(flat)
    view.write(flat)
    assert torch.equal(view.read(view.empty()), cast)
    assert not torch.equal(cast, flat)
    assert torch.equal(view.cast(cast), cast)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casting_in_pieces_rounds_as_the_whole_in_memory_that_is_given(dtype: torch.dtype, tmp_path: Path) -> None:
    view = FlatView(nn.Linear(1, piece_of(torch.empty(0)) + 5, dtype=dtype))
    flat, memory = torch.randn(view.numel), Mapped(tmp_path)
    flat[:4] = torch.tensor([math.nan, math.inf, -0.0, 1e-45])
    expected = flat.to(dtype).float()
    for cast in (view.cast(flat), view.cast(flat, memory)):
        assert torch.equal(cast[4:], expected[4:]) and torch.equal(cast[1:4].signbit(), expected[1:4].signbit())
        assert cast[0].isnan() and torch.equal(cast[1:4], expected[1:4])
    assert is_mapped(cast)


def test_casting_copies_nothing_when_all_parameters_are_fp32() -> None:
    view = FlatView(nn.Linear(3, 2))
    flat = torch.randn(view.numel)
    assert view.cast(flat) is flat


def test_parameters_of_one_dtype_lie_together() -> None:
    view = FlatView(_mixed())
    assert view.names == ["1.bias", "1.weight", "0.bias", "0.weight", "2.bias", "2.weight"]
    assert [dtype for *_, dtype in view.places()] == [torch.float32] * 2 + [torch.bfloat16] * 2 + [torch.float16] * 2
    assert [(where.start, where.stop) for _, where in view._runs] == [(0, 8), (8, 26), (26, 32)]


def test_storage_replaced_after_the_start_is_followed() -> None:
    model = nn.Linear(3, 2)
    view = FlatView(model)
    model.weight.data = torch.full((2, 3), 7.0)
    assert (view.read(view.empty())[2:] == 7).all()


def test_channels_last_parameters_keep_their_layout_and_values() -> None:
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    view = FlatView(model)
    before = model.weight.detach().clone()
    view.write(view.read(view.empty()))
    assert torch.equal(model.weight, before)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_the_description_tells_models_apart() -> None:
    one, other = FlatView(nn.Linear(3, 2)).describe(), FlatView(nn.Linear(2, 3)).describe()
    assert one.startswith("2 tensors, 8 parameters, ") and one != other
